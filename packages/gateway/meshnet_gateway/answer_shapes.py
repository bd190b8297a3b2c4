"""The JSON of answers, whole and in chunks, for the two endpoints. Knows no generation and no HTTP."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from meshnet_core.sampling import SampledToken
from meshnet_gateway.text_model import TextModel

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


class AnswerShape(Protocol):
    """Writes one answer as an endpoint's clients expect it."""

    id: str

    def whole(
        self, text: str, tokens: Iterable[SampledToken], finish: str | None, usage: Usage, meshnet: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer that is not streamed."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """The chunk before any text; None where the endpoint has none."""
        ...

    def piece(self, text: str, tokens: Iterable[SampledToken]) -> dict[str, Any]:
        """A chunk of text."""
        ...

    def closing(self, finish: str | None, meshnet: dict[str, Any]) -> dict[str, Any]:
        """The chunk that tells how the answer ended."""
        ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk after it, where usage was asked for."""
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

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        if self.with_usage:
            more = {"usage": None, **more}
        return self._document(self.chunk_object, [{"index": 0, **choice}], **more)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._document(self.chunk_object, [], usage=usage.to_json())

    def _text_of(self, token: int) -> str:
        return self.model.token_bytes(token).decode(errors="replace")


@dataclass(slots=True)
class ChatShape(_Shape):
    """``chat.completion`` and ``chat.completion.chunk``."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def whole(
        self, text: str, tokens: Iterable[SampledToken], finish: str | None, usage: Usage, meshnet: dict[str, Any]
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish,
        }
        return self._document(self.whole_object, [choice], usage=usage.to_json(), meshnet=meshnet)

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"delta": delta, "logprobs": None, "finish_reason": None})

    def piece(self, text: str, tokens: Iterable[SampledToken]) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}, "logprobs": self._logprobs(tokens), "finish_reason": None})

    def closing(self, finish: str | None, meshnet: dict[str, Any]) -> dict[str, Any]:
        return self._chunk({"delta": {}, "logprobs": None, "finish_reason": finish}, meshnet=meshnet)

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
    """``text_completion``, whose chunks look like the whole."""

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    _offset: int = field(init=False, default=0)  # characters written by the tokens so far

    def whole(
        self, text: str, tokens: Iterable[SampledToken], finish: str | None, usage: Usage, meshnet: dict[str, Any]
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": finish}
        return self._document(self.whole_object, [choice], usage=usage.to_json(), meshnet=meshnet)

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, text: str, tokens: Iterable[SampledToken]) -> dict[str, Any]:
        return self._chunk({"text": text, "logprobs": self._logprobs(tokens), "finish_reason": None})

    def closing(self, finish: str | None, meshnet: dict[str, Any]) -> dict[str, Any]:
        return self._chunk({"text": "", "logprobs": None, "finish_reason": finish}, meshnet=meshnet)

    def _logprobs(self, tokens: Iterable[SampledToken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text = self._text_of(token.id)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(_finite(token.logprob))
            columns["top_logprobs"].append({self._text_of(other): _finite(logprob) for other, logprob in token.top})
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob
