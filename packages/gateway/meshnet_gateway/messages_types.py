"""The request of Anthropic's POST /v1/messages, and what it asks for in the words of a chat request. Knows no mesh."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from meshnet_core.errors import RequestRefusedError
from meshnet_gateway.api_fields import Body, Text, neutral_only, refusal
from meshnet_gateway.api_tools import MAX_TOOLS, JsonObject, Name
from meshnet_gateway.api_types import MAX_STOPS, ChatRequest, MeshnetOptions

_Caching = Annotated[Any, neutral_only("cache_control", "prefixes are kept by themselves", {"type": "ephemeral"})]


def _known_block(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in _BLOCKS:
        raise refusal(f"a content block of type {kind!r}", f"only {', '.join(_BLOCKS)} are accepted")
    return value


_BLOCKS = ("text", "thinking", "tool_use", "tool_result")


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: _Caching = None
    citations: Annotated[Any, neutral_only("citations", "nothing is cited", [])] = None


class ThinkingBlock(Body):
    """What the assistant thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject
    cache_control: _Caching = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[TextBlock] = ""
    is_error: bool | None = None
    cache_control: _Caching = None


Block = Annotated[
    Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")],
    BeforeValidator(_known_block),
]


class Turn(Body):
    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[list[Block], Tag("blocks")],
        Discriminator(lambda value: "blocks" if isinstance(value, list) else "string"),
    ]


class AnthropicTool(Body):
    name: Name
    description: Text | None = None
    input_schema: JsonObject
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: _Caching = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("invalid_value", "{within} goes with the type 'tool'", {"within": "name"})
        return self


class Metadata(Body):
    user_id: Text | None = None


class MessagesRequest(Body):
    """Body of POST /v1/messages."""

    model: Text
    max_tokens: Annotated[int, Field(ge=1)]
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Text | list[TextBlock] | None = None
    stop_sequences: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    metadata: Metadata | None = None
    meshnet: MeshnetOptions = MeshnetOptions()
    thinking: Annotated[
        Any, neutral_only("thinking", "a model thinks or does not", {"type": "disabled"}, {"type": "adaptive"})
    ] = None
    service_tier: Annotated[Any, neutral_only("service_tier", "there is one tier", "auto", "standard_only")] = None
    cache_control: _Caching = None
    output_config: Annotated[Any, neutral_only("output_config", "use /v1/chat/completions with response_format")] = None
    container: Annotated[Any, neutral_only("container", "nothing is run here")] = None
    diagnostics: Annotated[Any, neutral_only("diagnostics", "the meshnet object of the answer tells them")] = None
    inference_geo: Annotated[Any, neutral_only("inference_geo", "the mesh is where its machines are")] = None
    speed: Annotated[Any, neutral_only("speed", "there is one speed", "standard")] = None
    user_profile_id: Annotated[Any, neutral_only("user_profile_id", "there are no profiles")] = None
    workspace_id: Annotated[Any, neutral_only("workspace_id", "there are no workspaces")] = None

    def as_chat(self) -> ChatRequest:
        """The same as a chat request.

        Raises:
            RequestRefusedError: fields do not fit together.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for turn in self.messages:
            messages += _messages_of(turn)
        document: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "user": self.metadata.user_id if self.metadata else None,
            "meshnet": self.meshnet.model_dump(),
            **self._tools(),
        }
        try:
            return ChatRequest.model_validate(document)
        except ValidationError as error:
            raise RequestRefusedError(f"the fields do not fit together: {error.errors()[0]['msg']}") from error

    def _tools(self) -> dict[str, Any]:
        choice = self.tool_choice
        found: dict[str, Any] = {}
        if self.tools:
            found["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name, "description": tool.description, "parameters": tool.input_schema,
                        "strict": tool.strict,
                    },
                }
                for tool in self.tools
            ]  # fmt: skip
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            found["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            if self.tools:
                found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return found


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _messages_of(turn: Turn) -> list[dict[str, Any]]:
    """One turn as chat messages: results of tools first, each a message of its own, then what else was said."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in turn.content
        if isinstance(block, ToolResultBlock)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    said = [block.text for block in turn.content if isinstance(block, TextBlock)]
    thought = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    if said or calls or not found:
        message: dict[str, Any] = {"role": turn.role, "content": "\n".join(said)}
        found.append(
            {
                **message,
                **({"tool_calls": calls} if calls else {}),
                **({"reasoning_content": "\n".join(thought)} if thought else {}),
            }
        )
    return found
