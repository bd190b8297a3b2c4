"""Where `meshnet status` and `meshnet nodes` learn how a mesh is: from a gateway, or from its trackers and nodes.

Both tell one document, that of `GET /v1/meshnet/status`; from trackers it lacks what only a gateway knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from meshnet_cli import find_trackers, options, trust
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.errors import InvalidInputError

Document = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Whom to ask, as it was given at the command line.

    Attributes:
        url, key: of a gateway's API; None where none was named.
        trackers: addresses; asked only where some are given, or no gateway answers at the usual address.
        mesh, insecure: as which machine trackers and nodes are asked.
    """

    url: str | None = None
    key: str | None = None
    trackers: Sequence[str] = ()
    mesh: Path | None = None
    insecure: bool = False

    @classmethod
    def chosen(
        cls,
        context: typer.Context,
        url: str | None,
        key: str | None,
        trackers: Sequence[str],
        mesh: Path | None,
        *,
        insecure: bool,
    ) -> Source:
        """As the options say; of a gateway and trackers the one that was typed, if only the other comes from settings.

        Raises:
            InvalidInputError: both were typed.
        """
        if url is not None and trackers:
            by_hand = options.typed(context, "url"), options.typed(context, "tracker")
            if all(by_hand):
                raise InvalidInputError("--url asks a gateway, --tracker trackers and nodes; give one of them")
            url, trackers = (None, trackers) if by_hand[1] else (url, ())
        return cls(url, key, trackers, mesh, insecure)

    async def document(self, command: str) -> Document:
        """How the mesh is right now; ``command`` is the name of the one that asks, for messages.

        Raises:
            InvalidInputError: an address is none.
            CommandFailedError: nobody answers, or not as a gateway does.
            TrackerUnreachableError: no tracker answers.
        """
        if not self.trackers:
            from meshnet_cli.chat_stream import GatewayUnreachableError

            try:
                return await _of_gateway(self.url or options.DEFAULT_API_URL, self.key)
            except GatewayUnreachableError:
                if self.url is not None:
                    raise
        identity = trust.identity_for(options.LOOPBACK, self.mesh, insecure=self.insecure, command=command)
        if not self.trackers and identity is None:
            raise CommandFailedError(
                f"no gateway answers at {options.DEFAULT_API_URL}, and this machine is in no mesh: start one with "
                "`meshnet up smollm2`, or say where yours is with --url URL or --tracker URL"
            )
        return await _of_trackers(self.trackers, identity, insecure=self.insecure)


def asking(show: Callable[[Document, bool], None]) -> Callable[..., None]:
    """A command of the same name and help as ``show``, with the options that say whom to ask; ``show`` is given the
    document, and whether it is wanted as JSON."""

    def command(
        context: typer.Context,
        url: options.GatewayUrl = None,
        tracker: options.TrackerUrls = None,
        as_json: options.Json = False,
        api_key: options.ClientKey = None,
        mesh: options.MeshPath = None,
        insecure: options.Insecure = False,
    ) -> None:
        source = Source.chosen(context, url, api_key, options.tracker_urls(tracker), mesh, insecure=insecure)
        show(asyncio.run(source.document(show.__name__)), as_json)

    command.__name__, command.__doc__ = show.__name__, show.__doc__
    return command


async def _of_gateway(url: str, key: str | None) -> Document:
    from meshnet_cli.chat_stream import Gateway

    async with Gateway(url, key) as gateway:
        document = await gateway.get("/meshnet/status")
    if not isinstance(document.get("nodes"), list) or not isinstance(document.get("models"), list):
        raise CommandFailedError(f"what answers at {url} tells no status of a mesh; check --url")
    return document


async def _of_trackers(given: Sequence[str], identity: trust.Identity | None, *, insecure: bool) -> Document:
    from meshnet_core.clock import SystemClock
    from meshnet_core.trackers import Trackers
    from meshnet_gateway.mesh import Mesh

    urls = await find_trackers.trackers_for(given, identity, insecure=insecure)
    tls = trust.client_tls(identity)
    trackers = Trackers(urls, tls=tls)
    mesh = Mesh(trackers, SystemClock(), tls=tls)
    try:
        return await mesh.status()
    finally:
        await mesh.close()
        await trackers.close()
