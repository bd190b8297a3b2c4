"""The codec of safetensors headers: agrees with the library, and answers garbage with a clear error."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from meshnet_core.errors import InvalidInputError
from meshnet_node.tensor_index import (
    INDEX_NAME,
    decode_header,
    encode_header,
    index_folder,
    read_header,
    read_weight_map,
    tensor_bytes,
    weight_files,
)

_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_TENSORS = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.sampled_from(["F32", "BF16", "I64", "BOOL"]), _SHAPES),
    unique_by=lambda row: row[0],
    max_size=6,
).filter(lambda rows: all(name != "__metadata__" for name, _, _ in rows))


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"b.weight": torch.randn(3, 4), "a": torch.arange(5, dtype=torch.int64), "c": torch.zeros(2).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "model.safetensors")
    assert header.metadata == {"format": "pt"}
    data = (tmp_path / "model.safetensors").read_bytes()
    assert set(header.tensors) == set(tensors)
    for name, tensor in tensors.items():
        entry = header.tensors[name]
        assert entry.shape == tuple(tensor.shape)
        assert data[entry.start : entry.stop] == bytes(tensor.view(-1).view(torch.uint8).numpy())


@given(_TENSORS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_what_is_encoded_is_decoded(rows: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    head = encode_header(rows, metadata)
    assert len(head) % 8 == 0
    size = len(head) + sum(tensor_bytes(dtype, shape) for _, dtype, shape in rows)
    decoded = decode_header(head, size)
    assert {(entry.name, entry.dtype, entry.shape) for entry in decoded.tensors.values()} == set(rows)
    assert decoded.metadata == metadata
    for other in (size - 1, size + 1):
        with pytest.raises(ValueError, match=r"describes|claims|too few"):
            decode_header(head, other)


@given(st.binary(max_size=200), st.integers(0, 10**12))
def test_random_bytes_are_a_value_error(head: bytes, size: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_header(head, size)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_ROW = st.fixed_dictionaries(
    {}, optional={"dtype": st.sampled_from(["F32", "X"]) | _JSON, "shape": _JSON, "data_offsets": _JSON}
)


@given(st.dictionaries(st.text(max_size=5), _ROW | _JSON, max_size=3) | _JSON, st.integers(0, 300))
@settings(max_examples=300)
def test_any_json_is_decoded_or_a_value_error(document: Any, size: int) -> None:
    text = json.dumps(document).encode()
    try:
        header = decode_header(struct.pack("<Q", len(text)) + text, size)
    except ValueError:
        pass
    else:
        assert sum(entry.nbytes for entry in header.tensors.values()) == size - header.data_start


@given(st.data())
def test_a_changed_byte_never_crashes(data: st.DataObject) -> None:
    head = bytearray(encode_header([("a", "F32", (2, 3)), ("b", "BF16", (4,))], {"format": "pt"}))
    head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        decode_header(bytes(head), len(head) + 32)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 50_000])
def test_deep_nesting_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        decode_header(struct.pack("<Q", len(text)) + text, 8 + len(text))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "takes 8"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "lacks"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "lacks"),
        ({"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, "whole bytes"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "was due"),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
            },
            "was due",
        ),
    ],
)
def test_refusals_say_what_is_wrong(rows: dict[str, Any], reason: str) -> None:
    text = json.dumps(rows).encode()
    with pytest.raises(ValueError, match=reason):
        decode_header(struct.pack("<Q", len(text)) + text, 8 + len(text) + 8)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInputError, match=r"model\.safetensors is not a whole safetensors file"):
        read_header(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidInputError, match="too few"):
        read_header(path)


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002", "consolidated"):
        save_file({f"{name}.weight": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    assert len(weight_files(tmp_path)) == 3
    weights = {f"model-0000{n}-of-00002.weight": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weights}))
    assert [path.name for path in weight_files(tmp_path)] == sorted(weights.values())
    assert set(index_folder(tmp_path)) == set(weights)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()  # a node needs only its own files
    assert set(index_folder(tmp_path)) == {"model-00002-of-00002.weight"}


def test_model_safetensors_stands_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert list(index_folder(tmp_path)) == ["a"]


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InvalidInputError, match=r"x\.safetensors and in y\.safetensors"):
        index_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "not JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "beside it"),
        ('{"weight_map": {"a": "x.bin"}}', "only .safetensors"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(InvalidInputError, match=reason):
        read_weight_map(tmp_path)
