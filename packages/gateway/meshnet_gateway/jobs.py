"""From a valid request to an answer, whole or streamed: what the two endpoints share. Knows no routes of the app."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from meshnet_core.errors import MeshnetError, RequestRefusedError
from meshnet_core.sampling import SampledToken
from meshnet_gateway.answer import Answer, Piece
from meshnet_gateway.answer_shapes import AnswerShape, Usage
from meshnet_gateway.api_errors import ContextLengthError, error_object, from_mesh, http_status
from meshnet_gateway.api_types import GenerationFields
from meshnet_gateway.generation import GenerationRequest, PrefillProgress
from meshnet_gateway.ports import Engine, GenerationLike
from meshnet_gateway.recovery import Replay
from meshnet_gateway.releases import Releases
from meshnet_gateway.status import GatewayFigures
from meshnet_gateway.text_model import TextModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to run.

    Attributes:
        endpoint: ``chat`` or ``completions``, for the figures.
        fields: as the client sent them.
        model: of the request.
        request: for the engine.
        shape: writes the answer.
    """

    endpoint: str
    fields: GenerationFields
    model: TextModel
    request: GenerationRequest
    shape: AnswerShape


def make_job(
    endpoint: str, fields: GenerationFields, model: TextModel, prompt: tuple[int, ...], shape: AnswerShape, param: str
) -> Job:
    """A job for a prompt in token ids; ``param`` names the field that it comes from.

    Raises:
        RequestRefusedError: the prompt is empty, holds ids that the model lacks, or leaves no room for an answer.
    """
    if not prompt:
        raise RequestRefusedError(f"{param} makes no token; say something", param=param)
    if strays := [token for token in prompt if not 0 <= token < model.vocab_size]:
        raise RequestRefusedError(
            f"{param} holds token id {strays[0]}; those of {model.name} are from 0 to {model.vocab_size - 1}",
            param=param,
        )
    request = GenerationRequest(
        model=fields.model,
        prompt_ids=prompt,
        max_tokens=token_limit(fields, model, len(prompt), param),
        sampling=fields.sampling(),
        stop_ids=model.stop_ids,
        cache=fields.meshnet.cache == "on",
        recovery=Replay(fields.meshnet.recovery) if fields.meshnet.recovery else None,
    )
    return Job(endpoint, fields, model, request, shape)


def token_limit(fields: GenerationFields, model: TextModel, prompt_length: int, param: str) -> int:
    """How many tokens the answer may have: what was asked for, or what the model's positions leave.

    Raises:
        ContextLengthError: prompt and answer together do not fit.
        RequestRefusedError: neither the request nor the model tells a limit.
    """
    limit, asked = model.max_positions, fields.token_limit
    if limit is None:
        if asked is None:
            raise RequestRefusedError(f"{model.name} does not tell its limit of positions; give max_tokens")
        return asked
    takes = f"{model.name} takes at most {limit} positions, prompt and answer together"
    if prompt_length >= limit:
        raise ContextLengthError(f"the prompt has {prompt_length} tokens; {takes}", param=param)
    if asked is not None and prompt_length + asked > limit:
        raise ContextLengthError(
            f"the prompt has {prompt_length} tokens and the answer may have {asked}, {prompt_length + asked} in all; "
            f"{takes}, which leaves {limit - prompt_length}",
            param=fields.token_limit_field,
        )
    return limit - prompt_length if asked is None else asked


def outcome_of(error: MeshnetError) -> str:
    """What the figures call a request that ended with this error."""
    return "refused" if http_status(error) < 500 else "failed"


class Jobs:
    """Runs them on an engine, counts and logs them."""

    def __init__(self, engine: Engine, figures: GatewayFigures, releases: Releases) -> None:
        self._engine = engine
        self._figures = figures
        self._releases = releases

    async def whole(self, job: Job) -> dict[str, Any]:
        """The answer as one JSON object.

        Raises:
            MeshnetError: the mesh could not make it.
        """
        texts: list[str] = []
        tokens: list[SampledToken] = []
        async with self._running(job) as run:
            async with aclosing(run.events()) as events:
                async for event in events:
                    if isinstance(event, Piece):
                        texts.append(event.text)
                        tokens.extend(event.tokens)
            return job.shape.whole("".join(texts), tokens, run.answer.finish_reason, run.usage(), run.report())

    async def streamed(self, job: Job) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, with comment lines that tell the progress of the prefill.

        Raises:
            MeshnetError: before anything was yielded; once something was, an error is an event.
        """
        begun = opened = False  # something was sent; the answer itself was begun
        try:
            async with self._running(job) as run, aclosing(run.events()) as events:
                async for event in events:
                    begun = True
                    if isinstance(event, PrefillProgress):
                        yield f": meshnet prefill {event.done}/{event.total}\n\n".encode()
                    elif not opened and (opening := job.shape.opening()) is not None:
                        yield _data(opening) + _data(job.shape.piece(event.text, event.tokens))
                    else:
                        yield _data(job.shape.piece(event.text, event.tokens))
                    opened = opened or isinstance(event, Piece)
                if not opened and (opening := job.shape.opening()) is not None:
                    yield _data(opening)
                ending = _data(job.shape.closing(run.answer.finish_reason, run.report()))
                if job.fields.include_usage:
                    ending += _data(job.shape.usage(run.usage()))
                yield ending + _DONE
        except MeshnetError as error:
            if not begun:
                raise
            yield _data(from_mesh(error)[1]) + _DONE
        except Exception:
            if not begun:
                raise
            # The status is out long since; the client is told, and the log has the traceback.
            logger.exception("answer %s broke off", job.shape.id)
            yield _data(error_object(500, "the gateway failed; its log tells why", code="internal")) + _DONE

    @asynccontextmanager
    async def _running(self, job: Job) -> AsyncIterator[_Run]:
        """A generation that is counted, logged and given back, whatever ends it."""
        outcome = "ok"
        run: _Run | None = None
        began = time.monotonic()
        try:
            async with self._releases.lease(self._engine.start(job.request)) as generation:
                run = _Run(job, generation, self._figures, began)
                yield run
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "client_gone"
            raise
        except MeshnetError as error:
            outcome = outcome_of(error)
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._figures.ended(job.endpoint, outcome)
            for event in [] if run is None else run.report().get("recoveries", ()):
                self._figures.recovered(event)
            self._figures.duration.observe(time.monotonic() - began)
            made = 0 if run is None else run.answer.completion_tokens
            self._figures.tokens.labels("prompt").inc(len(job.request.prompt_ids))
            self._figures.tokens.labels("completion").inc(made)
            logger.info(
                "%s %s model=%s prompt=%d completion=%d outcome=%s user=%r",
                job.endpoint, job.shape.id, job.model.name, len(job.request.prompt_ids), made, outcome, job.fields.user,
            )  # fmt: skip


class _Run:
    """One generation under way."""

    def __init__(self, job: Job, generation: GenerationLike, figures: GatewayFigures, began: float) -> None:
        self._job = job
        self._generation = generation
        self._figures = figures
        self._began = began
        self.answer = Answer(
            generation, job.model, job.fields.stop or (), logprobs=job.request.sampling.logprobs is not None
        )

    async def events(self) -> AsyncGenerator[PrefillProgress | Piece]:
        first = True
        async with aclosing(self.answer.events()) as events:
            async for event in events:
                if first and self.answer.completion_tokens:
                    self._figures.first_token.observe(time.monotonic() - self._began)
                    first = False
                yield event

    def usage(self) -> Usage:
        return Usage(prompt=len(self._job.request.prompt_ids), completion=self.answer.completion_tokens)

    def report(self) -> dict[str, Any]:
        """The generation's own, and the seed, so that an answer whose seed was minted can be had again."""
        return {**self._generation.report(), "seed": self._job.request.sampling.seed}


def _data(document: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
    )


_DONE = b"data: [DONE]\n\n"
FAREWELL = _data(error_object(503, "the gateway is stopping; ask again", code="gateway_stopping")) + _DONE
"""The last events of a stream that the gateway's own end cuts short."""
