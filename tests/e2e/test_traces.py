"""A trace of an answer of SmolLM2 over three real nodes, sent to a collector: where the time went; it adds up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import openai
import pytest

from node_fleet import GATEWAY, NodeFleet, node_fleet
from otlp_collector import Collector, attribute, otlp_collector, seconds

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(900)]

NODES = {"first": "0-9", "second": "10-19", "third": "20-29"}
QUESTION = [{"role": "user", "content": "Tell me of a lighthouse, and of the sea at night, in three sentences."}]
TOKENS = 40


def ended(collector: Collector, fleet: NodeFleet) -> None:
    """The gateway sends what it has left when it is told to stop."""
    fleet.signal(GATEWAY, signal.SIGTERM)
    assert fleet.ended(GATEWAY, within_s=60) == 0
    assert collector.named("generation")


def test_a_trace_over_three_nodes_adds_up_to_the_answers_time(tmp_path: Path) -> None:
    with otlp_collector() as collector, node_fleet(tmp_path, NODES) as fleet:
        api = fleet.start_gateway("--traces", f"otlp://127.0.0.1:{collector.port}")
        client = openai.OpenAI(api_key="none", base_url=api, max_retries=0, timeout=300)
        model = next(iter(client.models.list())).id
        began = time.monotonic()
        stream = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=TOKENS,
            stream=True,  # type: ignore[arg-type]
            extra_body={"meshnet": {"speculate": "off"}},  # a step for each token
        )
        list(stream)
        took = time.monotonic() - began
        ended(collector, fleet)

    (root,) = collector.named("generation")
    assert collector.paths == {"/v1/traces"}
    assert collector.services == {os.environ.get("OTEL_SERVICE_NAME", "meshnet-gateway")}
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert seconds(root) <= took

    parts = collector.children(root)
    told = sum(map(seconds, parts)) + attribute(root, "meshnet.delivering_s")
    assert told == pytest.approx(seconds(root), rel=0.05)

    steps = collector.named("decode step")
    assert len(steps) == attribute(root, "meshnet.completion_tokens") - 1 > 10
    worked = {"queue": 0.0, "forward": 0.0, "sample": 0.0}
    for step in steps:
        outer = step
        for index in range(len(NODES)):
            (hop,) = [span for span in collector.children(outer) if span.name == f"hop {index}"]
            for part in collector.children(hop):
                if part.name in worked:
                    worked[part.name] += seconds(part)
            outer = hop
    whole = sum(map(seconds, steps))
    assert sum(worked.values()) <= whole
    assert worked["forward"] > whole / 4  # the layers are most of it; the rest is the way, and this machine's load
    shares = {name: f"{spent / whole:.1%}" for name, spent in worked.items()}
    print(f"generation {seconds(root):.3f} s, its parts {told:.3f} s; of {whole:.3f} s of steps: {shares}")
