"""A mesh made, ticketed, joined and used with the commands that people type, as real processes on loopback."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from meshnet_core.mesh_folder import MeshFolder
from meshnet_process import run, running, wait_until

KEY = "k-of-the-attic-0123456789"


def anyone_of(home: str) -> ssl.SSLContext:
    """Somebody who knows the authority of the mesh at ``home``, and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(MeshFolder(Path(home) / "mesh").authority_path)
    return context


@pytest.mark.long
def test_a_machine_that_joined_is_let_in_and_no_other(tmp_path: Path) -> None:
    kitchen, study, stranger = (str(tmp_path / name) for name in ("kitchen", "study", "stranger"))
    made = run("mesh", "create", "--name", "attic", MESHNET_HOME=kitchen)
    assert made.returncode == 0
    assert "meshnet mesh ticket" in made.stdout
    assert run("mesh", "create", MESHNET_HOME=kitchen).returncode == 2
    with running(tmp_path / "tracker.log", "tracker", "--port", "0", MESHNET_HOME=kitchen) as tracker:
        url = tracker.ready()
        assert url.startswith("https://127.0.0.1:")

        ticket = run("mesh", "ticket", "--tracker", url, MESHNET_HOME=kitchen)
        assert ticket.stdout.startswith("meshnet-")
        assert "for one machine, within 1h" in ticket.stderr
        joined = run("join", ticket.stdout.strip(), "--machine", "study", MESHNET_HOME=study)
        assert joined.stdout.startswith(f"joined through {url}"), joined.stderr
        told = run("mesh", "show", MESHNET_HOME=study).stdout
        for part in ("attic", "study", url, "lets machines in: no"):
            assert part in told
        shown = json.loads(run("mesh", "show", "--json", MESHNET_HOME=study).stdout)
        assert (shown["machine"], shown["trackers"], shown["lets_machines_in"]) == ("study", [url], False)

        late = run("join", "-", stdin=ticket.stdout, MESHNET_HOME=stranger)
        assert late.returncode == 1
        assert "as many have used it" in late.stderr
        assert not MeshFolder(Path(stranger) / "mesh").is_there()

        # No address is typed: the machine knows where its mesh's tracker is.
        arguments = ("gateway", "--port", "0")
        with running(tmp_path / "gateway.log", *arguments, MESHNET_HOME=study, MESHNET_API_KEY=KEY) as gateway:
            api = gateway.ready()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{api}/models", timeout=10)  # noqa: S310 - our own gateway
            request = urllib.request.Request(f"{api}/models", headers={"Authorization": f"Bearer {KEY}"})  # noqa: S310
            with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
                assert json.load(response)["data"] == []
            chat = run("chat", "--url", api, "-m", "hi", MESHNET_API_KEY=KEY)
            assert "serves no complete model yet" in chat.stderr
            refused = run("chat", "--url", api, "-m", "hi")
            assert "takes requests with an API key alone" in refused.stderr
            assert gateway.stop() == 0

        # Over HTTPS, where a certificate is given; here the mesh's own, which its other machines know.
        files = [f"--tls-{one}={kitchen}/mesh/{one}.pem" for one in ("certificate", "key")]
        with running(tmp_path / "https.log", *arguments, *files, MESHNET_HOME=study) as gateway:
            api = gateway.ready()
            assert api.startswith("https://127.0.0.1:")
            health = api.replace("/v1", "/healthz")
            with urllib.request.urlopen(health, timeout=10, context=anyone_of(kitchen)) as response:  # noqa: S310
                assert json.load(response)["status"] == "ok"
            assert gateway.stop() == 0

        outside = run("gateway", "--tracker", url, "--port", "0", MESHNET_HOME=stranger)
        assert outside.returncode == 2
        assert "meshnet join TICKET" in outside.stderr
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/v1/snapshot", timeout=10, context=anyone_of(kitchen))  # noqa: S310 - our own tracker
        wait_until(lambda: "turned 127.0.0.1 away (no_certificate)" in tracker.output())
        assert "turned 127.0.0.1 away (ticket)" in tracker.output()
        assert tracker.stop() == 0
