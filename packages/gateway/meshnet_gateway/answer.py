"""One answer: tokens in, pieces of it out, up to where it ends. Knows no HTTP and no JSON shape of an API.

tokens ── decoder (whole characters) ── stop scanner (holds back what may be a stop string) ── reader (parts) ── pieces
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from meshnet_core.errors import MeshnetError
from meshnet_core.sampling import SampledToken
from meshnet_gateway.answer_parts import Part, PlainText, TextReader
from meshnet_gateway.generation import PrefillProgress
from meshnet_gateway.ports import GenerationLike
from meshnet_gateway.stop_strings import StopScanner
from meshnet_gateway.text_model import TextModel
from meshnet_gateway.tool_format import ToolCall


@dataclass(frozen=True, slots=True)
class Piece:
    """Some parts of the answer, never empty of both: ``tokens`` is filled only where logprobs were asked for."""

    parts: tuple[Part, ...]
    tokens: tuple[SampledToken, ...] = ()


class Answer:
    """Reads one generation.

    Args:
        generation: read to its end or to a stop string; the caller closes it.
        model: of the generation.
        stops: stop strings.
        reader: tells the parts of the text.
        logprobs: whether pieces carry the tokens that they come from.

    Attributes:
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"`` once it has ended.
        stop: the stop string that it has ended at.
        completion_tokens: tokens that the model made so far.
    """

    def __init__(
        self,
        generation: GenerationLike,
        model: TextModel,
        stops: Sequence[str],
        reader: TextReader | None = None,
        *,
        logprobs: bool = False,
    ) -> None:
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self.completion_tokens = 0
        self._generation = generation
        self._decoder = model.decoder()
        self._scanner = StopScanner(stops)
        self._reader = reader or PlainText()
        self._tokens = _TokensInText() if logprobs else None
        self._calls = False

    async def events(self) -> AsyncGenerator[PrefillProgress | Piece]:
        """Progress of the prefill, then pieces; together they are the whole text.

        Raises:
            MeshnetError: what ended the generation early; text that had been held back is given out before.
        """
        failure: MeshnetError | None = None
        try:
            async for event in self._generation:
                if isinstance(event, PrefillProgress):
                    yield event
                    continue
                self.completion_tokens += 1
                if piece := self._take(event):
                    yield piece
                if self._scanner.found is not None:
                    break
        except MeshnetError as error:
            failure = error
        if piece := self._rest(broken_off=failure is not None):
            yield piece
        if failure is not None:
            raise failure
        self.stop = self._scanner.found
        self.finish_reason = "stop" if self.stop is not None else self._generation.finish_reason
        if self._calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def _take(self, token: SampledToken) -> Piece | None:
        decoded = self._decoder.feed(token.id)
        text = self._scanner.feed(decoded)
        parts = self._reader.feed(text) if text else []
        if self._tokens is None:
            return self._piece(parts)
        self._tokens.add(token, len(decoded))
        return self._piece(parts, self._tokens.covered_by(len(text), cut=self._scanner.found is not None))

    def _rest(self, *, broken_off: bool) -> Piece | None:
        decoded = "" if broken_off or self._scanner.found is not None else self._decoder.flush()
        text = self._scanner.feed(decoded) + self._scanner.flush()
        parts = [*self._reader.feed(text), *self._reader.flush()]
        tokens: tuple[SampledToken, ...] = ()
        if self._tokens is not None:
            cut = self._scanner.found is not None
            tokens = self._tokens.covered_by(len(text), cut=cut, end=not (broken_off or cut))
        return self._piece(parts, tokens)

    def _piece(self, parts: list[Part], tokens: tuple[SampledToken, ...] = ()) -> Piece | None:
        self._calls = self._calls or any(isinstance(part, ToolCall) for part in parts)
        return Piece(tuple(parts), tokens) if parts or tokens else None


class _TokensInText:
    """Which tokens the text that was given out has come from.

    A token goes with the piece that it ends in; where a stop string cuts it in two, its beginning counts.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, SampledToken]] = deque()  # where each begins and ends, in characters
        self._decoded = 0
        self._given = 0

    def add(self, token: SampledToken, characters: int) -> None:
        self._waiting.append((self._decoded, self._decoded + characters, token))
        self._decoded += characters

    def covered_by(self, characters: int, *, cut: bool, end: bool = False) -> tuple[SampledToken, ...]:
        """Tokens of the text so far, ``characters`` of it new.

        Args:
            characters: how many came with this piece.
            cut: a stop string ends the text here; what begins beyond is dropped for good.
            end: the generation is over, so every token has its place.
        """
        self._given += characters
        found = []
        while self._waiting:
            begin, stop, token = self._waiting[0]
            if not (end or (begin < self._given if cut else stop <= self._given)):
                break
            found.append(token)
            self._waiting.popleft()
        return tuple(found)
