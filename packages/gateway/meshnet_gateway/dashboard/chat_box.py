"""The chat box: a question, an answer that comes word by word, and what went wrong where something did."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from nicegui import background_tasks, ui

from meshnet_core.errors import MeshnetError
from meshnet_gateway.dashboard.chat_source import BrokeOff, ChatSource, Ended, Reading, Said

DEFAULT_TOKENS, MOST_TOKENS = 256, 100_000


class ChatBox:
    """One visitor's conversation, kept by the page alone.

    Args:
        source: asks the models.
        key_id: of the visitor.
    """

    def __init__(self, source: ChatSource, key_id: str | None) -> None:
        self._source = source
        self._key_id = key_id
        self._messages: list[dict[str, str]] = []
        self._asking: asyncio.Task[None] | None = None
        self._model = ui.select([], label="Model").props('outlined dense aria-label="Model"').classes("w-full")
        self._log = ui.element("div").classes("mn-log")
        self._log.props('role="log" aria-live="polite" aria-label="Conversation" tabindex="0"')
        self._note = ui.label().classes("mn-note").props('role="status"')
        with ui.element("div").classes("mn-ask"):
            self._question = ui.textarea(label="Message").props(
                'outlined autogrow dense aria-label="Message" input-style="max-height:140px"'
            )
            self._question.on("keydown.enter.exact.prevent", self.send)
            self._longest = ui.number(label="Longest answer", value=DEFAULT_TOKENS, min=1, max=MOST_TOKENS, precision=0)
            self._longest.props('outlined dense aria-label="Longest answer, in tokens"').style("width:110px")
            self._send = ui.button("Send", on_click=self.send, color=None).classes("mn-do").props("unelevated no-caps")
            self._stop = ui.button("Stop", on_click=self.stop, color=None).classes("mn-plain").props("outline no-caps")
            self._anew = (
                ui.button("New chat", on_click=self.begin_anew, color=None).classes("mn-plain").props("flat no-caps")
            )
        self._stop.disable()
        ui.context.client.on_delete(self.stop)  # who has left wants no more of it

    def offer(self, models: list[str]) -> None:
        """The models to choose from."""
        if models == self._model.options:
            return
        chosen = self._model.value if self._model.value in models else (models[0] if models else None)
        self._model.set_options(models, value=chosen)

    def send(self) -> None:
        """Ask what is in the field."""
        text = (self._question.value or "").strip()
        if not text or self._asking is not None:
            return
        if not self._model.value:
            self._note.text = "No model is whole on the mesh; the picture shows what lacks."
            return
        self._question.value = ""
        self._messages.append({"role": "user", "content": text})
        self._say(text, "mn-mine", "You")
        longest = int(self._longest.value or DEFAULT_TOKENS)
        self._asking = background_tasks.create(self._answer(self._model.value, longest), name="chat answer")

    def stop(self) -> None:
        """End the answer where it is."""
        if self._asking is not None:
            self._asking.cancel()

    def begin_anew(self) -> None:
        """Forget the conversation."""
        self.stop()
        self._messages = []  # an answer that is being stopped still has the old one
        self._log.clear()
        self._note.text = ""

    async def _answer(self, model: str, longest: int) -> None:
        messages = self._messages
        self._send.disable()
        self._stop.enable()
        self._note.text = "Waiting for the first word ..."
        answer: list[str] = []
        try:
            await self._hear(model, messages, longest, answer)
        except MeshnetError as error:
            self._failed(error.message)
        except asyncio.CancelledError:
            self._note.text = "Stopped."
        except Exception:
            self._failed("the gateway failed; its log tells why")
            raise
        finally:
            # What was said stays part of the conversation, whole or not; a question without any answer does not.
            if answer:
                messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                messages.pop()
            self._asking = None
            self._send.enable()
            self._stop.disable()

    async def _hear(self, model: str, messages: list[dict[str, str]], longest: int, answer: list[str]) -> None:
        """Show what is heard; its text goes into ``answer``."""
        said: ui.label | None = None
        thought: ui.label | None = None
        async with aclosing(self._source.ask(model, messages, longest, self._key_id)) as heard:
            async for one in heard:
                if isinstance(one, Reading):
                    self._note.text = f"Reads the prompt: {one.done} of {one.total} tokens"
                elif isinstance(one, Said) and one.thought:
                    thought = thought or self._say("", "mn-thought", "Thought")
                    thought.text += one.text
                elif isinstance(one, Said):
                    said = said or self._say("", "", "Answer")
                    self._note.text = "Writes ..."
                    said.text += one.text
                    answer.append(one.text)
                    self._to_end()
                elif isinstance(one, BrokeOff):
                    self._failed(one.message)
                else:
                    self._note.text = _ending(one)

    def _failed(self, message: str) -> None:
        self._note.text = ""
        self._say(message, "mn-failed", "Error")

    def _say(self, text: str, kind: str, who: str) -> ui.label:
        with self._log:
            label = ui.label(text).classes(f"mn-says {kind}").props(f'data-who="{who}"')
        self._to_end()
        return label

    def _to_end(self) -> None:
        self._log.client.run_javascript(
            f"const log = getHtmlElement({self._log.id}); if (log) log.scrollTop = log.scrollHeight"
        )


def _ending(ended: Ended) -> str:
    report = ended.report
    speed = report.get("tokens_per_s")
    hops = " → ".join(hop["node"] for hop in report.get("route", ()))
    parts = [f"{report.get('completion_tokens', 0)} tokens"]
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if hops:
        parts.append(f"over {hops}")
    if ended.finish_reason == "length":
        parts.append("cut at the longest answer")
    return ", ".join(parts)
