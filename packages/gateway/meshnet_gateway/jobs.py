"""From a `Job` to its answers, whole or streamed: what the endpoints share. Knows no routes of the app."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from meshnet_core.errors import MeshnetError
from meshnet_gateway.answer import Answer, Piece
from meshnet_gateway.answer_shapes import AnswerShape, Choice, Usage
from meshnet_gateway.api_errors import error_object, from_mesh, http_status
from meshnet_gateway.generation import GenerationRequest, PrefillProgress
from meshnet_gateway.interleaved import interleaved
from meshnet_gateway.job import Job
from meshnet_gateway.ports import Engine, GenerationLike
from meshnet_gateway.releases import Releases
from meshnet_gateway.status import GatewayFigures

logger = logging.getLogger(__name__)


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
        """The answers as one JSON object.

        Raises:
            MeshnetError: the mesh could not make one of them.
        """
        choices = [Choice(index) for index in range(len(job.requests))]
        async with self._running(job) as runs:
            async with aclosing(interleaved([run.events() for run in runs])) as events:
                async for index, event in events:
                    if isinstance(event, Piece):
                        choices[index].parts.extend(event.parts)
                        choices[index].tokens.extend(event.tokens)
            for choice, run in zip(choices, runs, strict=True):
                choice.finish, choice.stop = run.answer.finish_reason, run.answer.stop
            return job.shape.whole(choices, _usage(job, runs), _report(runs))

    async def streamed(self, job: Job) -> AsyncGenerator[bytes]:
        """The answers as server-sent events, with comment lines that tell the progress of the prefill.

        Raises:
            MeshnetError: before anything was yielded; once something was, an error is an event.
        """
        begun = False  # something was sent
        opened: set[int] = set()  # answers that have begun
        shape = job.shape
        try:
            async with self._running(job) as runs:
                async with aclosing(interleaved([run.events() for run in runs])) as events:
                    async for index, event in events:
                        if isinstance(event, PrefillProgress):
                            begun = True
                            yield f": meshnet prefill {event.done}/{event.total}\n\n".encode()
                            continue
                        chunks = [] if index in opened else shape.opening(index)
                        opened.add(index)
                        if event is not None:
                            chunks += shape.piece(index, event.parts, event.tokens)
                        else:
                            answer = runs[index].answer
                            chunks += shape.closing(index, answer.finish_reason, runs[index].report(), answer.stop)
                        if chunks:
                            begun = True
                            yield b"".join(map(shape.encode, chunks))
                ending = b"".join(map(shape.encode, shape.ending(_usage(job, runs)))) + shape.last
                for run in runs:
                    run.told = True
                yield ending
        except MeshnetError as error:
            if not begun:
                raise
            yield shape.encode(from_mesh(error)[1]) + shape.last
        except Exception:
            if not begun:
                raise
            # The status is out long since; the client is told, and the log has the traceback.
            logger.exception("answer %s broke off", shape.id, extra={"request": shape.id})
            yield shape.encode(error_object(500, "the gateway failed; its log tells why", code="internal")) + shape.last

    @asynccontextmanager
    async def _running(self, job: Job) -> AsyncIterator[list[_Run]]:
        """Generations that are counted, logged and given back, whatever ends them."""
        outcome = "ok"
        runs: list[_Run] = []
        began = time.monotonic()
        try:
            async with AsyncExitStack() as leases:
                for request in job.requests:
                    generation = await leases.enter_async_context(self._releases.lease(self._engine.start(request)))
                    runs.append(_Run(job, request, generation, self._figures, self._releases, began))
                    leases.enter_context(self._figures.live.watched(generation, job.model.name))
                yield runs
        except (asyncio.CancelledError, GeneratorExit):
            # Many clients leave with the last event, while the sessions are still being given back.
            outcome = "ok" if runs and all(run.told for run in runs) else "client_gone"
            raise
        except MeshnetError as error:
            outcome = outcome_of(error)
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._figures.ended(job.endpoint, outcome)
            for event in (event for run in runs for event in run.report().get("recoveries", ())):
                self._figures.recovered(event)
            for report in (run.report() for run in runs):
                self._figures.drafted.inc(report.get("drafted_tokens", 0))
                self._figures.accepted.inc(report.get("accepted_tokens", 0))
            self._figures.duration.observe(time.monotonic() - began)
            made = sum(run.answer.completion_tokens for run in runs)
            self._figures.tokens.labels("prompt").inc(job.prompt_tokens)
            self._figures.tokens.labels("prompt_cached").inc(_cached(job, runs))
            self._figures.tokens.labels("completion").inc(made)
            logger.info(
                "%s %s model=%s prompt=%d completion=%d outcome=%s user=%r",
                job.endpoint, job.shape.id, job.model.name, job.prompt_tokens, made, outcome, job.fields.client_user,
                extra={"request": job.shape.id, "outcome": outcome, **_sessions(runs)},
            )  # fmt: skip


class _Run:
    """One generation under way; ``told`` once the whole answer was sent."""

    def __init__(
        self,
        job: Job,
        request: GenerationRequest,
        generation: GenerationLike,
        figures: GatewayFigures,
        releases: Releases,
        began: float,
    ) -> None:
        self._request = request
        self._generation = generation
        self._figures = figures
        self._releases = releases
        self._began = began
        self.told = False
        self.answer = Answer(
            generation, job.model, job.fields.stop or (), job.reader(), logprobs=request.sampling.logprobs is not None
        )

    async def events(self) -> AsyncGenerator[PrefillProgress | Piece]:
        first = True
        async with aclosing(self.answer.events()) as events:
            async for event in events:
                if first and self.answer.completion_tokens:
                    self._figures.first_token.observe(time.monotonic() - self._began)
                    first = False
                yield event
        # Not at the end of all answers to the request: another of them may be waiting for its room.
        self._releases.let_go(self._generation)

    def report(self) -> dict[str, Any]:
        """The generation's own, and the seed, so that an answer whose seed was minted can be had again."""
        return {**self._generation.report(), "seed": self._request.sampling.seed}


def _usage(job: Job, runs: Sequence[_Run]) -> Usage:
    completion = sum(run.answer.completion_tokens for run in runs)
    return Usage(prompt=job.prompt_tokens, completion=completion, cached=_cached(job, runs))


def _cached(job: Job, runs: Sequence[_Run]) -> int:
    """Tokens of the prompts, each counted once, that were computed for none of their answers."""
    cached = [int(run.report().get("cached_tokens", 0)) for run in runs]
    each = job.fields.n or 1
    return sum(min(cached[at : at + each]) for at in range(0, len(cached), each))


def _sessions(runs: Sequence[_Run]) -> dict[str, str]:
    """The sessions of a request and their routes, for the log."""
    reports = [run.report() for run in runs]
    routes = [" -> ".join(f"{hop['node']} {hop['layers']}" for hop in report.get("route", ())) for report in reports]
    return {
        "session": ", ".join(str(report.get("session", "")) for report in reports),
        "route": ", ".join(dict.fromkeys(route for route in routes if route)),
    }


def _report(runs: Sequence[_Run]) -> dict[str, Any]:
    """What happened to the answer; of several, to each."""
    reports = [run.report() for run in runs]
    return reports[0] if len(reports) == 1 else {"choices": reports}


def farewell(shape: AnswerShape) -> bytes:
    """The last events of a stream that the gateway's own end cuts short."""
    return shape.encode(error_object(503, "the gateway is stopping; ask again", code="gateway_stopping")) + shape.last
