"""Makes ``docs/families.md`` from the registry and from what the tiny models' sessions really hold.

    .venv/bin/python tests/family_table.py > docs/families.md

``test_family_table.py`` fails when the file is not what this makes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meshnet_core.layer_range import LayerRange
from meshnet_node.family_support import FAMILIES, REASONS, TEXT_TOWERS, cuts_of
from meshnet_node.session_state import SessionState
from meshnet_node.shard_loader import load_shard, read_config
from shard_routes import Route
from tiny_models import ALL, num_layers, save_tiny

_HEAD = """# Model families

Made by `python tests/family_table.py > docs/families.md`; a test fails when it is out of date.

A family is supported once tests cover it: with tiny random checkpoints in float32, cached, stateless and unsharded runs
give the same greedy tokens and logits within 1e-4, at every split that the table allows, with an effective start inside
a shard, with prompts in chunks of 1, 7 and 64, and after the state was lost at three points of the answer
(`tests/unit/test_shard_families.py`, `test_shard_parity.py`). What a session keeps is read off the cache objects of
those runs. All of it counts in a node's budget. Whether steps of several sessions run in one forward (ADR-0028) is
tested too (`test_sessions_together.py`).

A split that is not allowed is refused when a node starts, by name, with the reason and the nearest split that works.

| family (`model_type`) | a session keeps | can be cut | sessions decode | notes |
| --- | --- | --- | --- | --- |
"""

_TOWERS = """
## Multimodal checkpoints

The text tower of these is served alone; images are not.

| checkpoint | served as |
| --- | --- |
"""

_REFUSED = """
## Refused

Any family not listed above is refused when a node starts, since no test covers it. Of these it is known why:

| family | reason |
| --- | --- |
"""

_OPTIONS = """
Of a supported family, a checkpoint is refused if it is quantized (use its float version, or a GGUF file), scales rope
dynamically or by `longrope` (what was cached would go stale), or attends in both directions.
"""


def table(root: Path) -> str:
    """The whole file; tiny checkpoints are made in ``root``."""
    rows = [_row(family, root) for family in sorted(ALL)]
    towers = [f"| {wrapper} | {tower} |" for wrapper, tower in sorted(TEXT_TOWERS.items())]
    refused = [f"| {family} | {reason} |" for family, reason in sorted(REASONS.items())]
    parts = (_HEAD, _lines(rows), _TOWERS, _lines(towers), _REFUSED, _lines(refused), _OPTIONS)
    return "".join(parts)


def _lines(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _row(family: str, root: Path) -> str:
    folder = save_tiny(family, root / family)
    layers = num_layers(family)
    cuts = cuts_of(read_config(folder))
    where = "anywhere" if len(cuts) == layers - 1 else "nowhere: one node holds it whole" if not cuts else "see notes"
    bond = FAMILIES[family].bond(read_config(folder), 1)
    note = FAMILIES[family].note or (f"{bond[0].upper()}{bond[1:]}." if bond else "")
    route = Route([(load_shard(folder, LayerRange(0, layers), dtype="float32", device="cpu"), 0)])
    (state,) = route.open()
    route.frame(list(range(3, 20)), 0, [state])
    many = "together" if route.hops[0][0].batch_limit > 1 else "one by one"
    return f"| {family} | {', '.join(sorted(set(_kinds(state))))} | {where} | {many} | {note} |"


def _kinds(state: SessionState) -> Iterator[str]:
    """What each layer's part of a cache object holds, by the attributes that hold tensors."""
    for index, layer in enumerate(state.cache.layers):
        of: dict[str, Any] = vars(layer)
        if isinstance(of.get("keys"), torch.Tensor) and of["keys"].numel():
            window = getattr(layer, "is_sliding", False)
            yield "K/V of a window" if window else "K/V"
        for name, kind in (("conv_states", "conv state"), ("recurrent_states", "recurrent state")):
            held = of.get(name) or {}
            if any(isinstance(tensor, torch.Tensor) for tensor in (held.values() if isinstance(held, dict) else held)):
                yield kind
        linear = getattr(state.cache, "linear_cache", None)
        if linear and isinstance(linear[index], torch.Tensor):
            yield "recurrent state"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(table(Path(folder)))
