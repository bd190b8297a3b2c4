"""What a chat's model is to read besides the messages: tools, and the schema of its answer. Pure; knows no template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA_INSTRUCTIONS = "Answer with JSON that follows this schema:\n{schema}"


def schema_instructions(schema: Mapping[str, Any]) -> str:
    """What the model is told of the schema that its answer will be held to."""
    return SCHEMA_INSTRUCTIONS.format(schema=json.dumps(schema, ensure_ascii=False))


def instructed(messages: Sequence[Mapping[str, Any]], instructions: Sequence[str]) -> list[dict[str, Any]]:
    """The messages, with instructions at the end of the system's, or as the system's where there is none."""
    found = [dict(message) for message in messages]
    if not instructions:
        return found
    if not found or found[0]["role"] != "system":
        return [{"role": "system", "content": "\n\n".join(instructions)}, *found]
    found[0]["content"] = "\n\n".join([str(found[0]["content"]), *instructions])
    return found
