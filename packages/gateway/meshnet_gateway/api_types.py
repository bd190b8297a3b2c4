"""The requests of the API: every field that OpenAI publishes is either honoured or refused by name. Knows no mesh.

What a field's neutral value is (null, an empty list, ``n: 1``) passes even where the field is not supported, because
clients send it without meaning anything by it; and a field that nobody knows is an error.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from meshnet_core.errors import RequestRefusedError
from meshnet_core.frames import MAX_DRAFT
from meshnet_core.sampling import MAX_BIASED_TOKENS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, SEED_BITS, SamplingParams
from meshnet_gateway.api_fields import UNSUPPORTED, Body, Text, neutral_only, null_is
from meshnet_gateway.api_messages import Messages
from meshnet_gateway.api_tools import MAX_TOOLS, NamedTool, ResponseFormat, Tool

MAX_STOPS = 4
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that all seeds of a request differ (Steele et al. 2014)
MAX_LEGACY_LOGPROBS = 5
MAX_CHOICES = 128  # answers to one request, as the OpenAI API bounds n
LEGACY_MAX_TOKENS = 16  # what OpenAI's /v1/completions takes where max_tokens is absent

_OnOff = Literal["on", "off"]
_Stop = Annotated[Text, Field(min_length=1)]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


def _one_or_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, neutral_only("include_obfuscation", "nothing is added to chunks", False)] = None


class MeshnetOptions(Body):
    """What only this API knows.

    ``cache: off`` takes the stateless path: every step runs the whole sequence. ``prefix: off`` begins with nothing
    that earlier requests left, and leaves nothing. ``recovery`` says how state that a node lost is made again, as the
    gateway's option of that name does for all; so does ``speculate``, of drafts: ``auto``, ``off``, or a number of
    tokens. ``profile: on`` tells where the time of decode steps goes.
    """

    cache: Annotated[_OnOff, null_is("on", _OnOff)] = "on"
    prefix: Annotated[_OnOff, null_is("on", _OnOff)] = "on"
    recovery: Literal["exact", "fast"] | None = None
    profile: Annotated[_OnOff, null_is("off", _OnOff)] = "off"
    speculate: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=MAX_DRAFT)] | None = None


class GenerationFields(Body):
    """What chat and plain completions share."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: (
        Annotated[
            list[_Stop],
            BeforeValidator(_one_or_list, json_schema_input_type=_Stop | list[_Stop]),
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: (
        Annotated[
            dict[
                _TokenId,
                Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)],
            ],
            Field(max_length=MAX_BIASED_TOKENS),
        ]
        | None
    ) = None
    user: Text | None = None
    meshnet: Annotated[MeshnetOptions, null_is({}, MeshnetOptions)] = MeshnetOptions()

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "invalid_value", "stream_options needs stream to be true", {"at": "stream_options"}
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def client_user(self) -> str | None:
        """Whom the client asks for, for the log."""
        return self.user

    @property
    def cache_key(self) -> str | None:
        """Requests with different ones share no prefixes."""
        return None

    @property
    def seeds(self) -> list[int]:
        """Seeds of the answers to one prompt: the request's own, and for further answers others that follow from it."""
        first = secrets.randbits(SEED_BITS) if self.seed is None else self.seed
        return [(first + index * _SEED_STEP) % 2**SEED_BITS for index in range(self.n or 1)]

    @property
    def token_limit(self) -> int | None:
        """The most tokens to answer with; None where the request leaves that to the model's limit."""
        return self.max_tokens

    @property
    def token_limit_field(self) -> str:
        """The field that `token_limit` is, or would be, read from."""
        return "max_tokens"

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many tokens to report beside the chosen one's logprob; None for no report."""
        return None

    def sampling(self, seed: int | None = None) -> SamplingParams:
        """The parameters as the nodes take them, with OpenAI's defaults, for the first answer or one of the `seeds`.

        A ``top_p`` of 0 leaves the most likely token alone, as OpenAI's does; of a negative seed the low 63 bits count.
        """
        top_k, top_p = self.top_k or 0, 1.0 if self.top_p is None else self.top_p
        if top_p == 0:
            top_k, top_p = 1, 1.0
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seeds[0] if seed is None else seed,
            logprobs=self.top_logprobs_wanted,
            logit_bias=tuple(sorted({int(token): bias for token, bias in (self.logit_bias or {}).items()}.items())),
        )


_DEPRECATED = "it is deprecated; use tools and tool_choice"
_NO_AUDIO = "answers are text"
_WHILE_ROOM = "what a prompt leaves is held for later ones while there is room"


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedTool, Tag("tool")],
            Discriminator(lambda value: "word" if isinstance(value, str) else "tool"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    functions: Annotated[Any, neutral_only("functions", _DEPRECATED, [])] = None
    function_call: Annotated[Any, neutral_only("function_call", _DEPRECATED, "none")] = None
    audio: Annotated[Any, neutral_only("audio", _NO_AUDIO)] = None
    modalities: Annotated[Any, neutral_only("modalities", _NO_AUDIO, ["text"])] = None
    prediction: Annotated[
        Any, neutral_only("prediction", "drafts come from the text itself, see `meshnet.speculate`")
    ] = None
    verbosity: Annotated[Any, neutral_only("verbosity", "templates know none")] = None
    metadata: Annotated[Any, neutral_only("metadata", "nothing is stored", {})] = None
    store: Annotated[Any, neutral_only("store", "nothing is stored", False)] = None
    service_tier: Annotated[Any, neutral_only("service_tier", "there is one tier", "auto", "default")] = None
    moderation: Annotated[Any, neutral_only("moderation", "nothing is moderated")] = None
    prompt_cache_options: Annotated[Any, neutral_only("prompt_cache_options", _WHILE_ROOM)] = None
    prompt_cache_retention: Annotated[Any, neutral_only("prompt_cache_retention", _WHILE_ROOM, "in_memory")] = None
    web_search_options: Annotated[Any, neutral_only("web_search_options", "nothing is searched")] = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("invalid_value", "top_logprobs needs logprobs to be true", {"at": "top_logprobs"})
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise PydanticCustomError(
                "invalid_value",
                "max_tokens and max_completion_tokens mean the same and differ; give one of them",
                {"at": "max_tokens"},
            )
        self._check_tools()
        return self

    @property
    def client_user(self) -> str | None:
        return self.user or self.safety_identifier

    @property
    def cache_key(self) -> str | None:
        return self.prompt_cache_key

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("invalid_value", "two tools have the same name", {"at": "tools"})
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise PydanticCustomError(
                "invalid_value", "tool_choice names a function that is none of the tools", {"at": "tool_choice"}
            )
        for field in ("tool_choice", "parallel_tool_calls"):
            if not names and getattr(self, field) not in (None, "none"):
                raise PydanticCustomError("invalid_value", "{at} needs tools", {"at": field})

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions: a prompt as text or token ids, or a list of such prompts."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None

    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: Annotated[Any, neutral_only("suffix", "models here only write on", "")] = None

    @model_validator(mode="after")
    def _fits_what_is_there(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError(
                UNSUPPORTED, "best_of is not supported: no answers are made to be thrown away (only n is accepted)",
                {"at": "best_of"},
            )  # fmt: skip
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError(
                UNSUPPORTED, "echo is not supported with logprobs: the prompt's are not computed", {"at": "echo"}
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return LEGACY_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each of which gets ``n`` answers.

        Raises:
            RequestRefusedError: on an empty list, or more answers than one request may have.
        """
        prompt = self.prompt
        prompts: list[str] | list[list[int]]
        if isinstance(prompt, str):
            prompts = [prompt]
        elif prompt and all(isinstance(item, int) for item in prompt):
            prompts = [[item for item in prompt if isinstance(item, int)]]
        else:
            prompts = prompt  # type: ignore[assignment]  # validated: all texts, or all lists of ids
        if not 0 < len(prompts) * (self.n or 1) <= MAX_CHOICES:
            raise RequestRefusedError(
                f"prompt holds {len(prompts)} prompts, and n is {self.n or 1}; "
                f"a request has 1 to {MAX_CHOICES} answers in all",
                param="prompt",
            )
        return prompts
