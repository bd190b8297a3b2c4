"""The dashboard's page: what `watch` knows, laid out, and brought up to date while it is open."""

from __future__ import annotations

from pathlib import Path

from nicegui import ui

from meshnet_core.errors import MeshnetError
from meshnet_gateway.dashboard import login
from meshnet_gateway.dashboard.access import Access, Visitor
from meshnet_gateway.dashboard.chat_box import ChatBox
from meshnet_gateway.dashboard.chat_source import ChatSource
from meshnet_gateway.dashboard.picture_html import node_table_html, picture_html, reasons_html, trackers_html
from meshnet_gateway.dashboard.speed_chart import SpeedChart
from meshnet_gateway.dashboard.totals import by_reason, node_figures
from meshnet_gateway.dashboard.watch import Watch

REFRESH_S, REDRAW_S = 0.5, 2.0
STYLE = (Path(__file__).parent / "style.css").read_text()
_MODES: dict[str, bool | None] = {"Theme: system": None, "Theme: light": False, "Theme: dark": True}


async def show(watch: Watch, chats: ChatSource, access: Access) -> None:
    """Build the page for one browser."""
    client = ui.context.client
    ui.add_head_html(f"<style>{STYLE}</style>")
    dark = ui.dark_mode(value=None)
    frame = ui.element("div").classes("mn-page")

    def entered(visitor: Visitor) -> None:
        with frame:
            Board(watch, ChatBoxes(chats, visitor), dark, leave=access.needs_key)

    if not access.needs_key:
        entered(access.enter("", client.ip or "?"))
        return
    await client.connected()
    with frame:
        await login.log_in(access, client.ip or "?", entered)


class ChatBoxes:
    """Makes the chat box of one visitor."""

    def __init__(self, chats: ChatSource, visitor: Visitor) -> None:
        self._chats = chats
        self._visitor = visitor

    def box(self) -> ChatBox:
        return ChatBox(self._chats, self._visitor.key_id)

    async def models(self) -> list[str]:
        """Those that can answer; none while nobody knows."""
        try:
            return await self._chats.models()
        except MeshnetError:
            return []


class Board:
    """Everything on the page of somebody who may see it. ``leave`` says whether there is a key to forget."""

    def __init__(self, watch: Watch, chats: ChatBoxes, dark: ui.dark_mode, *, leave: bool) -> None:
        self._watch = watch
        self._chats = chats
        with ui.element("header").classes("mn-top"):
            ui.html("meshnet <small>who holds what, and what runs</small>", tag="h1")
            self._theme(dark)
            if leave:
                ui.button("Log out", on_click=self._log_out, color=None).classes("mn-plain").props("flat no-caps")
        self._warning = ui.label().classes("mn-warning").props('role="alert"')
        with ui.element("main").classes("mn-grid"):
            with ui.element("div").classes("mn-side"):
                with _card("The mesh"):
                    self._mesh = ui.html("")
                with _card("Speed"):
                    self._speed = SpeedChart()
            with ui.element("div").classes("mn-side"):
                with _card("Chat"):
                    self._chat = chats.box()
                with _card("Sessions and cache"):
                    self._nodes = ui.html("")
                with _card("Lost state"), ui.element("div").classes("mn-two"):
                    with ui.element("div"):
                        ui.html("Evicted and dropped", tag="h3")
                        self._dropped = ui.html("")
                    with ui.element("div"):
                        ui.html("Cache misses", tag="h3")
                        self._misses = ui.html("")
                with _card("Trackers"):
                    self._trackers = ui.html("")
        ui.timer(REFRESH_S, self.refresh)
        ui.timer(REDRAW_S, lambda: self._speed.show(watch.speeds(), watch.speed.newest))

    async def refresh(self) -> None:
        """Show what is known now; elements that show the same already are not sent again."""
        watch = self._watch
        pictures = watch.looks()
        nodes = watch.machines.nodes
        nothing = "No node has registered yet." if watch.asked else "Looking at the mesh ..."
        self._mesh.content = "".join(map(picture_html, pictures)) or f'<p class="mn-quiet">{nothing}</p>'
        self._nodes.content = node_table_html(node_figures(nodes))
        self._dropped.content = reasons_html(by_reason(nodes, "dropped"), "None so far.")
        self._misses.content = reasons_html(by_reason(nodes, "misses"), "None so far.")
        self._trackers.content = trackers_html(watch.trackers)
        self._warning.text = "; ".join([*([watch.trouble] if watch.trouble else []), *watch.degraded])
        self._chat.offer(await self._chats.models())

    @staticmethod
    def _theme(dark: ui.dark_mode) -> None:
        names = list(_MODES)

        def turn() -> None:
            after = names[(names.index(button.text) + 1) % len(names)]
            button.text = after
            dark.value = _MODES[after]

        button = ui.button(names[0], on_click=turn, color=None).classes("mn-plain").props("flat no-caps")

    @staticmethod
    def _log_out() -> None:
        login.forget()
        ui.navigate.reload()


def _card(title: str) -> ui.element:
    card = ui.element("section").classes("mn-card").props(f'aria-label="{title}"')
    with card:
        ui.html(title, tag="h2")
    return card
