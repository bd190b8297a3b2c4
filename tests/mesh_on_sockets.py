"""The calls of a mesh in this process over real sockets: as posts, or frames on lean streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from in_process_mesh import RecordingTransport, TinyMesh
from meshnet_cli.serving import listen, port_of, serving_aiohttp
from meshnet_core.clock import SystemClock
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.stream_transport import StreamTransport, WireTransport, transport_for
from meshnet_core.transport import FrameAnswered
from meshnet_core.wire_form import WireForm
from meshnet_node.torch_server import create_app, new_doorkeeper, runner_for


class SocketTransport(RecordingTransport):
    """Calls endpoints in this process until :func:`on_sockets` serves them, then over ``wire``."""

    wire: WireTransport | None = None

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, str] = {}  # by what the mesh calls a node, the URL at which it is served

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        if self.wire is None:
            return await super().open(url, document)
        return await self.wire.open(self.at[url], document)

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        if self.wire is None:
            return await super().forward(url, frame)
        return await self.wire.forward(self.at[url], frame)

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int:
        if self.wire is None:
            return await super().release(url, session, through_epoch, keep)
        return await self.wire.release(self.at[url], session, through_epoch, keep)

    async def probe(self, url: str, session: str | None) -> ProbeReply:
        if self.wire is None:
            return await super().probe(url, session)
        return await self.wire.probe(self.at[url], session)

    def send(self, url: str, frame: Frame, answered: FrameAnswered) -> Callable[[], None] | None:
        """See `meshnet_core.transport.PromptTransport`."""
        return self.wire.send(self.at[url], frame, answered) if isinstance(self.wire, StreamTransport) else None


@asynccontextmanager
async def on_sockets(mesh: TinyMesh, transport: SocketTransport, form: WireForm) -> AsyncIterator[None]:
    """Serve every node of ``mesh``, whose transport this is, on a port of this machine while the block runs."""
    async with AsyncExitStack() as open_:
        for url, service in mesh.services.items():
            app = create_app(
                service, boot=service.boot, status=service.status, text_files=lambda _: None, max_body=2**20
            )
            sock = listen("127.0.0.1", 0)
            await open_.enter_async_context(serving_aiohttp(runner_for(app), sock, None, new_doorkeeper()))
            transport.at[url] = f"http://127.0.0.1:{port_of(sock)}"
        transport.wire = transport_for(form, SystemClock())
        open_.push_async_callback(transport.wire.close)
        yield
