"""Puts the dashboard on a gateway's app, at `/dashboard`; without NiceGUI, a line that says how to get it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, RedirectResponse

from meshnet_core.clock import Clock
from meshnet_gateway.api_keys import DASHBOARD, ApiKeys

HOW_TO_GET = "the dashboard is not installed on this gateway; install it with: pip install 'meshnet[dashboard]'"

logger = logging.getLogger(__name__)


@asynccontextmanager
async def dashboard(app: FastAPI, keys: ApiKeys | None, clock: Clock) -> AsyncIterator[bool]:
    """The dashboard on the app of a gateway, as `create_app` made it, while the block runs; False where it lacks.

    NiceGUI is one for a process, and so is this. Call it before the app starts.
    """
    if importlib.util.find_spec("nicegui") is None:
        logger.info("%s", HOW_TO_GET)

        @app.get(DASHBOARD, include_in_schema=False)
        async def missing() -> PlainTextResponse:
            return PlainTextResponse(f"{HOW_TO_GET}\n", 404)

        yield False
        return
    from nicegui import ui  # noqa: PLC0415 - the extra brings it

    from meshnet_gateway.dashboard.access import Access  # noqa: PLC0415
    from meshnet_gateway.dashboard.chat_source import ChatSource  # noqa: PLC0415
    from meshnet_gateway.dashboard.page import show  # noqa: PLC0415
    from meshnet_gateway.dashboard.watch import Watch  # noqa: PLC0415

    door = app.state.door
    watch = Watch(door.mesh.status, door.figures.live, clock)
    chats, access = ChatSource(door), Access(keys, app.state.doorkeeper)

    @ui.page("/")
    async def page() -> None:
        await show(watch, chats, access)

    @app.get(DASHBOARD, include_in_schema=False)
    async def at_its_root() -> RedirectResponse:
        return RedirectResponse(f"{DASHBOARD}/")

    ui.run_with(
        app, mount_path=DASHBOARD, title="meshnet", dark=None, language="en-US", tailwind=False,
        show_welcome_message=False, binding_refresh_interval=None,
    )  # fmt: skip
    async with watch.watching():
        yield True
