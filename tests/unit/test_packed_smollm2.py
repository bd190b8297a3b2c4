"""The real SmolLM2's Q4_1 file, packed: bits, quality, and memory while loading."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from benchmarks.quality import measure, text_ids
from tests.smollm2 import NUM_LAYERS, gguf_path

from meshnet_core.layer_range import LayerRange
from meshnet_node.model_files import open_model
from meshnet_node.shard_route import ShardRoute
from meshnet_node.split import Split

pytestmark = pytest.mark.long

STEPS = 40
LAYER_MB = 7.1  # one layer in bfloat16

LOADING = """
import sys
from pathlib import Path
from meshnet_core.layer_range import LayerRange
from meshnet_node.shard_loader import plan_shard
def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1e3
plan = plan_shard(Path(sys.argv[1]), LayerRange(0, 15), dtype="bfloat16", device="cpu")
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
plan.load_model()
print(status("VmHWM") - before, plan._packing.stored_bytes / 1e6)
"""


def test_two_shards_give_the_bits_of_the_packed_whole() -> None:
    files = open_model(str(gguf_path()))
    folder = files.prepare(LayerRange(0, NUM_LAYERS), dtype="bfloat16", packed=True)
    ids = text_ids(files)[: 100 + STEPS]
    # In one shard; transformers' own cache lays keys otherwise, and attention then rounds apart now and then.
    whole = ShardRoute(folder, Split.parse("0-29"), dtype="bfloat16", device="cpu")
    route = ShardRoute(folder, Split.parse("0-14,15-29"), dtype="bfloat16", device="cpu")
    assert route.dtype == "bfloat16+int4"
    state, cut = whole.open(), route.open()
    for start, stop in ((0, 80), (80, 100), *((at, at + 1) for at in range(100, 100 + STEPS))):
        expected = whole.frame(ids[start:stop], start, state, 1)
        assert torch.equal(route.frame(ids[start:stop], start, cut, 1), expected)


def test_quality_is_that_of_bfloat16() -> None:
    files = open_model(str(gguf_path()))
    ids = text_ids(files)
    found = {way: measure(files, ids, way, steps=60) for way in ("none", "auto", "int8", "int4")}
    plain = found["none"]
    for way, most in (("auto", 1.01), ("int8", 1.02), ("int4", 1.1)):
        assert found[way].perplexity < most * plain.perplexity, way
        assert found[way].step_perplexity < (most + 0.05) * plain.step_perplexity, way  # of 60 tokens
    assert found["auto"].weight_bytes < 0.4 * plain.weight_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_loading_takes_little_more_than_the_blocks() -> None:
    files = open_model(str(gguf_path()))
    folder = files.prepare(LayerRange(0, 15), dtype="bfloat16", packed=True)
    done = subprocess.run([sys.executable, "-c", LOADING, str(folder)], capture_output=True, text=True, check=True)
    peak, stored = map(float, done.stdout.split())
    assert peak < 1.2 * stored + LAYER_MB
