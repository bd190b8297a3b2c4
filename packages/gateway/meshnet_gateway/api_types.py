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
from meshnet_core.sampling import MAX_TOP_LOGPROBS, SEED_BITS, SamplingParams
from meshnet_gateway.api_fields import Body, Text, neutral_only, refusal

MAX_STOPS = 4
MAX_LEGACY_LOGPROBS = 5
LEGACY_MAX_TOKENS = 16  # what OpenAI's /v1/completions takes where max_tokens is absent


def _one_or_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, neutral_only("include_obfuscation", "nothing is added to chunks", False)] = None


class MeshnetOptions(Body):
    """What only this API knows.

    ``cache: off`` takes the stateless path: every step runs the whole sequence. ``recovery`` says how state that a node
    lost is made again, as the gateway's option of that name does for all.
    """

    cache: Literal["on", "off"] = "on"
    recovery: Literal["exact", "fast"] | None = None


class GenerationFields(Body):
    """What chat and plain completions share."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: (
        Annotated[
            list[Annotated[Text, Field(min_length=1)]],
            BeforeValidator(_one_or_list, json_schema_input_type=str | list[str]),
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
    user: Text | None = None
    meshnet: MeshnetOptions = MeshnetOptions()

    n: Annotated[Any, neutral_only("n", "one answer per request", 1)] = None
    logit_bias: Annotated[Any, neutral_only("logit_bias", "the nodes know no biases yet", {})] = None

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

    def sampling(self) -> SamplingParams:
        """The parameters as the nodes take them, with OpenAI's defaults; an absent seed is minted here.

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
            seed=secrets.randbits(SEED_BITS) if self.seed is None else self.seed & (2**SEED_BITS - 1),
            logprobs=self.top_logprobs_wanted,
        )


def _text_part_only(value: Any) -> Any:
    if isinstance(value, str) and value != "text":
        raise refusal(f"a content part of type {value!r}", "messages are text; only parts of type 'text' are accepted")
    return value


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(_text_part_only)]
    text: Text


def _known_role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise refusal(f"role {value!r}", "tools are not supported yet")
    return value


_NO_TOOLS = "tools are not supported yet"
_NO_AUDIO = "answers are text"


class Message(Body):
    """One message. ``developer`` is given to the model's template as ``system``, which is what templates know."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_known_role)]
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[list[TextPart], Tag("parts")],
        Discriminator(lambda value: "parts" if isinstance(value, list) else "string"),
    ]
    name: Annotated[Any, neutral_only("name", "chat templates know roles, not names")] = None
    refusal: Annotated[Any, neutral_only("refusal", "templates know no refusals")] = None
    annotations: Annotated[Any, neutral_only("annotations", "templates know none", [])] = None
    audio: Annotated[Any, neutral_only("audio", _NO_AUDIO)] = None
    tool_calls: Annotated[Any, neutral_only("tool_calls", _NO_TOOLS, [])] = None
    tool_call_id: Annotated[Any, neutral_only("tool_call_id", _NO_TOOLS)] = None
    function_call: Annotated[Any, neutral_only("function_call", _NO_TOOLS)] = None

    def for_template(self) -> dict[str, str]:
        """Role and content as one string; text parts are joined by line breaks."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    response_format: Annotated[
        Any, neutral_only("response_format", "answers are not constrained yet", {"type": "text"})
    ] = None
    tools: Annotated[Any, neutral_only("tools", _NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, neutral_only("tool_choice", _NO_TOOLS, "none")] = None
    parallel_tool_calls: Annotated[Any, neutral_only("parallel_tool_calls", _NO_TOOLS)] = None
    functions: Annotated[Any, neutral_only("functions", _NO_TOOLS, [])] = None
    function_call: Annotated[Any, neutral_only("function_call", _NO_TOOLS, "none")] = None
    audio: Annotated[Any, neutral_only("audio", _NO_AUDIO)] = None
    modalities: Annotated[Any, neutral_only("modalities", _NO_AUDIO, ["text"])] = None
    prediction: Annotated[Any, neutral_only("prediction", "nothing is speculated yet")] = None
    reasoning_effort: Annotated[Any, neutral_only("reasoning_effort", "templates are not told of it yet")] = None
    verbosity: Annotated[Any, neutral_only("verbosity", "templates know none")] = None
    metadata: Annotated[Any, neutral_only("metadata", "nothing is stored", {})] = None
    store: Annotated[Any, neutral_only("store", "nothing is stored", False)] = None
    service_tier: Annotated[Any, neutral_only("service_tier", "there is one tier", "auto", "default")] = None
    moderation: Annotated[Any, neutral_only("moderation", "nothing is moderated")] = None
    safety_identifier: Annotated[Any, neutral_only("safety_identifier", "nothing is moderated")] = None
    prompt_cache_key: Annotated[Any, neutral_only("prompt_cache_key", "no prefix is kept yet")] = None
    prompt_cache_options: Annotated[Any, neutral_only("prompt_cache_options", "no prefix is kept yet")] = None
    prompt_cache_retention: Annotated[Any, neutral_only("prompt_cache_retention", "no prefix is kept yet")] = None
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
        return self

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
    """Body of POST /v1/completions: a prompt as text or token ids, or a list that holds one such prompt."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None

    best_of: Annotated[Any, neutral_only("best_of", "one answer per request", 1)] = None
    echo: Annotated[Any, neutral_only("echo", "the prompt's logprobs are not computed", False)] = None
    suffix: Annotated[Any, neutral_only("suffix", "models here only write on", "")] = None

    @property
    def token_limit(self) -> int | None:
        return LEGACY_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt.

        Raises:
            RequestRefusedError: on a list of several prompts, or of none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if prompt and all(isinstance(item, int) for item in prompt):
            return [item for item in prompt if isinstance(item, int)]
        if len(prompt) == 1 and isinstance(prompt[0], str | list):
            return prompt[0]
        raise RequestRefusedError(
            f"prompt holds {len(prompt)} prompts; one request takes exactly one prompt", param="prompt"
        )
