"""Which huge pages weights fill, and that moving them there changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet_node import huge_pages
from meshnet_node.checkpoint_reader import own_pages
from meshnet_node.huge_pages import HUGE_PAGE_BYTES, TRIES, covered_pages, into_huge_pages

MIB = 1 << 20
EXTENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def test_a_page_counts_once_it_is_nearly_full() -> None:
    assert covered_pages([(0, 4 * MIB)]) == [0, 1]
    assert covered_pages([(1 * MIB, 4 * MIB)]) == [1]
    assert covered_pages([(1 * MIB, 4 * MIB)], least=0.5) == [0, 1, 2]
    assert covered_pages([(0, 1 * MIB), (1 * MIB, 1 * MIB)]) == [0]
    assert covered_pages([(0, 1 * MIB), (0, 1 * MIB)]) == []  # the same one twice
    assert covered_pages([(0, 0)]) == []


@given(EXTENTS)
def test_bytes_are_counted_as_if_one_by_one(extents: list[tuple[int, int]]) -> None:
    step = HUGE_PAGE_BYTES // 8
    held = {at for address, count in extents for at in range(address, address + count)}
    expected = [page for page in range(8) if sum(page * 8 <= at < page * 8 + 8 for at in held) >= 4]
    assert covered_pages([(a * step, n * step) for a, n in extents], least=0.5) == expected


def test_tensors_in_huge_pages_hold_what_they_held() -> None:
    tensor = own_pages(16 * MIB)
    tensor.copy_(torch.arange(16 * MIB, dtype=torch.int64) % 251)
    before = tensor.clone()
    done = into_huge_pages([tensor, torch.empty(3, device="meta")])
    assert torch.equal(tensor, before)
    if not done:
        pytest.skip("this system has no huge pages, or none free")
    assert done >= 6  # of eight, the first and the last may be shared with others
    assert huge_kib(tensor) >= done * HUGE_PAGE_BYTES // 1024


@pytest.mark.parametrize(("refused", "done", "asked"), [(1, 15, 16), (TRIES, 0, TRIES), (16, 0, TRIES)])
def test_pages_at_the_edge_of_a_mapping_do_not_keep_the_others_small(
    refused: int, done: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[int] = []

    def collapse(address: int, size: int, advice: int) -> int:
        pages.append(address // size)
        return -1 if len(pages) <= refused else 0

    monkeypatch.setattr(huge_pages, "_collapse", lambda: collapse)
    monkeypatch.setattr(huge_pages, "covered_pages", lambda extents: list(range(16)))
    assert (into_huge_pages([]), len(pages)) == (done, asked)


def huge_kib(tensor: torch.Tensor) -> int:
    """KiB in huge pages of the mapping that holds a tensor."""
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        if (extent := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)) is not None:
            low, high = (int(part, 16) for part in extent.groups())
            if low <= tensor.data_ptr() < high:
                return int(re.findall(r"AnonHugePages:\s+(\d+) kB", entry)[0])
    raise AssertionError("the tensor lies in no mapping")
