"""Several hosts, each a network namespace: one makes the mesh, the others join by ticket and find it by themselves; a
chat is answered across three of them, one is lost in mid-answer, and it goes on."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshnet_process import wait_until
from network_namespaces import Host, hosts, missing
from tiny_models import save_tiny
from tiny_tokenizers import byte_level_files

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TOKENS = 400
KEY = "k-of-the-attic-0123456789"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    files = byte_level_files()
    vocabulary = json.loads(files["config.json"])["vocab_size"]
    folder = save_tiny(
        "llama", tmp_path_factory.mktemp("model") / "tiny-llama", vocab_size=vocabulary, max_position_embeddings=1024
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(files[name])
    return str(folder)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[dict[str, Host]]:
    if (lacks := missing()) is not None:
        pytest.skip(lacks)
    with hosts(tmp_path, ["head", "a", "b", "c", "spare", "stranger", "user"]) as made:
        yield made


def node(host: Host, model: str, layers: str) -> None:
    host.start("node", "node", model, "--layers", layers, "--host", host.address, "--name", host.name, "--threads", "1",
               "--dtype", "float32")  # fmt: skip


def ask(address: str, path: str, body: Any = None, headers: dict[str, str] = HEADERS) -> dict[str, Any]:
    connection = http.client.HTTPConnection(address, 8000, timeout=60)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        assert "error" not in answer, answer
        return answer
    finally:
        connection.close()


def streamed(address: str, body: Any, on_token: Callable[[int], None]) -> tuple[list[str], dict[str, Any]]:
    """The pieces of a streamed completion, and its report; ``on_token`` is told how many pieces have come."""
    connection = http.client.HTTPConnection(address, 8000, timeout=120)
    pieces: list[str] = []
    report: dict[str, Any] = {}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), HEADERS)
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            report = event.get("meshnet") or report
            for choice in event["choices"]:
                pieces.append(choice["text"])
                on_token(len(pieces))
        return pieces, report
    finally:
        connection.close()


def test_a_mesh_of_hosts_is_made_joined_found_used_and_outlives_one_of_them(
    network: dict[str, Host], model: str
) -> None:
    head, user = network["head"], network["user"]
    members = {name: network[name] for name in ("a", "b", "c", "spare")}
    head.meshnet("mesh", "create", "--name", "attic")
    head.start("tracker", "tracker", "--host", "0.0.0.0")  # noqa: S104 - within its namespace
    head.wait_ready()
    wait_until(lambda: "announced on the local network" in head.log("tracker"), 30)

    # One joins by a ticket with the tracker's address in it, the others by one without: those find it by mDNS.
    told = head.meshnet("mesh", "ticket").strip()
    assert "joined through https://10.213.0.1:7400" in members["a"].meshnet("join", told)
    found = head.meshnet("mesh", "ticket", "--uses", "3", "--search").strip()
    for name in ("b", "c", "spare"):
        assert "joined through https://10.213.0.1:7400" in members[name].meshnet("join", found)

    # No address is typed from here on, and one does not even remember any.
    (members["c"].home / "mesh" / "mesh.json").unlink()
    keys = head.home / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    head.start("gateway", "gateway", "--host", head.address, "--step-deadline", "4", "--api-keys-file", str(keys))
    for name, layers in {"a": "0-1", "b": "2", "c": "3"}.items():
        node(members[name], model, layers)
    for host in (head, *(members[name] for name in "abc")):
        host.wait_ready()

    def models() -> list[str]:
        return [str(one["id"]) for one in user.call(lambda: ask(head.address, "/v1/models"))["data"]]

    wait_until(lambda: models() == ["tiny-llama"], 60)
    request = {"model": "tiny-llama", "prompt": "hello, world", "max_tokens": TOKENS, "temperature": 0}
    before = user.call(lambda: ask(head.address, "/v1/completions", request))
    assert before["usage"]["completion_tokens"] == TOKENS
    assert [hop["node"] for hop in before["meshnet"]["route"]] == ["a", "b", "c"]

    # Who has no key of the gateway's is not answered; who has one needs no place in the mesh.
    with pytest.raises(AssertionError, match="invalid_api_key"):
        user.call(lambda: ask(head.address, "/v1/completions", request, {"Content-Type": "application/json"}))

    # A host of another mesh is not let in, whatever it tries.
    stranger = network["stranger"]
    stranger.meshnet("mesh", "create", "--name", "attic")
    stranger.start("node", "node", model, "--layers", "0-3", "--host", stranger.address, "--tracker",
                   "https://10.213.0.1:7400")  # fmt: skip
    wait_until(lambda: "its certificate is not of this mesh" in stranger.log("node"), 60)
    assert "turned 10.213.0.6 away" in head.log("tracker")

    # The middle one of the three is lost in mid-answer, whichever of the two it is.
    node(members["spare"], model, "1-2")
    members["spare"].wait_ready()

    lost: list[str] = []

    def lose(count: int) -> None:
        if count >= 5 and not lost:
            nodes = ask(head.address, "/v1/meshnet/status")["nodes"]
            lost.extend(one["node"] for one in nodes if one["node"] in {"b", "spare"} and one["sessions"])
            if lost:
                members[lost[0]].unplug()

    pieces, report = user.call(lambda: streamed(head.address, request, lose))
    assert "".join(pieces) == before["choices"][0]["text"]
    assert len(lost) == 1
    assert [hop["node"] for hop in report["route"]] == ["a", ({"b", "spare"} - set(lost)).pop(), "c"]
    assert report["recoveries"]

    # And the next one does not meet it.
    after = user.call(lambda: ask(head.address, "/v1/completions", request))
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
