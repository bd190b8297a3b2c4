"""The chat box's way to the models: the gateway's own chat, in this process, as the API's clients have it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from meshnet_core.chat_sampling import CHAT_TEMPERATURE, CHAT_TOP_P
from meshnet_core.errors import RequestRefusedError
from meshnet_gateway.api_routes import Door
from meshnet_gateway.api_types import ChatRequest
from meshnet_gateway.job_kinds import chat_job
from meshnet_gateway.prefix_scope import scope_of

_PREFILL = re.compile(r": meshnet prefill (\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the answer; ``thought`` where it is the model's reasoning."""

    text: str
    thought: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """So many positions of the prompt are taken in."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is whole, or as long as it may be; the generation's report."""

    finish_reason: str
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokeOff:
    """It ended with this error."""

    message: str


Heard = Said | Reading | Ended | BrokeOff


class ChatSource:
    """Asks the models of one gateway."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def models(self) -> list[str]:
        """Names of the models that can answer now.

        Raises:
            MeshnetError: nobody knows.
        """
        return sorted({model.name for model in await self._door.mesh.models() if model.complete})

    async def ask(
        self, model: str, messages: Sequence[dict[str, str]], max_tokens: int, key_id: str | None
    ) -> AsyncGenerator[Heard]:
        """The answer to a conversation, as it is made. Close it to stop it.

        Args:
            messages: each with ``role`` and ``content``.
            max_tokens: of the answer.
            key_id: of who asks; None where no key is needed.

        Raises:
            MeshnetError: before anything is heard.
        """
        try:
            asked = {"model": model, "messages": list(messages), "stream": True, "max_completion_tokens": max_tokens}
            body = ChatRequest.model_validate(asked | {"temperature": CHAT_TEMPERATURE, "top_p": CHAT_TOP_P})
        except ValidationError as error:
            raise RequestRefusedError(error.errors()[0]["msg"]) from error
        text_model = await self._door.texts.get(model)
        job = await asyncio.to_thread(chat_job, "chat", body, text_model, scope_of(key_id, {}, None))
        async with aclosing(self._door.jobs.streamed(job)) as stream:
            async for block in stream:
                for event in block.decode().split("\n\n"):
                    for heard in events_in(event):
                        yield heard


def events_in(event: str) -> list[Heard]:
    """What one server-sent event of a chat tells."""
    if progress := _PREFILL.fullmatch(event.strip()):
        return [Reading(int(progress[1]), int(progress[2]))]
    if not event.startswith("data: ") or event == "data: [DONE]":
        return []
    document = json.loads(event.removeprefix("data: "))
    if "error" in document:
        return [BrokeOff(document["error"]["message"])]
    heard: list[Heard] = []
    for choice in document["choices"]:
        delta = choice["delta"]
        if thought := delta.get("reasoning_content"):
            heard.append(Said(thought, thought=True))
        if text := delta.get("content"):
            heard.append(Said(text))
        if choice["finish_reason"]:
            heard.append(Ended(choice["finish_reason"], document.get("meshnet") or {}))
    return heard
