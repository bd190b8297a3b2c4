"""Fields of a chat request that shape its answer: tools, the choice among them, and the answer's format."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from meshnet_gateway.api_fields import Body, Text, refusal

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    """JSON that can be written into a prompt and into a grammar."""
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (ValueError, RecursionError) as error:  # half a surrogate pair is a ValueError too
        raise PydanticCustomError("invalid_value", "it cannot be written as JSON: {why}", {"why": str(error)}) from None
    if size > MAX_SCHEMA_BYTES:
        raise PydanticCustomError(
            "too_large",
            "it takes {size} bytes as JSON; {most} are allowed",
            {"size": size, "most": MAX_SCHEMA_BYTES},
        )
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _functions_only(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise refusal(f"a tool of type {value!r}", "tools are functions of the client's")
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_functions_only)]


class Function(Body):
    """A function as a tool; ``strict`` asks that its calls follow ``parameters`` also where the model may choose."""

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: FunctionType
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it, without what only this API reads."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(Body):
    name: Name


class NamedTool(Body):
    """A choice of one tool by name."""

    type: FunctionType
    function: FunctionName


class CalledFunction(Body):
    name: Text
    arguments: Text


class PastCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: Text
    type: FunctionType = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Name and arguments, these as an object, which is what templates write out."""
        return {
            "type": "function",
            "id": self.id,
            "function": {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")},
        }

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        try:
            if isinstance(_writable(json.loads(self.function.arguments or "{}")), dict):
                return self
        except (ValueError, RecursionError):
            pass
        raise PydanticCustomError(
            "invalid_value", "{within} must be a JSON object, as text", {"within": "function.arguments"}
        )


class JsonSchema(Body):
    """A schema that the answer has to follow; ``strict`` changes nothing, since every answer is held to it."""

    name: Name
    description: Text | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "invalid_value", "json_schema goes with the type 'json_schema', and only with it",
                {"at": "response_format.json_schema"},
            )  # fmt: skip
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """What the answer has to follow; None for plain text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_ or {}
