"""`meshnet events`: nodes that joined, restarted, drained, left or died, as a tracker noticed it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import complaint, find_trackers, options, trust
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.errors import TrackerUnreachableError

if TYPE_CHECKING:
    from meshnet_core.event_page import EventPage, NodeEvent

WAIT_S = 25  # for the next event, in one call
RETRY_S = 2.0  # between two tries to reach any tracker
SHOWN = 50


def events(
    tracker: options.TrackerUrls = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what happens from now on.")] = False,
    last: Annotated[
        int, typer.Option("--last", min=0, metavar="N", help="How many of those that happened before to show.")
    ] = SHOWN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; with --follow one in a line for each event.")
    ] = False,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
) -> None:
    """Show which nodes joined, restarted, drained, left or died."""
    identity = trust.identity_for(options.LOOPBACK, mesh, insecure=insecure, command="events")
    source = EventSource(options.tracker_urls(tracker), identity, insecure=insecure)
    if follow:
        asyncio.run(_print_all(source, last, as_json=as_json))
        return
    page = asyncio.run(source.page())
    shown = page.events[-last:] if last else ()
    if as_json:
        print(json.dumps({"log": page.log, "last": page.last, "events": [one.to_wire() for one in shown]}, indent=2))
        return
    for event in shown:
        print(line(event))
    if not page.events:
        complaint.say("nothing has happened to any node since this tracker started")


def line(event: NodeEvent) -> str:
    """An event as people read it, in their own time."""
    return f"{datetime.fromtimestamp(event.at).astimezone():%Y-%m-%d %H:%M:%S}  {event.kind:<7}  {event.text}"


async def _print_all(source: EventSource, last: int, *, as_json: bool) -> None:
    async for event in source.follow(last):
        print(json.dumps(event.to_wire()) if as_json else line(event), flush=True)


@dataclass
class Tail:
    """What was seen of a tracker's log, so that nothing is shown twice; pure.

    Attributes:
        log, seq: whose numbers, and the last one seen.
        at: when that was.
    """

    log: str | None = None
    seq: int = 0
    at: float = 0.0

    def fresh(self, page: EventPage) -> tuple[NodeEvent, ...]:
        """The events of the next page that were not seen; of another tracker, whose numbers are its own, those that it
        noticed later than the last one seen."""
        known = self.log in (None, page.log)
        found = page.events if known else tuple(event for event in page.events if event.at > self.at)
        self.log, self.seq = page.log, page.last
        self.at = max([self.at, *(event.at for event in page.events)])
        return found


class EventSource:
    """The trackers of one mesh, as told at the command line (`find_trackers.trackers_for`, also for what it raises)."""

    def __init__(self, given: Sequence[str], identity: trust.Identity | None, *, insecure: bool) -> None:
        self._given = given
        self._identity = identity
        self._insecure = insecure

    async def page(self) -> EventPage:
        """What the first tracker that answers has kept."""
        async for page in self._pages(Tail()):
            return page
        raise CommandFailedError("the tracker told nothing")

    async def follow(self, last: int) -> AsyncIterator[NodeEvent]:
        """The ``last`` events, then all that follow; while no tracker answers, it is tried again and again."""
        tail, begun, complained = Tail(), False, False
        while True:
            try:
                async for page in self._pages(tail):
                    found = tail.fresh(page)
                    for event in found if begun else found[max(0, len(found) - last) :]:
                        yield event
                    begun, complained = True, False
            except (TrackerUnreachableError, CommandFailedError) as error:
                if not begun:
                    raise
                if not complained:
                    complaint.say(f"{error.message.partition('; ')[0]}; trying again")
                complained = True
                await asyncio.sleep(RETRY_S)

    async def _pages(self, tail: Tail) -> AsyncIterator[EventPage]:
        """Pages after ``tail``, the first at once and each later one when there is something on it, of one tracker."""
        from meshnet_core.tracker_client import TrackerClient

        url, *_ = await find_trackers.trackers_for(
            self._given, self._identity, insecure=self._insecure, looks_only=True
        )
        tls = trust.client_tls(self._identity)
        client = TrackerClient(url, tls=tls)
        try:
            wait_s = 0
            while True:
                yield await client.events(tail.seq, tail.log, wait_s=wait_s)
                wait_s = WAIT_S
        finally:
            await client.close()
