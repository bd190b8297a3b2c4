"""What a client of the tracker says when there is no tracker, or none that it can understand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from announcements import node
from meshnet_core.clock import ManualClock
from meshnet_core.errors import InvalidInputError, TrackerUnreachableError
from meshnet_core.tracker_client import TrackerClient
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app
from web_on_socket import serving


def answering(**response: Any) -> web.Application:
    """Whatever it is asked, it gives this one answer."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(**response)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app


async def refusal(url: str, timeout_s: float = 5.0) -> str:
    client = TrackerClient(url, timeout_s=timeout_s)
    try:
        with pytest.raises(TrackerUnreachableError) as caught:
            await client.heartbeat(node("a"))
    finally:
        await client.close()
    assert "--tracker" in caught.value.message
    return caught.value.message


async def test_nothing_listening_is_told_with_the_address_and_the_remedy() -> None:
    async with serving(web.Application()) as url:
        pass
    assert (await refusal(url)).startswith(f"no tracker answers at {url} (Connection refused); start one with")


async def test_a_name_that_does_not_resolve_is_told() -> None:
    assert "no tracker answers at http://tracker.invalid:7400 (" in await refusal("http://tracker.invalid:7400")


async def test_a_tracker_that_hangs_is_given_up() -> None:
    given_up = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await given_up.wait()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hang)
    async with serving(app) as url:
        assert f"the tracker at {url} gave no answer within 0.05 s" in await refusal(url, timeout_s=0.05)
        given_up.set()


@pytest.mark.parametrize(
    ("response", "seen"),
    [
        ({"text": "<html>proxy</html>", "status": 502}, "status 502, '<html>proxy</html>'"),
        ({"text": '{"detail": "Not Found"}', "status": 404}, "status 404"),
        ({"text": '{"error": "no"}', "status": 400}, "status 400"),
        ({"text": "[]"}, "status 200, '[]'"),
        ({"text": "[" * 100_000}, "status 200"),
        ({"body": b"\xff\xfe", "content_type": "text/plain", "charset": "utf-8"}, "no tracker answers"),
        ({"text": "{}"}, "it granted a lease of None s"),
        ({"text": '{"lease_s": -1}'}, "lease_s must be null or a number from 0 to 86400, not -1"),
        ({"text": '{"lease_s": 0}'}, "it granted a lease of 0.0 s"),
        ({"text": '{"lease_s": NaN}'}, "lease_s must be null or a number from 0 to 86400, not nan"),
        ({"text": '{"lease_s": true}'}, "not True"),
        ({"status": 302, "headers": {"Location": "/"}}, "status 302"),
    ],
)
async def test_something_else_at_the_address_is_told(response: dict[str, Any], seen: str) -> None:
    async with serving(answering(**response)) as url:
        assert seen in await refusal(url)


async def test_an_unreadable_snapshot_or_route_is_the_trackers_fault_and_not_the_callers() -> None:
    async with serving(answering(text='{"nodes": [{}], "hops": 3}')) as url:
        client = TrackerClient(url)
        with pytest.raises(TrackerUnreachableError, match="is no meshnet tracker"):
            await client.snapshot()
        with pytest.raises(TrackerUnreachableError, match="is no meshnet tracker"):
            await client.route("m")
        await client.close()


async def test_a_connection_kept_from_before_a_restart_costs_no_call() -> None:
    clock = ManualClock()
    directory = Directory(clock)
    directory.announce(node("a", "0-29"))
    async with serving(create_app(directory)) as url:
        client = TrackerClient(url)
        await client.route("m")
    async with serving(create_app(directory), port=int(url.rpartition(":")[2])):
        assert str(await client.route("m")) == "a[0-29]"
    await client.close()
    await client.close()


@pytest.mark.parametrize("url", ["", "10.0.0.5:7400", "http://", "ftp://x"])
def test_an_address_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="a tracker's address is a URL such as"):
        TrackerClient(url)
