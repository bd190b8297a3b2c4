"""The messages of a chat request. Knows no template: what one gets is the plain form of `Message.for_template`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from meshnet_gateway.api_fields import Body, Text, neutral_only, refusal
from meshnet_gateway.api_tools import PastCall


def _text_part_only(value: Any) -> Any:
    if isinstance(value, str) and value != "text":
        raise refusal(f"a content part of type {value!r}", "messages are text; only parts of type 'text' are accepted")
    return value


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(_text_part_only)]
    text: Text


def _known_role(value: Any) -> Any:
    if value == "function":
        raise refusal("role 'function'", "results of functions come as role 'tool'")
    return value


def _kind_of_content(value: Any) -> str:
    return "parts" if isinstance(value, list) else "none" if value is None else "string"


_NOT_OF_ALL = {  # fields that belong to one role
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}


class Message(Body):
    """One message. ``developer`` is given to the model's template as ``system``, which is what templates know.

    ``reasoning_content`` is what the assistant thought in an earlier turn; most templates leave it out again.
    """

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_known_role)]
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[list[TextPart], Tag("parts")] | Annotated[None, Tag("none")],
        Discriminator(_kind_of_content),
    ] = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    name: Annotated[Any, neutral_only("name", "chat templates know roles, not names")] = None
    refusal: Annotated[Any, neutral_only("refusal", "templates know no refusals")] = None
    annotations: Annotated[Any, neutral_only("annotations", "templates know none", [])] = None
    audio: Annotated[Any, neutral_only("audio", "answers are text")] = None
    function_call: Annotated[Any, neutral_only("function_call", "it is deprecated; use tool_calls")] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        for field, role in _NOT_OF_ALL.items():
            if getattr(self, field) and self.role != role:
                raise PydanticCustomError(
                    "invalid_value", "{within} belongs to messages of role '{role}'", {"within": field, "role": role}
                )
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError(
                "missing_field", "{within} is required in a message of role 'tool'", {"within": "tool_call_id"}
            )
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError(
                "missing_field", "{within} is required, but of an assistant that calls tools", {"within": "content"}
            )
        return self

    @property
    def text(self) -> str:
        """The content as one string; text parts are joined by line breaks."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message


Messages = Annotated[list[Message], Field(min_length=1)]
