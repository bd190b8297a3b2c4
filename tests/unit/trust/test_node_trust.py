"""Who gets through a node's door in a mesh: its machines, and nothing else. Over real sockets, in both forms of frames.

Without a certificate, with another mesh's, with an ended one, with bytes altered or sent a second time: refused before
a frame is seen, told in the log with the address, counted by reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from golden_frames import DECODE, PREFILL, SESSION
from mesh_identities import believing_all, machine_of, new_mesh, secured, without_certificate
from meshnet_core.clock import SystemClock
from meshnet_core.credentials import Credentials
from meshnet_core.doorkeeper import REASONS, Doorkeeper
from meshnet_core.errors import (
    CacheFullError,
    HopUnreachableError,
)
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.layer_range import LayerRange
from meshnet_core.mesh_folder import MeshFolder
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams
from meshnet_core.stream_transport import WireTransport, transport_for
from meshnet_core.wire_form import WireForm
from meshnet_node import torch_server
from meshnet_node.peer_sessions import PeerSessions
from tcp_relay import tcp_relay

BOOT = "b-0123456789abcdef"


@dataclass
class Endpoint:
    """Answers every frame, and remembers what reached it."""

    seen: list[object] = field(default_factory=list)

    async def open(self, document: OpenDocument) -> OpenReply:
        self.seen.append(document)
        return OpenReply(BOOT, 0)

    async def forward(self, frame: Frame) -> FrameReply:
        self.seen.append(frame)
        return PREFILL.reply

    async def release(self, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> int:
        self.seen.append(session)
        return 1

    async def probe(self, session: str | None) -> ProbeReply:
        self.seen.append(session)
        return ProbeReply(BOOT, None, 0)


@dataclass
class Node:
    endpoint: Endpoint
    doorkeeper: Doorkeeper
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def turned_away(self) -> dict[str, int]:
        return {reason: count for reason, count in self.doorkeeper.turned_away.items() if count}


@pytest.fixture
async def node(mesh: MeshFolder) -> AsyncIterator[Node]:
    endpoint, doorkeeper = Endpoint(), torch_server.new_doorkeeper()
    app = torch_server.create_app(
        endpoint, boot=BOOT, status=dict, text_files={}.get, max_body=65536, doorkeeper=doorkeeper
    )
    async with secured(app, mesh.credentials(), doorkeeper) as port:
        yield Node(endpoint, doorkeeper, port)


Calling = Callable[[ssl.SSLContext | None], contextlib.AbstractAsyncContextManager[WireTransport]]


@pytest.fixture(params=list(WireForm))
def calling(request: pytest.FixtureRequest) -> Calling:
    """Calls in either form."""

    @contextlib.asynccontextmanager
    async def calls(tls: ssl.SSLContext | None) -> AsyncIterator[WireTransport]:
        transport = transport_for(request.param, SystemClock(), tls=tls)
        try:
            yield transport
        finally:
            await transport.close()

    return calls


async def counted(node: Node, reason: str, count: int = 1) -> None:
    """Wait until ``reason`` was counted: the two ends of a handshake learn of its failure at different moments."""
    async with asyncio.timeout(20):
        while node.doorkeeper.turned_away[reason] < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


OPEN = OpenDocument(
    session=SESSION,
    epoch=0,
    hop_index=0,
    route=Route("toy", "f-1", 30, (Hop("a", "https://a", LayerRange(0, 30)),)),
    wire_dtype="bfloat16",
    hidden_size=4,
    cache=True,
    sampling=SamplingParams(),
    prompt_length=261,
    prefill_length=261,
    expected_length=300,
    step_deadline_ms=30000,
)


def test_every_reason_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")
    for reason, words in REASONS.items():
        assert f"| `{reason}` | {words} |" in text


async def test_machines_of_one_mesh_reach_each_other(calling: Calling, node: Node, machine: Credentials) -> None:
    async with calling(machine.client_context()) as transport:
        assert (await transport.forward(node.url, PREFILL.frame)).boot == BOOT
        assert await transport.release(node.url, SESSION) == 1
    assert node.endpoint.seen == [PREFILL.frame, SESSION]
    assert node.turned_away() == {}


async def refused(calling: Calling, node: Node, tls: ssl.SSLContext | None, url: str | None = None) -> None:
    """No call of ``tls`` does anything at the node: no frame, no probe, no release."""
    async with calling(tls) as transport:
        for call in (
            transport.forward(url or node.url, PREFILL.frame),
            transport.probe(url or node.url, SESSION),
            transport.release(url or node.url, SESSION),
        ):
            with pytest.raises(HopUnreachableError):
                await call
    assert node.endpoint.seen == []


async def test_without_a_certificate(
    calling: Calling, node: Node, mesh: MeshFolder, caplog: pytest.LogCaptureFixture
) -> None:
    await refused(calling, node, without_certificate(mesh))
    await counted(node, "no_certificate", 3)
    assert "turned 127.0.0.1 away (no_certificate)" in caplog.text


async def test_with_another_meshs_certificate(
    calling: Calling, node: Node, stranger: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    await refused(calling, node, believing_all(stranger))
    await counted(node, "other_mesh", 3)
    assert "turned 127.0.0.1 away (other_mesh)" in caplog.text


async def test_with_an_ended_certificate(
    calling: Calling, node: Node, mesh: MeshFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = machine_of(mesh, tmp_path, ended=timedelta(hours=2))
    await refused(calling, node, ended.credentials().client_context())
    await counted(node, "expired", 3)
    assert "turned 127.0.0.1 away (expired)" in caplog.text


async def test_a_node_of_another_mesh_is_not_called(
    calling: Calling, node: Node, stranger: Credentials, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = machine_of(new_mesh(tmp_path / "mesh"), tmp_path / "machine").credentials()
    async with calling(fresh.client_context()) as transport:
        with pytest.raises(HopUnreachableError, match="its certificate is not of this mesh"):
            await transport.forward(node.url, PREFILL.frame)
    assert node.endpoint.seen == []
    await counted(node, "broken_off")  # asyncio's TLS sends no alert; another library's would count as refused_us


async def test_plain_http_at_a_nodes_port(calling: Calling, node: Node) -> None:
    await refused(calling, node, None, f"http://127.0.0.1:{node.port}")
    await counted(node, "not_tls")


async def test_an_older_tls(
    calling: Calling, node: Node, machine: Credentials, tmp_path: Path, mesh: MeshFolder
) -> None:
    context = machine_of(mesh, tmp_path).credentials().client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    await refused(calling, node, context)
    await counted(node, "old_tls", 3)


async def test_a_connection_that_breaks_off_or_says_nothing_to_the_point(node: Node) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.close()
    await counted(node, "broken_off")


async def test_a_node_at_a_plain_address_is_not_called_from_within_a_mesh(
    calling: Calling, machine: Credentials
) -> None:
    async with calling(machine.client_context()) as transport:
        with pytest.raises(HopUnreachableError, match="https:// addresses"):
            await transport.forward("http://127.0.0.1:1", PREFILL.frame)


async def test_a_frame_altered_on_its_way_is_never_seen(
    calling: Calling, node: Node, machine: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    async with tcp_relay(node.port) as relay, calling(machine.client_context()) as transport:
        url = relay.url.replace("http:", "https:")
        await transport.forward(url, DECODE.frame)  # the connection stands
        assert node.endpoint.seen == [DECODE.frame]
        relay.alter = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        with pytest.raises(HopUnreachableError):
            await transport.forward(url, PREFILL.frame)
        await counted(node, "altered")
    assert node.endpoint.seen == [DECODE.frame]
    assert "turned 127.0.0.1 away (altered)" in caplog.text


async def test_a_recorded_connection_sent_again_is_never_seen(
    calling: Calling, node: Node, machine: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    async with tcp_relay(node.port) as relay, calling(machine.client_context()) as transport:
        url = relay.url.replace("http:", "https:")
        await transport.forward(url, PREFILL.frame)
        await transport.forward(url, DECODE.frame)
        assert relay.connections == 1
    seen = list(node.endpoint.seen)
    assert len(seen) == 2
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.write(relay.sent)
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass
    writer.close()
    await counted(node, "altered")
    assert node.endpoint.seen == seen
    assert "turned 127.0.0.1 away (altered)" in caplog.text


async def test_who_floods_a_node_with_silent_connections_keeps_nobody_out(
    calling: Calling, node: Node, machine: Credentials
) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", node.port) for _ in range(70)]
    await counted(node, "too_many", 6)
    for _, writer in silent:
        writer.close()
    await counted(node, "broken_off", 64)
    async with calling(machine.client_context()) as transport:
        await transport.forward(node.url, PREFILL.frame)


async def test_a_node_that_is_asked_too_much_is_asked_again_in_a_moment(
    calling: Calling, mesh: MeshFolder, machine: Credentials
) -> None:
    endpoint, doorkeeper = Endpoint(), Doorkeeper(SystemClock(), per_s=20, burst=1)
    app = torch_server.create_app(
        endpoint, boot=BOOT, status=dict, text_files={}.get, max_body=65536, doorkeeper=doorkeeper
    )
    async with secured(app, mesh.credentials(), doorkeeper) as port, calling(machine.client_context()) as transport:
        for _ in range(3):
            await transport.forward(f"https://127.0.0.1:{port}", PREFILL.frame)
    assert len(endpoint.seen) == 3
    assert doorkeeper.turned_away["rate"] >= 2


async def test_one_peer_cannot_take_all_sessions_of_a_node(
    calling: Calling, mesh: MeshFolder, machine: Credentials, tmp_path: Path
) -> None:
    endpoint, doorkeeper = Endpoint(), torch_server.new_doorkeeper()

    def held() -> set[str]:
        return {one.session for one in endpoint.seen if isinstance(one, OpenDocument)}

    app = torch_server.create_app(
        endpoint, boot=BOOT, status=dict, text_files={}.get, max_body=65536, peers=PeerSessions(1, held)
    )
    other = machine_of(mesh, tmp_path).credentials()
    async with (
        secured(app, mesh.credentials(), doorkeeper) as port,
        calling(machine.client_context()) as transport,
        calling(other.client_context()) as rival,
    ):
        url = f"https://127.0.0.1:{port}"
        await transport.open(url, OPEN)
        with pytest.raises(CacheFullError, match="--max-sessions-per-peer"):
            await transport.open(url, replace(OPEN, session="s-another"))
        await rival.open(url, replace(OPEN, session="s-of-a-rival"))
    assert held() == {OPEN.session, "s-of-a-rival"}


async def test_what_was_turned_away_is_in_the_metrics(
    calling: Calling, node: Node, mesh: MeshFolder, machine: Credentials
) -> None:
    await refused(calling, node, without_certificate(mesh))
    await counted(node, "no_certificate", 3)
    connector = aiohttp.TCPConnector(ssl=machine.client_context())
    async with aiohttp.ClientSession(connector=connector) as session, session.get(f"{node.url}/metrics") as response:
        text = await response.text()
    count = node.doorkeeper.turned_away["no_certificate"]
    assert f'meshnet_node_turned_away_total{{reason="no_certificate"}} {count:.1f}' in text
    assert 'meshnet_node_turned_away_total{reason="altered"} 0.0' in text


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(mesh: MeshFolder, tmp_path: Path) -> None:
    folder = machine_of(mesh, tmp_path / "a", ended=timedelta(days=1))
    credentials, context = folder.credentials(), without_certificate(mesh)
    doorkeeper = torch_server.new_doorkeeper()
    app = torch_server.create_app(Endpoint(), boot=BOOT, status=dict, text_files={}.get, max_body=1)
    async with secured(app, credentials, doorkeeper, optional_client=True) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)
        renewed = machine_of(mesh, tmp_path / "b")
        folder.key_path.write_bytes(renewed.key_path.read_bytes())
        folder.renew(renewed.certificate_path.read_bytes())
        credentials.reload()
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.close()
