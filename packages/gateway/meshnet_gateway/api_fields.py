"""What the fields of the API's requests are made of: strict types, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported_parameter"  # type of the validation errors of fields that are known and not supported


def refusal(field: str, why: str) -> PydanticCustomError:
    """What to raise in a validator for a value that asks for what is not supported."""
    return PydanticCustomError(UNSUPPORTED, "{field} is not supported: {why}", {"field": field, "why": why})


def neutral_only(field: str, why: str, *neutral: Any) -> BeforeValidator:
    """Refuses every value of a field but null and those that mean nothing; what remains is None.

    Args:
        field: its name.
        why: it is not supported.
        neutral: values that ask for nothing.
    """

    def check(value: Any) -> Any:
        # By type too, since True == 1 in Python and not in JSON.
        if value is None or any(type(value) is type(one) and value == one for one in neutral):
            return None
        allowed = " or ".join(["null", *(json.dumps(one) for one in neutral)])
        raise refusal(field, f"{why} (only {allowed} is accepted)")

    return BeforeValidator(check)


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
