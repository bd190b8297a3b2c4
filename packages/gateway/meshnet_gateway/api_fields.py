"""What the fields of the API's requests are made of: strict types, and refusals that name the field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

UNSUPPORTED = "unsupported_parameter"  # type of the validation errors of fields that are known and not supported


def refusal(field: str, why: str) -> PydanticCustomError:
    """What to raise in a validator for a value that asks for what is not supported."""
    return PydanticCustomError(UNSUPPORTED, "{field} is not supported: {why}", {"field": field, "why": why})


@dataclass(frozen=True, slots=True)
class NeutralOnly:
    """Marks a field that takes null, and values that mean nothing; all others are refused. What remains is None.

    Attributes:
        field: its name.
        why: it is not supported.
        neutral: values that ask for nothing.
    """

    field: str
    why: str
    neutral: tuple[Any, ...]

    def check(self, value: Any) -> None:
        # By type too, since True == 1 in Python and not in JSON.
        if value is None or any(type(value) is type(one) and value == one for one in self.neutral):
            return
        allowed = " or ".join(["null", *(json.dumps(one) for one in self.neutral)])
        raise refusal(self.field, f"{self.why} (only {allowed} is accepted)")

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(Any))

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral], "description": f"Not supported: {self.why}."}


def neutral_only(field: str, why: str, *neutral: Any) -> NeutralOnly:
    """A field of which only null and some values that mean nothing are accepted."""
    return NeutralOnly(field, why, neutral)


def null_is(default: Any, kind: Any) -> BeforeValidator:
    """Takes null for ``default``, as if a field of type ``kind`` were not there."""
    return BeforeValidator(lambda value: default if value is None else value, json_schema_input_type=kind | None)


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_unicode", "half of a surrogate pair is no character") from None
    return value


Text = Annotated[str, AfterValidator(_encodable)]


class Body(BaseModel):
    """An object of a request: no unknown fields, no conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
