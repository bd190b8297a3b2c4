"""One request, ready to run: its prompts in token ids, checked against the model, with a limit to each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from meshnet_core.errors import RequestRefusedError
from meshnet_core.grammar import Grammar
from meshnet_gateway.answer_parts import PlainText, TextReader
from meshnet_gateway.answer_shapes import AnswerShape
from meshnet_gateway.api_errors import ContextLengthError
from meshnet_gateway.api_types import GenerationFields
from meshnet_gateway.generation import GenerationRequest
from meshnet_gateway.prefix_reuse import PrefixWish
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import Speculate
from meshnet_gateway.text_model import TextModel


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to run.

    Attributes:
        endpoint: ``chat`` or ``completions``, for the figures.
        fields: as the client sent them.
        model: of the request.
        requests: for the engine, one for each answer.
        prompt_tokens: of the request's prompts, each counted once.
        shape: writes the answers.
        reader: makes what tells the parts of one answer.
    """

    endpoint: str
    fields: GenerationFields
    model: TextModel
    requests: tuple[GenerationRequest, ...]
    prompt_tokens: int
    shape: AnswerShape
    reader: Callable[[], TextReader] = PlainText


def make_job(
    endpoint: str,
    fields: GenerationFields,
    model: TextModel,
    prompts: Sequence[tuple[int, ...]],
    shape: AnswerShape,
    param: str,
    *,
    wish: Callable[[tuple[int, ...]], PrefixWish],
    grammar: Grammar | None = None,
    reader: Callable[[], TextReader] = PlainText,
) -> Job:
    """A job for prompts in token ids, with ``n`` answers to each; ``param`` names the field that they come from.

    ``wish`` says of a prompt where others may begin.

    Raises:
        RequestRefusedError: a prompt is empty, holds ids that the model lacks, or leaves no room for an answer; or
            ``logit_bias`` names such ids.
    """
    requests = []
    for prompt in prompts:
        if not prompt:
            raise RequestRefusedError(f"{param} makes no token; say something", param=param)
        _check_ids(prompt, model, param)
        limit = token_limit(fields, model, len(prompt), param)
        prefix = wish(prompt) if fields.meshnet.cache == fields.meshnet.prefix == "on" else None
        for seed in fields.seeds:
            sampling = fields.sampling(seed)
            _check_ids([token for token, _ in sampling.logit_bias], model, "logit_bias")
            requests.append(
                GenerationRequest(
                    model=fields.model,
                    prompt_ids=prompt,
                    max_tokens=limit,
                    sampling=sampling,
                    stop_ids=model.stop_ids,
                    cache=fields.meshnet.cache == "on",
                    recovery=Replay(fields.meshnet.recovery) if fields.meshnet.recovery else None,
                    speculate=None if (told := fields.meshnet.speculate) is None else Speculate.parse(told),
                    grammar=grammar,
                    prefix=prefix,
                    fingerprint=model.fingerprint,
                    profile=fields.meshnet.profile == "on",
                )
            )
    return Job(endpoint, fields, model, tuple(requests), sum(map(len, prompts)), shape, reader)


def _check_ids(ids: Iterable[int], model: TextModel, param: str) -> None:
    if strays := [token for token in ids if not 0 <= token < model.vocab_size]:
        raise RequestRefusedError(
            f"{param} holds token id {strays[0]}; those of {model.name} are from 0 to {model.vocab_size - 1}",
            param=param,
        )


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
