"""The JSON of answers to Anthropic's POST /v1/messages, whole and in events. Knows no generation and no HTTP."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshnet_core.sampling import SampledToken
from meshnet_gateway.answer_parts import Content, Part, Reasoning
from meshnet_gateway.answer_shapes import Choice, Usage, server_sent
from meshnet_gateway.text_model import TextModel
from meshnet_gateway.tool_format import ToolCall

PATH = "/v1/messages"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip


def error_for(path: str, status: int, error: dict[str, Any]) -> dict[str, Any]:
    """An error in OpenAI's shape, or what the clients of ``path`` read in its place."""
    return error_document(status, error) if path == PATH else error


def error_document(status: int, error: dict[str, Any]) -> dict[str, Any]:
    """An error in Anthropic's shape, from one in OpenAI's."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}


@dataclass(slots=True)
class MessagesShape:
    """``message``, and the events that build one.

    Args:
        model: that answers.
        prompt_tokens: told at the beginning.
    """

    model: TextModel
    prompt_tokens: int
    id: str = field(init=False, default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _block: int = field(init=False, default=-1)  # the content block that is open, or was last
    _kind: type[Part] | None = field(init=False, default=None)  # of the open one; None where none is
    _end: dict[str, Any] = field(init=False, default_factory=dict)

    def whole(self, choices: Sequence[Choice], usage: Usage, meshnet: dict[str, Any]) -> dict[str, Any]:
        (choice,) = choices
        blocks: list[dict[str, Any]] = []
        for part in choice.parts:
            if isinstance(part, ToolCall):
                blocks.append({**_begun(part), "input": json.loads(part.arguments)})
                continue
            key = "text" if isinstance(part, Content) else "thinking"
            if not blocks or blocks[-1]["type"] != key:
                blocks.append(_begun(part))
            blocks[-1][key] += part.text
        return {**self._message(usage), "content": blocks, **self._stop(choice.finish, choice.stop), "meshnet": meshnet}

    def opening(self, index: int) -> list[dict[str, Any]]:
        usage = Usage(prompt=self.prompt_tokens, completion=0)
        return [{"type": "message_start", "message": {**self._message(usage), "content": [], **self._stop(None)}}]

    def piece(self, index: int, parts: Sequence[Part], tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            if self._kind is not type(part) or isinstance(part, ToolCall):
                events += self._close()
                self._block += 1
                self._kind = type(part)
                events.append({"type": "content_block_start", "index": self._block, "content_block": _begun(part)})
            events.append({"type": "content_block_delta", "index": self._block, "delta": _delta(part)})
        return events

    def closing(
        self, index: int, finish: str | None, meshnet: dict[str, Any], stop: str | None = None
    ) -> list[dict[str, Any]]:
        self._end = {"delta": self._stop(finish, stop), "meshnet": meshnet}
        return self._close()

    def ending(self, usage: Usage) -> list[dict[str, Any]]:
        told = {"type": "message_delta", **self._end, "usage": _usage(usage)}
        return [told, {"type": "message_stop"}]

    def encode(self, chunk: dict[str, Any]) -> bytes:
        if "type" not in chunk:
            chunk = error_document(500, chunk)
        return server_sent(chunk, str(chunk["type"]))

    @property
    def last(self) -> bytes:
        return b""

    def _message(self, usage: Usage) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model.name}
        return {**head, "usage": _usage(usage)}

    def _stop(self, finish: str | None, stop: str | None = None) -> dict[str, Any]:
        if finish == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _REASONS.get(finish or ""), "stop_sequence": None}

    def _close(self) -> list[dict[str, Any]]:
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._block}]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }


def _begun(part: Part) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"type": "text", "text": ""}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": {}}


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.arguments}
