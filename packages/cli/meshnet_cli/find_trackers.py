"""Where the trackers are: as told, as remembered, or as found on the local network.

An address that was found there is only an address: what answers has to show a certificate of the mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshnet_cli import options, trust
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.errors import InvalidInputError, TrackerUnreachableError
from meshnet_core.web_address import is_web_address

if TYPE_CHECKING:
    from meshnet_core.membership import Snapshot

NO_NODES = "no node has registered; start one with `meshnet node MODEL --layers FIRST-LAST`"

logger = logging.getLogger(__name__)


async def trackers_for(
    given: Sequence[str], identity: trust.Identity | None, *, insecure: bool, looks_only: bool = False
) -> list[str]:
    """Addresses of trackers, the first of which answered just now.

    Args:
        given: with ``--tracker``; nothing else is asked then.
        identity: this machine's, whose mesh is looked for.
        insecure: as given with ``--insecure``: a tracker without certificates may be looked for too.
        looks_only: for a command that changes nothing: on a machine in no mesh, that which it runs for itself is
            meant, where there is one.

    Raises:
        InvalidInputError: none is given, and this machine is in no mesh whose trackers could be found.
        TrackerUnreachableError: none of those given answers.
        CommandFailedError: none was found, or none of those found answers.
    """
    if identity is None and not insecure:
        for url in given:
            if url.startswith("http://") and is_web_address(url) and not trust.is_loopback_url(url):
                raise InvalidInputError(
                    f"{url} is on another machine and not encrypted: what is asked would pass in the clear. "
                    "Join its mesh with `meshnet join TICKET`, or say --insecure if that is meant"
                )
    if given:
        return await _answering(given, identity)
    if identity is None and not insecure:
        if looks_only and (here := await of_this_machine()):
            return here
        raise InvalidInputError(
            "this machine is in no mesh, so say where a tracker is with --tracker URL; "
            "or join a mesh with `meshnet join TICKET`, after which its trackers are known"
        )
    remembered = identity.folder.trackers() if identity is not None else ()
    failed: MeshnetErrors = []
    if remembered:
        try:
            return await _answering(remembered, identity)
        except TrackerUnreachableError as error:
            failed.append(error)
    found = await of_mesh(None if identity is None else identity.folder.pin())
    if not found:
        told = f" ({'; '.join(error.message for error in failed)})" if failed else ""
        raise CommandFailedError(
            f"no tracker of this mesh was found on the local network{told}; start one with `meshnet tracker`, "
            "or say where it is with --tracker URL"
        )
    return await _answering(found, identity)


MeshnetErrors = list[TrackerUnreachableError]


async def snapshot_of(given: Sequence[str], identity: trust.Identity | None, *, insecure: bool) -> Snapshot:
    """The nodes that the first tracker that answers knows; arguments and errors are those of `trackers_for`."""
    from meshnet_core.tracker_client import TrackerClient

    url, *_ = await trackers_for(given, identity, insecure=insecure, looks_only=True)
    client = TrackerClient(url, tls=trust.client_tls(identity))
    try:
        return await client.snapshot()
    finally:
        await client.close()


async def of_this_machine() -> list[str]:
    """Addresses of trackers that answer on loopback: those of the gateway at its usual port (`meshnet up`),
    else the one at its own."""
    from meshnet_cli.chat_stream import Gateway

    urls = [f"http://{options.LOOPBACK}:{options.DEFAULT_TRACKER_PORT}"]
    try:
        async with Gateway(options.DEFAULT_API_URL) as gateway:
            told = (await gateway.get("/meshnet/status")).get("trackers")
    except CommandFailedError:
        told = None
    named = [one.get("url") for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    urls = [*(url for url in named if isinstance(url, str) and trust.is_loopback_url(url)), *urls]
    try:
        return await _answering(urls, None)
    except TrackerUnreachableError:
        return []


async def of_mesh(pin: str | None) -> list[str]:
    """Addresses of trackers on the local network: of the mesh with a pin, or of none."""
    from meshnet_cli import mdns

    return await mdns.find_trackers(pin)


async def _answering(urls: Sequence[str], identity: trust.Identity | None) -> list[str]:
    """One of ``urls`` that answers, those that share its list of nodes, and the rest."""
    from meshnet_core.tracker_client import TrackerClient

    tls = trust.client_tls(identity)
    failed: MeshnetErrors = []
    for url in urls:
        client = TrackerClient(url, tls=tls)
        try:
            await client.snapshot()
        except TrackerUnreachableError as error:
            failed.append(error)
            continue
        finally:
            await client.close()
        # Of those that it names: whoever starts again when this one is gone finds the mesh through them.
        spoken = [url, *(other for other in client.told.others if urlsplit(other).scheme == urlsplit(url).scheme)]
        if identity is not None:
            identity.remember(spoken)
        return list(dict.fromkeys([*spoken, *urls]))
    raise failed[0]
