"""How tool calls are written in a model's text, and read from it. Pure; knows no grammar and no API.

hermes    <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>      Qwen's, Hermes' and this project's own
llama3    {"name": "f", "parameters": {...}}                                the whole answer, one call
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write a call.

    Attributes:
        begin, end: around the JSON of a call; a call without any is the whole answer.
        arguments: the key of the arguments.
    """

    begin: str
    end: str
    arguments: str

    @property
    def bare(self) -> bool:
        return not self.begin


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
LLAMA3 = ToolFormat("", "", "parameters")


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template tells its model to write calls in; None where it is none of those known here."""
    if "tools" not in template:
        return None
    if HERMES.begin in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return LLAMA3
    return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made: the function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def read_call(text: str, names: Collection[str]) -> ToolCall | None:
    """The call that ``text`` writes; None where it is none, or calls what is not there."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(name := document.get("name"), str) or name not in names:
        return None
    arguments = document.get("arguments", document.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False)
        written.encode()
    except ValueError:  # half of a surrogate pair
        return None
    return ToolCall(name, written)


INSTRUCTIONS = """\
You can call these functions, each described by a JSON schema:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": "<function name>", "arguments": {{<arguments>}}}}
</tool_call>
Results come back within <tool_response></tool_response>."""


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told whose template knows no tools; see docs/api.md."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def written_out(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for such a template: calls become the assistant's text, results a user's."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = str(message.get("content") or "")
        if message["role"] == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += f"\n{response}"  # results of one turn: templates want roles to alternate
            else:
                found.append({"role": "user", "content": response, "results": True})
            continue
        calls = [
            f"{HERMES.begin}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HERMES.end}"
            for call in message.get("tool_calls", ())
        ]
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
        found.append({**kept, "content": "\n".join([*([content] if content else []), *calls])})
    return [{key: value for key, value in message.items() if key != "results"} for message in found]
