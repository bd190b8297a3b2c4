"""What a chat's model is to read besides the messages: tools, and the schema of its answer. Pure; knows no template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA_INSTRUCTIONS = "Answer with JSON that follows this schema:\n{schema}"


def schema_instructions(schema: Mapping[str, Any]) -> str:
    """What the model is told of the schema that its answer will be held to."""
    return SCHEMA_INSTRUCTIONS.format(schema=json.dumps(schema, ensure_ascii=False))


def instructed(
    messages: Sequence[Mapping[str, Any]], instructions: Sequence[str], *, role: str = "system"
) -> list[dict[str, Any]]:
    """The messages with instructions at the end of the system's, or as the system's where there is none.

    Args:
        role: ``"user"`` puts them before the first message of the user instead, for templates that know no system.
    """
    found = [dict(message) for message in messages]
    if not instructions:
        return found
    text = "\n\n".join(instructions)
    first = next((message for message in found if message["role"] == role), None)
    if role == "user" and first is not None:
        first["content"] = f"{text}\n\n{first['content']}"
    elif first is not None and first is found[0]:
        first["content"] = f"{first['content']}\n\n{text}"
    else:
        found.insert(0, {"role": role, "content": text})
    return found
