"""The answers of the API as types: for its description alone, and for the test that answers are what it says."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length", "tool_calls"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CalledFunction(_Answer):
    name: str
    arguments: str


class Call(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(_Answer):
    """``reasoning_content`` and ``tool_calls`` are there only where there are any."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Call] = []


class TokenLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    content: list[ChosenLogprob]
    refusal: None


class ChatChoice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class CachedTokens(_Answer):
    cached_tokens: int


class UsageFields(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatAnswer(_Answer):
    """``meshnet`` tells route, speed and recoveries; where there are several choices, of each."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageFields
    meshnet: dict[str, Any]


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish


class CompletionAnswer(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageFields
    meshnet: dict[str, Any]


class MessagesUsage(_Answer):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class TextBlock(_Answer):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(_Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesAnswer(_Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]
    stop_sequence: str | None
    usage: MessagesUsage
    meshnet: dict[str, Any]


class MessagesErrorFields(_Answer):
    type: str
    message: str


class MessagesErrorBody(_Answer):
    """The body of every answer of that endpoint that is an error."""

    type: Literal["error"]
    error: MessagesErrorFields


class ModelFacts(_Answer):
    fingerprint: str
    layers: int
    max_positions: int
    dtypes: list[str]


class ModelEntry(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["meshnet"]
    meshnet: ModelFacts


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelEntry]


class Health(_Answer):
    status: Literal["ok"]
    version: str


class Ready(_Answer):
    status: Literal["ready"]
    models: list[str] | None = None


class NotReady(_Answer):
    status: Literal["not ready"]
    reason: str | None = None
