"""The login: a field for an API key, which the browser keeps for as long as its tab is open."""

from __future__ import annotations

import json
from collections.abc import Callable

from nicegui import ui

from meshnet_core.errors import MeshnetError
from meshnet_gateway.dashboard.access import Access, Visitor

_KEPT = "meshnet-api-key"  # in the tab's sessionStorage
_ASK_S = 10.0


async def log_in(access: Access, address: str, entered: Callable[[Visitor], None]) -> None:
    """Let in who has a key in the tab already; ask others for one. ``entered`` is called once."""
    kept = await ui.run_javascript(f"return sessionStorage.getItem({json.dumps(_KEPT)}) || ''", timeout=_ASK_S)
    if kept:
        try:
            visitor = access.enter(str(kept), address)
        except MeshnetError:
            forget()
        else:
            entered(visitor)
            return
    _form(access, address, entered)


def forget() -> None:
    """The browser keeps the key no longer."""
    ui.run_javascript(f"sessionStorage.removeItem({json.dumps(_KEPT)})")


def _form(access: Access, address: str, entered: Callable[[Visitor], None]) -> None:
    def enter() -> None:
        try:
            visitor = access.enter(key.value or "", address)
        except MeshnetError as error:
            said.text = error.message
            return
        ui.run_javascript(f"sessionStorage.setItem({json.dumps(_KEPT)}, {json.dumps(key.value.strip())})")
        card.delete()
        entered(visitor)

    with ui.element("section").classes("mn-card mn-login").props('aria-label="Log in"') as card:
        ui.html("Log in", tag="h2")
        ui.label("This gateway takes visitors with one of its API keys alone. The key stays in this browser tab.")
        key = ui.input(label="API key", password=True).classes("w-full")
        key.props('outlined autofocus autocomplete="off" aria-label="API key"').style("width:100%;margin:12px 0")
        key.on("keydown.enter", enter)
        said = ui.label().classes("mn-bad").props('role="alert"')
        ui.button("Log in", on_click=enter, color=None).classes("mn-do").props("unelevated no-caps").style(
            "margin-top:8px"
        )
