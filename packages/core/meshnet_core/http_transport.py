"""Reaches hops over HTTP: a `HopTransport` on one aiohttp session with persistent connections.

The only place where aiohttp's exceptions become ours. Knows neither routes nor the retries of a step: it repeats a call
only where a kept-alive connection turned out to be closed.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import aiohttp

from meshnet_core import http_codec
from meshnet_core.clock import Clock, SystemClock
from meshnet_core.connection_words import connection_words
from meshnet_core.errors import HopFailedError, HopUnreachableError, ProtocolMismatchError
from meshnet_core.frames import PROTOCOLS, Frame, FrameReply
from meshnet_core.hop_call import HopCall, Reuse
from meshnet_core.http_codec import Body
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark

CONTROL_TIMEOUT_S = 5.0  # release and probe: little work, so a node that needs longer does not answer
CONNECT_TIMEOUT_S = 5.0  # a host that drops packets is unreachable, well before a long step's deadline
# Below the server's (`meshnet_node.torch_server`), so that it is the client that closes an idle connection.
KEEPALIVE_S = 60.0
MAX_CONNECTIONS = 1000
MAX_REPLY_BYTES = 8 * 2**20
_WITHOUT = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # hops need none of them; they are 150 bytes

_Encoded = tuple[Mapping[str, str], Body]


class HttpTransport:
    """One pool of connections to all hops; make it and close it in a running event loop.

    ``forward`` and ``open`` wait no longer than the step that they belong to may take. Errors of the endpoint arrive as
    the classes that it raised, with the boot id of the node that answered.

    Args:
        clock: for what is left of a deadline when a call is repeated.
        control_timeout_s: for release and probe, in seconds.
        connect_timeout_s: for making one connection, in seconds.
        protocols: versions of the wire protocol to speak. Opens and frames are in their route's; for the other calls,
            which know no route, the newest that the hop takes is found out.
        tls: what to show and to accept (`Credentials.client_context`); hops at plain addresses are then not dialled.
            None for plain HTTP.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        protocols: range = PROTOCOLS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._tls = tls
        self._control_timeout_s = control_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._protocols = protocols
        self._taken: dict[str, int] = {}  # by URL: the version that a hop took lately

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        call = HopCall("POST", url, "/hop/open", document.step_deadline_ms / 1000, document.hop_index)
        body = http_codec.encode_json(document.to_wire())
        answer, _ = await self._answer(call, lambda _left: (http_codec.encode_call(document.route.protocol), body))
        return http_codec.decode_reply(answer, OpenReply.from_wire)

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        call = HopCall("POST", url, "/hop/forward", frame.deadline_ms / 1000, frame.hop_index)

        def encode(left_s: float) -> tuple[dict[str, str], Body]:
            return http_codec.encode_frame(replace(frame, deadline_ms=max(0, round(left_s * 1000))))

        answer, boot = await self._answer(call, encode)
        reply = http_codec.decode_reply(answer, FrameReply.from_wire)
        return replace(reply, boot=boot or "")

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int:
        call = HopCall("POST", url, "/hop/release", self._control_timeout_s, None)
        body = http_codec.encode_release(session, through_epoch, keep)
        return http_codec.decode_released(await self._agreed(call, body))

    async def probe(self, url: str, session: str | None) -> ProbeReply:
        call = HopCall("GET", url, "/hop/probe", self._control_timeout_s, None, session)
        return http_codec.decode_reply(await self._agreed(call, b""), ProbeReply.from_wire)

    async def close(self) -> None:
        """Close every connection; calls made later find no hop. Idempotent."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _agreed(self, call: HopCall, body: Body) -> bytes:
        """The answer to a call that knows no route, in the newest version that the hop takes."""
        newest_first = list(reversed(self._protocols))
        if (taken := self._taken.get(call.url)) in newest_first:
            newest_first.remove(taken)
            newest_first.insert(0, taken)
        for protocol in newest_first[:-1]:
            with suppress(ProtocolMismatchError):
                return await self._in(protocol, call, body)
        return await self._in(newest_first[-1], call, body)

    async def _in(self, protocol: int, call: HopCall, body: Body) -> bytes:
        answer, _ = await self._answer(call, lambda _left: (http_codec.encode_call(protocol), body))
        if len(self._taken) >= MAX_CONNECTIONS:
            self._taken.clear()
        self._taken[call.url] = protocol
        return answer

    async def _answer(self, call: HopCall, encode: Callable[[float], _Encoded]) -> tuple[bytes, str | None]:
        """Body and boot id of a yes; ``encode`` makes headers and body from the seconds that are left."""
        return await call.persisted(self._clock, lambda left_s, reused: self._exchange(call, encode(left_s), reused))

    async def _exchange(self, call: HopCall, encoded: _Encoded, reused: Reuse) -> tuple[bytes, str | None]:
        """One request and its answer; sets ``reused.connection`` if the connection had served before."""
        headers, body = encoded
        call.check_dialled(tls=self._tls)
        try:
            async with self._connected(call).request(
                call.method,
                f"{call.url.rstrip('/')}{call.path}",
                params=None if call.session is None else {"session": call.session},
                data=body or None,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=reused,
            ) as response:
                if response.content_length is None or response.content_length > MAX_REPLY_BYTES:
                    raise HopFailedError(
                        f"{call} sent a reply of {response.content_length} bytes; at most {MAX_REPLY_BYTES} are read",
                        hop_index=call.hop_index,
                    )
                answer = await response.read()
                boot = response.headers.get(http_codec.BOOT)
                status = response.status
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise HopUnreachableError(
                f"{call} cannot be reached: {connection_words(error)}", hop_index=call.hop_index
            ) from error
        if status != 200:
            raise call.refusal(answer, boot, f"HTTP {status} from {call}: {answer[:120].decode(errors='replace')}")
        return answer, boot

    def _connected(self, call: HopCall) -> aiohttp.ClientSession:
        if self._closed:
            raise HopUnreachableError(f"{call} was called after this transport was closed", hop_index=call.hop_index)
        if self._session is None:  # aiohttp wants a running loop, so not in the constructor
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_reuse)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S, ssl=self._tls or True
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_WITHOUT,
                auto_decompress=False,
                trust_env=False,
                trace_configs=[trace],
            )
        return self._session


async def _note_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.connection = True
