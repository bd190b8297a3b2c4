"""Into a mesh by ticket: what a ticket is, who may use it and how often, and what a machine has afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_identities import machine_of, new_mesh, secured
from meshnet_cli import renewal
from meshnet_cli.complaint import CommandFailedError
from meshnet_cli.join import enroll
from meshnet_cli.trust import Identity, identity_in
from meshnet_core import certificates
from meshnet_core.clock import SystemClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import (
    InvalidInputError,
    MeshnetError,
    TicketRefusedError,
)
from meshnet_core.join_ticket import JoinTicket
from meshnet_core.mesh_folder import MeshFolder
from meshnet_core.tracker_client import TrackerClient
from meshnet_tracker.directory import Directory
from meshnet_tracker.enrollment import Enrollment, tickets_of
from meshnet_tracker.server import create_app
from meshnet_tracker.tickets import Tickets
from web_on_socket import serving

PIN = "ab" * 32


# -- the string --------------------------------------------------------------------------------------------------------


@given(
    st.binary(min_size=32, max_size=32),
    st.from_regex(r"[0-9A-Za-z.]{1,200}", fullmatch=True),
    st.lists(st.from_regex(r"https://[a-z0-9.]{1,40}:[1-9][0-9]{0,3}", fullmatch=True), max_size=8),
)
def test_a_ticket_says_what_it_was_made_of_also_with_blanks_in_it(pin: bytes, token: str, trackers: list[str]) -> None:
    made = JoinTicket(pin.hex(), token, tuple(trackers))
    text = str(made)
    assert text.isascii()
    assert JoinTicket.parse(text) == made
    assert JoinTicket.parse(f" {text[:50]}\n  {text[50:]}\n") == made


@given(st.text(max_size=80) | st.binary(max_size=60).map(lambda data: f"meshnet-{data.hex()}"))
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        JoinTicket.parse(text)


@given(st.integers(0, 150))
def test_part_of_a_ticket_is_refused(length: int) -> None:
    text = str(JoinTicket(PIN, "token", ("https://10.0.0.5:7400",)))
    with pytest.raises(InvalidInputError):
        JoinTicket.parse(text[: min(length, len(text) - 3)])


@pytest.mark.parametrize("url", ["http://10.0.0.5:7400", "https://" + "x" * 300, "https://a\n"])
def test_a_ticket_names_only_trackers_that_speak_tls(url: str) -> None:
    with pytest.raises(InvalidInputError, match="https:// addresses"):
        JoinTicket(PIN, "token", (url,))


# -- tokens ------------------------------------------------------------------------------------------------------------


class Wall:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_is_for_so_many_machines_and_so_long(tmp_path: Path) -> None:
    wall = Wall()
    tickets = Tickets(b"secret", tmp_path / "spent.json", wall)
    token = tickets.issue(60, uses=2)
    tickets.take(token, "a")
    tickets.take(token, "a")  # its first answer got lost
    restarted = Tickets(b"secret", tmp_path / "spent.json", wall)
    restarted.take(token, "b")
    with pytest.raises(TicketRefusedError, match="for 2 machines"):
        restarted.take(token, "c")
    once = tickets.issue(60, uses=1)
    wall.now += 60
    with pytest.raises(TicketRefusedError, match="ended 0 s ago"):
        tickets.take(once, "c")
    tickets.take(tickets.issue(60, uses=1), "c")
    assert token.split(".")[2] not in (tmp_path / "spent.json").read_text()  # what has ended is forgotten


def test_a_token_of_another_mesh_or_changed_is_refused(tmp_path: Path) -> None:
    tickets = Tickets(b"secret", tmp_path / "spent.json", Wall())
    token = tickets.issue(60, uses=1)
    end, uses, nonce, mac = token.split(".")
    for wrong in (
        Tickets(b"other", tmp_path / "spent.json", Wall()).issue(60, uses=1),
        f"{int(end) + 1}.{uses}.{nonce}.{mac}",
        f"{end}.9.{nonce}.{mac}",
        f"{end}.{uses}.{nonce}.",
        mac,
        "",
        "ä.ö.ü.ß",
    ):
        with pytest.raises(TicketRefusedError, match="not of this mesh"):
            tickets.take(wrong, "a")
    assert not (tmp_path / "spent.json").exists()


@pytest.mark.parametrize(
    "found", ["{half", "[1]", '{"n": 1}', '{"n": {"end": "x", "owners": []}}', '{"n": {"end": 1}}']
)
def test_while_it_is_not_known_who_used_tickets_none_is_taken(tmp_path: Path, found: str) -> None:
    tickets = Tickets(b"secret", tmp_path / "spent.json", Wall())
    (tmp_path / "spent.json").write_text(found)
    with pytest.raises(TicketRefusedError, match="cannot be read"):
        tickets.take(tickets.issue(60, uses=1), "a")


def test_several_trackers_of_one_machine_take_no_use_twice(tmp_path: Path) -> None:
    token = Tickets(b"secret", tmp_path / "spent.json", Wall()).issue(60, uses=3)
    ready = threading.Barrier(8)

    class SlowTickets(Tickets):
        def _write(self, spent: object) -> None:
            time.sleep(0.01)  # what another tracker may read meanwhile is out of date
            super()._write(spent)

    def take(owner: str) -> bool:
        tickets = SlowTickets(b"secret", tmp_path / "spent.json", Wall())
        ready.wait(30)
        try:
            tickets.take(token, owner)
        except TicketRefusedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, "abcdefgh"))
    assert sum(taken) == 3


@pytest.mark.parametrize(("valid_s", "uses"), [(0, 1), (-1, 1), (float("inf"), 1), (60, 0), (60, 10_000)])
def test_a_ticket_without_bounds_is_not_made(valid_s: float, uses: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        Tickets(b"secret", tmp_path / "spent.json", Wall()).issue(valid_s, uses)


# -- joining -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> MeshFolder:
    return new_mesh(tmp_path / "mesh")


@contextlib.asynccontextmanager
async def tracker_of(mesh: MeshFolder) -> AsyncIterator[tuple[str, Doorkeeper]]:
    doorkeeper = Doorkeeper(SystemClock(), per_s=1000, burst=1000)
    app = create_app(Directory(SystemClock()), doorkeeper, Enrollment.of(mesh))
    async with secured(app, mesh.credentials(), doorkeeper, optional_client=True) as port:
        yield f"https://127.0.0.1:{port}", doorkeeper


async def nothing_found(_pin: str) -> list[str]:
    return []


def ticket_for(mesh: MeshFolder, *urls: str, uses: int = 1) -> JoinTicket:
    return JoinTicket(mesh.pin(), tickets_of(mesh).issue(60, uses), urls)


async def test_a_machine_joins_by_ticket_and_is_let_in_everywhere(mesh: MeshFolder, tmp_path: Path) -> None:
    folder = MeshFolder(tmp_path / "kitchen")
    async with tracker_of(mesh) as (url, _):
        ticket = JoinTicket.parse(str(ticket_for(mesh, url)))
        assert await enroll(ticket, folder, "kitchen", nothing_found) == url
        client = TrackerClient(url, tls=folder.credentials().client_context())
        assert (await client.snapshot()).nodes == ()
        await client.close()
    assert folder.pin() == mesh.pin()
    assert folder.trackers() == (url,)
    assert folder.authority() is None
    assert stat.S_IMODE(folder.key_path.stat().st_mode) == 0o600
    assert certificates.common_name(folder.certificate_path.read_bytes()) == "kitchen"


async def test_a_ticket_is_used_up_but_not_by_a_second_try(mesh: MeshFolder, tmp_path: Path) -> None:
    async with tracker_of(mesh) as (url, doorkeeper):
        ticket = ticket_for(mesh, url)
        folder = MeshFolder(tmp_path / "kitchen")
        await enroll(ticket, folder, "kitchen", nothing_found)
        folder.certificate_path.unlink()  # as if the answer had been lost
        await enroll(ticket, folder, "kitchen", nothing_found)
        with pytest.raises(TicketRefusedError, match="as many have used it"):
            await enroll(ticket, MeshFolder(tmp_path / "garage"), "garage", nothing_found)
        assert doorkeeper.turned_away["ticket"] == 1
    assert not MeshFolder(tmp_path / "garage").is_there()


async def test_a_ticket_without_addresses_is_taken_to_what_the_network_brings(mesh: MeshFolder, tmp_path: Path) -> None:
    other = new_mesh(tmp_path / "other")
    async with tracker_of(mesh) as (url, _), tracker_of(other) as (impostor, _):

        async def found(pin: str) -> list[str]:
            assert pin == mesh.pin()
            return ["https://127.0.0.1:1", impostor, url]

        folder = MeshFolder(tmp_path / "kitchen")
        assert await enroll(ticket_for(mesh), folder, "kitchen", found) == url
        assert folder.trackers()[0] == url
    with pytest.raises(CommandFailedError, match="none of its mesh was found"):
        await enroll(ticket_for(mesh), folder, "kitchen", nothing_found)


async def test_an_impostor_gets_no_token(mesh: MeshFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Enrollment, "certify", lambda *_: asked.append("asked"))
    async with tracker_of(new_mesh(tmp_path / "impostor")) as (url, _):
        folder = MeshFolder(tmp_path / "kitchen")
        with pytest.raises(CommandFailedError, match="its pin is another"):
            await enroll(ticket_for(mesh, url), folder, "kitchen", nothing_found)
    assert asked == []
    assert not folder.is_there()


async def test_an_impostor_that_tells_the_right_authority_gets_no_token(
    mesh: MeshFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can copy the certificate of the authority, which is no secret, but shows none that this has signed."""
    asked: list[str] = []
    told = mesh.authority_path.read_text()
    monkeypatch.setattr(Enrollment, "certify", lambda *_: asked.append("asked"))
    monkeypatch.setattr(Enrollment, "describe", lambda _: {"authority": told, "lets_machines_in": True})
    async with tracker_of(new_mesh(tmp_path / "impostor")) as (url, _):
        with pytest.raises(CommandFailedError, match="is not of this mesh"):
            await enroll(ticket_for(mesh, url), MeshFolder(tmp_path / "kitchen"), "kitchen", nothing_found)
    assert asked == []


async def test_a_tracker_without_the_authoritys_key_says_so(mesh: MeshFolder, tmp_path: Path) -> None:
    joined = machine_of(mesh, tmp_path / "garage")
    async with tracker_of(joined) as (url, _):
        with pytest.raises(TicketRefusedError, match="lets nobody in"):
            await enroll(ticket_for(mesh, url), MeshFolder(tmp_path / "kitchen"), "kitchen", nothing_found)
        async with tracker_of(mesh) as (right, _):
            folder = MeshFolder(tmp_path / "kitchen")
            assert await enroll(ticket_for(mesh, url, right), folder, "kitchen", nothing_found) == right


async def test_a_machine_is_in_one_mesh_for_each_folder(mesh: MeshFolder, tmp_path: Path) -> None:
    other = new_mesh(tmp_path / "other")
    with pytest.raises(InvalidInputError, match="is of another mesh"):
        await enroll(ticket_for(mesh), other, "kitchen", nothing_found)


# -- renewal -----------------------------------------------------------------------------------------------------------


async def test_a_certificate_is_renewed_through_a_tracker_before_it_ends(mesh: MeshFolder, tmp_path: Path) -> None:
    folder = machine_of(mesh, tmp_path / "kitchen", name="kitchen")
    identity = Identity(folder, folder.credentials())
    before = folder.certificate_path.read_bytes()
    soon = certificates.utc_now() + timedelta(days=300)
    assert not await renewal.renew(identity, certificates.utc_now())
    with pytest.raises(MeshnetError, match="no tracker is known"):
        await renewal.renew(identity, soon)
    async with tracker_of(mesh) as (url, _):
        folder.remember_trackers([url])
        assert await renewal.renew(identity, soon)
    after = folder.certificate_path.read_bytes()
    assert before != after
    assert certificates.owner_of_pem(before) == certificates.owner_of_pem(after)
    assert certificates.common_name(after) == "kitchen"


async def test_a_running_process_renews_and_takes_the_newer_one_up(mesh: MeshFolder, tmp_path: Path) -> None:
    folder = machine_of(mesh, tmp_path / "kitchen", name="kitchen")
    authority = mesh.authority()
    assert authority is not None
    request = certificates.make_request(folder.key_path.read_bytes(), "kitchen")
    nearly_over = authority.sign(request, certificates.utc_now() - timedelta(days=300))
    folder.renew(nearly_over)
    identity = Identity(folder, folder.credentials())
    async with tracker_of(mesh) as (url, _):
        folder.remember_trackers([url])
        async with renewal.keeping_renewed(identity), asyncio.timeout(20):
            while folder.certificate_path.read_bytes() == nearly_over:  # noqa: ASYNC110 - a file is no event
                await asyncio.sleep(0.01)
        client = TrackerClient(url, tls=identity.credentials.client_context())
        await client.snapshot()
        await client.close()
    assert certificates.expires_at(folder.certificate_path.read_bytes()) > certificates.expires_at(nearly_over)


def test_an_ended_certificate_is_told_before_anything_is_started(mesh: MeshFolder, tmp_path: Path) -> None:
    machine_of(mesh, tmp_path / "kitchen", ended=timedelta(days=3))
    with pytest.raises(InvalidInputError, match="join again with a new ticket"):
        identity_in(tmp_path / "kitchen")
    ended = machine_of(mesh, tmp_path / "garage", ended=timedelta(days=3))
    for name in ("certificate.pem", "key.pem"):  # as if the mesh's first machine had been off for a year
        (mesh.path / name).write_bytes((ended.path / name).read_bytes())
    identity = identity_in(mesh.path)
    assert identity is not None
    assert certificates.expires_at(mesh.certificate_path.read_bytes()) > certificates.utc_now()


async def test_the_authoritys_own_machine_renews_by_itself(mesh: MeshFolder) -> None:
    before = mesh.certificate_path.read_bytes()
    assert await renewal.renew(Identity(mesh, mesh.credentials()), certificates.utc_now() + timedelta(days=300))
    assert mesh.certificate_path.read_bytes() != before


async def test_without_a_ticket_only_the_machines_own_key_is_certified(mesh: MeshFolder, tmp_path: Path) -> None:
    machine = machine_of(mesh, tmp_path / "kitchen")
    foreign = certificates.make_request(certificates.new_key(), "kitchen")
    async with tracker_of(mesh) as (url, _):
        client = TrackerClient(url, tls=machine.credentials().client_context())
        with pytest.raises(TicketRefusedError, match="needs a ticket"):
            await client.enroll(foreign)
        with pytest.raises(InvalidInputError, match="no certificate request"):
            await client.enroll(b"nonsense")
        await client.close()


async def test_what_is_no_request_for_a_certificate_is_told(mesh: MeshFolder) -> None:
    app = create_app(Directory(SystemClock()), enrollment=Enrollment.of(mesh))
    async with serving(app) as url, aiohttp.ClientSession() as http:
        for asked in ('"\\ud800"', '"-----BEGIN"', "1", "null"):
            async with http.post(f"{url}/v1/enroll", data=f'{{"request": {asked}}}') as response:
                assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_input"), asked
