"""The fate of every field of the API's requests, as the tables of docs/api.md; run it to print them."""

from __future__ import annotations

import json
import typing

from meshnet_gateway.api_fields import Body, NeutralOnly
from meshnet_gateway.api_types import ChatRequest, CompletionRequest

NOTES = {
    "best_of": "accepted where it equals `n`; other values are refused",
    "echo": "honoured; refused together with `logprobs`",
    "logprobs": "honoured: natural logarithms under the model's raw logits, before any penalty, bias or grammar",
    "meshnet": "this API's own: `cache`, `prefix` and `profile` (`on`, `off`), `recovery` (`fast`, `exact`) and "
    "`speculate` (`auto`, `off`, or 1 to 16 tokens), see below",
    "min_p": "honoured; not OpenAI's",
    "n": "honoured, with `prompt`s up to 128 answers to a request; each has a seed of its own that follows from `seed`",
    "prompt_cache_key": "honoured: requests with different ones share no prefixes",
    "reasoning_effort": "honoured where the model's chat template knows it, or knows `enable_thinking`; else refused",
    "repetition_penalty": "honoured; not OpenAI's",
    "response_format": "honoured: `text`, `json_object`, `json_schema`",
    "safety_identifier": "goes to the gateway's log",
    "seed": "honoured: same seed, same answer in float32; the one minted where it is absent is in `meshnet.seed`",
    "stop": "honoured: one string, or up to four",
    "tools": "honoured: functions, see below",
    "top_k": "honoured; not OpenAI's",
    "user": "goes to the gateway's log",
}
BEGIN, END = "<!-- fields of {name} -->", "<!-- end -->"


def table_of(request: type[Body]) -> str:
    """A Markdown table: field, what becomes of it."""
    hints = typing.get_type_hints(request, include_extras=True)
    rows = ["| field | |", "| --- | --- |"]
    for name in sorted(request.model_fields):
        marks = [mark for mark in typing.get_args(hints[name]) if isinstance(mark, NeutralOnly)]
        if not marks:
            rows.append(f"| `{name}` | {NOTES.get(name, 'honoured')} |")
            continue
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in (None, *marks[0].neutral))
        rows.append(f"| `{name}` | refused: {marks[0].why} (accepted: {accepted}) |")
    return "\n".join(rows)


def section(request: type[Body]) -> str:
    """The table between its marks."""
    return f"{BEGIN.format(name=request.__name__)}\n\n{table_of(request)}\n\n{END}"


REQUESTS: tuple[type[Body], ...] = (ChatRequest, CompletionRequest)

if __name__ == "__main__":
    print("\n\n".join(section(request) for request in REQUESTS))
