"""Trackers and APIs on the local network by multicast DNS: announced by each, found by whoever needs one.

It brings addresses and nothing else: anybody on the network can announce anything. The mesh's pin in an announcement
only tells which of several meshes an address claims to be of.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceInfo

TRACKER = "_meshnet-tracker._tcp.local."
API = "_meshnet-api._tcp.local."
PIN_LENGTH = 16  # hex digits of the pin that are announced: enough to tell meshes apart
SEARCH_S = 3.0
MORE_S = 0.3  # once one was found, others that answered the same question may still come
RESOLVE_MS = 2000

logger = logging.getLogger(__name__)


@asynccontextmanager
async def announced(
    service: str, addresses: Sequence[str], port: int, scheme: str, pin: str | None
) -> AsyncIterator[None]:
    """Have a tracker or an API at ``addresses`` found while the block runs; that it cannot be is no reason not to run.

    Args:
        service: `TRACKER` or `API`.
        addresses: where it is dialled, IPv4.
        port: likewise.
        scheme: ``http`` or ``https``.
        pin: of its mesh; None without certificates.
    """
    try:
        from zeroconf import NonUniqueNameException
        from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

        network = AsyncZeroconf()
    except OSError as error:
        logger.warning("not announced on the local network: %s", error)
        yield
        return
    host = socket.gethostname().partition(".")[0][:40] or "tracker"
    info = AsyncServiceInfo(
        service,
        f"{host}-{port}.{service}",
        port=port,
        addresses=[socket.inet_aton(address) for address in addresses],
        properties=_properties(scheme, pin),
        server=f"{host}-{port}.local.",
    )
    try:
        try:
            await network.async_register_service(info, allow_name_change=True)
            logger.info("announced on the local network as %s at %s", info.get_name(), ", ".join(addresses))
        except (OSError, NonUniqueNameException) as error:
            logger.warning("not announced on the local network: %s", error)
        yield
    finally:
        await network.async_close()  # says goodbye


async def find_trackers(pin: str | None) -> list[str]:
    """Addresses of trackers that say that they are of the mesh with ``pin``, or of none if it is None."""
    return await _find(TRACKER, lambda info: urls_of(info, pin), SEARCH_S)


async def find_apis(search_s: float = SEARCH_S) -> list[str]:
    """Addresses of gateways, of whatever mesh."""
    return [f"{url}/v1" for url in await _find(API, _any_urls_of, search_s)]


async def _find(service: str, urls: Callable[[AsyncServiceInfo], list[str]], search_s: float) -> list[str]:
    from zeroconf import ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    try:
        network = AsyncZeroconf()
    except OSError as error:
        logger.warning("the local network cannot be searched: %s", error)
        return []
    found: dict[str, None] = {}
    first = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def resolve(name: str) -> None:
        info = AsyncServiceInfo(service, name)
        if await info.async_request(network.zeroconf, RESOLVE_MS) and (told := urls(info)):
            found.update(dict.fromkeys(told))
            first.set()

    def changed(*, name: str, state_change: ServiceStateChange, **_: Any) -> None:
        if state_change is ServiceStateChange.Added:
            task = asyncio.create_task(resolve(name))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    handler: Callable[..., None] = changed
    browser = AsyncServiceBrowser(network.zeroconf, service, handlers=[handler])
    try:
        async with asyncio.timeout(search_s):
            await first.wait()
            await asyncio.sleep(MORE_S)
    except TimeoutError:
        pass
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await browser.async_cancel()
        await network.async_close()
    return list(found)


def urls_of(info: AsyncServiceInfo, pin: str | None) -> list[str]:
    """What an announcement says, where it is of the mesh that is looked for and makes sense."""
    told = info.decoded_properties
    wanted = _properties("http" if pin is None else "https", pin)
    return _any_urls_of(info) if {name: told.get(name) or "" for name in wanted} == wanted else []


def _any_urls_of(info: AsyncServiceInfo) -> list[str]:
    scheme = info.decoded_properties.get("scheme")
    if scheme not in ("http", "https") or not info.port:
        return []
    return [f"{scheme}://{address}:{info.port}" for address in info.parsed_addresses() if ":" not in address]


def _properties(scheme: str, pin: str | None) -> dict[str, str]:
    return {"scheme": scheme, "mesh": "" if pin is None else pin[:PIN_LENGTH]}
