"""The JSON of answers, whole and in chunks, for the two endpoints. Knows no generation and no HTTP."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from meshnet_core.sampling import SampledToken
from meshnet_gateway.answer_parts import Content, Part, Reasoning
from meshnet_gateway.text_model import TextModel
from meshnet_gateway.tool_format import ToolCall

_LEAST_LOGPROB = -9999.0  # OpenAI's figure for "not among the likely ones"; JSON has no infinity


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; of the prompt, ``cached`` ones were not computed again."""

    prompt: int
    completion: int
    cached: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class Choice:
    """One of a request's answers, as it has come together; ``stop`` is the stop string that it ended at, if any."""

    index: int
    parts: list[Part] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None


class AnswerShape(Protocol):
    """Writes answers as an endpoint's clients expect them. ``index`` is the place of an answer among the request's."""

    id: str

    def whole(self, choices: Sequence[Choice], usage: Usage, meshnet: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""
        ...

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The chunks before any text."""
        ...

    def piece(self, index: int, parts: Sequence[Part], tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        """The chunks for some parts."""
        ...

    def closing(
        self, index: int, finish: str | None, meshnet: dict[str, Any], stop: str | None = None
    ) -> list[dict[str, Any]]:
        """The chunks that tell how one answer ended, be it at a stop string."""
        ...

    def ending(self, usage: Usage) -> list[dict[str, Any]]:
        """The chunks after all answers."""
        ...

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """A chunk, or an error in OpenAI's shape, as a server-sent event."""
        ...

    @property
    def last(self) -> bytes:
        """What ends a stream, be it after an error."""
        ...


@dataclass(slots=True)
class _Shape:
    """What both have in common.

    Args:
        model: whose tokens are written.
        logprobs: whether to write them.
        with_usage: whether chunks have a ``usage`` field (null until the last).
    """

    model: TextModel
    logprobs: bool = False
    with_usage: bool = False
    id: str = field(init=False)
    created: int = field(init=False, default_factory=lambda: int(time.time()))

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"

    def _document(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}
        return {**head, "choices": choices, **more}

    def _chunk(self, index: int, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        if self.with_usage:
            more = {"usage": None, **more}
        return self._document(self.chunk_object, [{"index": index, **choice}], **more)

    def ending(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._document(self.chunk_object, [], usage=usage.to_json())] if self.with_usage else []

    def encode(self, chunk: dict[str, Any]) -> bytes:
        return server_sent(chunk)

    @property
    def last(self) -> bytes:
        return b"data: [DONE]\n\n"

    def _text_of(self, token: int) -> str:
        return self.model.token_bytes(token).decode(errors="replace")


@dataclass(slots=True)
class ChatShape(_Shape):
    """``chat.completion`` and ``chat.completion.chunk``."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    _calls: dict[int, int] = field(init=False, default_factory=dict)  # calls streamed so far, by answer

    def whole(self, choices: Sequence[Choice], usage: Usage, meshnet: dict[str, Any]) -> dict[str, Any]:
        written = [
            {
                "index": choice.index,
                "message": self._message(choice.parts),
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish,
            }
            for choice in choices
        ]
        return self._document(self.whole_object, written, usage=usage.to_json(), meshnet=meshnet)

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, {"delta": delta, "logprobs": None, "finish_reason": None})]

    def piece(self, index: int, parts: Sequence[Part], tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        deltas = [delta for part in parts for delta in self._deltas(index, part)] or [{"content": ""}]
        chunks = []
        for at, delta in enumerate(deltas):
            logprobs = self._logprobs(tokens if at == 0 else ())
            chunks.append(self._chunk(index, {"delta": delta, "logprobs": logprobs, "finish_reason": None}))
        return chunks

    def closing(
        self, index: int, finish: str | None, meshnet: dict[str, Any], stop: str | None = None
    ) -> list[dict[str, Any]]:
        return [self._chunk(index, {"delta": {}, "logprobs": None, "finish_reason": finish}, meshnet=meshnet)]

    def _message(self, parts: Sequence[Part]) -> dict[str, Any]:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [_call(part) for part in parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _deltas(self, index: int, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, Content):
            return [{"content": part.text}]
        if isinstance(part, Reasoning):
            return [{"reasoning_content": part.text}]
        at = self._calls.get(index, 0)
        self._calls[index] = at + 1
        whole = _call(part)
        head = {**whole, "index": at, "function": {"name": part.name, "arguments": ""}}
        return [
            {"tool_calls": [head]},
            {"tool_calls": [{"index": at, "function": {"arguments": part.arguments}}]},
        ]

    def _logprobs(self, tokens: Iterable[SampledToken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = []
        for token in tokens:
            entry = self._entry(token.id, token.logprob)
            entry["top_logprobs"] = [self._entry(other, logprob) for other, logprob in token.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        written = self.model.token_bytes(token)
        return {"token": self._text_of(token), "logprob": _finite(logprob), "bytes": list(written)}


@dataclass(slots=True)
class CompletionShape(_Shape):
    """``text_completion``, whose chunks look like the whole.

    Args:
        echoed: the prompt of each answer, where it is to come before the answer's text.
    """

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    echoed: Mapping[int, str] = field(default_factory=dict)
    _offsets: dict[int, int] = field(init=False, default_factory=dict)  # characters written by an answer's tokens

    def whole(self, choices: Sequence[Choice], usage: Usage, meshnet: dict[str, Any]) -> dict[str, Any]:
        written = [
            {
                "index": choice.index,
                "text": self.echoed.get(choice.index, "") + _text(choice.parts),
                "logprobs": self._logprobs(choice.index, choice.tokens),
                "finish_reason": choice.finish,
            }
            for choice in choices
        ]
        return self._document(self.whole_object, written, usage=usage.to_json(), meshnet=meshnet)

    def opening(self, index: int) -> list[dict[str, Any]]:
        if not (prompt := self.echoed.get(index)):
            return []
        return [self._chunk(index, {"text": prompt, "logprobs": None, "finish_reason": None})]

    def piece(self, index: int, parts: Sequence[Part], tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        logprobs = self._logprobs(index, tokens)
        return [self._chunk(index, {"text": _text(parts), "logprobs": logprobs, "finish_reason": None})]

    def closing(
        self, index: int, finish: str | None, meshnet: dict[str, Any], stop: str | None = None
    ) -> list[dict[str, Any]]:
        return [self._chunk(index, {"text": "", "logprobs": None, "finish_reason": finish}, meshnet=meshnet)]

    def _logprobs(self, index: int, tokens: Iterable[SampledToken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text = self._text_of(token.id)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(_finite(token.logprob))
            columns["top_logprobs"].append({self._text_of(other): _finite(logprob) for other, logprob in token.top})
            columns["text_offset"].append(self._offsets.get(index, 0))
            self._offsets[index] = self._offsets.get(index, 0) + len(text)
        return columns


def server_sent(document: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event, with a name where it has one."""
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (f"event: {name}\n" if name else "").encode() + b"data: " + data.encode() + b"\n\n"


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob
