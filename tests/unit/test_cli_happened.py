"""What is told about an answer."""

from __future__ import annotations

from typing import Any

from meshnet_cli.happened import describe, session_on

REPORT: dict[str, Any] = {
    "session": "s-1",
    "prompt_tokens": 35,
    "completion_tokens": 120,
    "ttft_s": 0.31,
    "tokens_per_s": 18.0,
    "tokens_per_s_first_50": 18.4,
    "tokens_per_s_last_50": 17.9,
    "bytes_per_step": [4, 1152],
    "route": [{"node": "node-1"}, {"node": "node-2"}],
}


def node(name: str, session: str, layers: str) -> dict[str, Any]:
    return {
        "node": name,
        "layers": [{"model": "m", "layers": layers, "dtype": "bfloat16"}],
        "running": [],
        "recent": [
            {
                "session": session,
                "layers": layers,
                "positions": 154,
                "frames": {"prefill": 1, "decode": 119},
                "state_bytes": 887040,
            }
        ],
    }


def test_everything_that_happened_is_told() -> None:
    lines = describe(REPORT, "stop", [node("node-1", "s-1", "0-14"), node("node-2", "s-1", "15-29")])
    text = "\n".join(lines)
    for told in (
        "120 tokens, ended by the model",
        "after 0.31 s, of a prompt of 35 tokens",
        "18.4 tokens/s over the first 50, 17.9 over the last 50",
        "4 into node-1, 1,152 into node-2",
        "s-1, one id, seen by node-1 and node-2",
        "holds layers 15-29 in bfloat16; ran layers 15-29 for 154 positions (1 prefill, 119 decode frames)",
        "state 887,040 bytes",
    ):
        assert told in text


def test_a_node_that_did_not_see_the_session_is_not_said_to_have() -> None:
    lines = describe(REPORT, "length", [node("node-1", "s-1", "0-14"), node("node-2", "s-2", "15-29")])
    text = "\n".join(lines)
    assert "seen by node-1" in text
    assert "seen by node-1 and" not in text
    assert "cut at the limit" in text
    assert "node-2    " not in text


def test_a_running_session_counts_as_seen() -> None:
    one = node("node-1", "s-1", "0-14")
    one["running"], one["recent"] = one["recent"], []
    assert session_on(one, "s-1") is not None
    assert session_on(one, "s-2") is None


def test_a_report_of_one_token_has_no_speed() -> None:
    lines = describe({"session": "s-1", "completion_tokens": 1, "ttft_s": 0.1, "prompt_tokens": 3}, "stop", [])
    assert any("one token alone has none" in line for line in lines)
    assert any("seen by no node" in line for line in lines)
