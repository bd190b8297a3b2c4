"""Which frames a shard refuses before it reads them."""

from __future__ import annotations

import pytest

from meshnet_core.errors import BadFrameError
from meshnet_core.layer_range import LayerRange
from meshnet_node.frame_fit import check_fit
from shard_frames import hidden_work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wire_dtype": "float64"}, "float64"),
        ({"start": 0}, "outside this shard's layers 1-2"),
        ({"start": 3}, "outside this shard's layers 1-2"),
        ({"seq_len": 0}, "seq_len is at least 1"),
        ({"position": -1}, "position at least 0"),
        ({"sample": 3}, "sample at most seq_len"),
        ({"position": 4}, "without state starts at position 0"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadFrameError, match=message):
        check_fit(hidden_work(None, **changes), LayerRange(1, 3))
