"""C code with a fault in it is not used."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from meshnet_core.errors import UnsupportedModelError
from meshnet_node import step_kernels as module
from meshnet_node.kernel_check import check
from meshnet_node.kernel_library import ProductWay, StepKernels
from meshnet_node.step_kernels import kernels_here
from native_compiler import needs_compiler

pytestmark = pytest.mark.long  # each one builds kernels


@needs_compiler
@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("/ (float)width + eps", "/ (float)width + 0.1f", "another norm than torch"),
        ("NARROW(WIDE(x[i]) + WIDE(other[i]))", "NARROW(WIDE(x[i]) - WIDE(other[i]))", "another sum than torch"),
        ("1.0f + exponential(-x)", "1.0f + exponential(x)", "another gate than torch"),
        ("scores[at] - from", "0.5f * scores[at]", "another attention than torch"),
        ("/ 2] = wide(query", "/ 2] = -wide(query", "another attention than torch"),
        ("block * BLOCK * width;", "0;", "another attention than torch"),
        ("sum += scale * stats[1]", "sum += stats[1]", "another attention than torch"),
        ("found[head][1][i] += given", "found[head][1][i] -= given", "another attention than torch"),
        ("asked[head][0][i] * of_bits", "asked[head][1][i] * of_bits", "another attention than torch"),
        ("NARROW(ROUNDED(first * WIDE", "NARROW(0.5f * ROUNDED(first * WIDE", "another new keys and values"),
        ("if (norms) OF(norm_row)", "if (0) OF(norm_row)", "another new keys and values"),
        (
            ">> shift) & 15);\n            if",
            ">> 0) & 15);\n            if",
            "another row of a packed matrix than torch",
        ),
        ("code * 16.0f +", "code * 8.0f +", "another row of a packed matrix than torch"),
        ("+= first * of_bits", "-= first * of_bits", "another product than torch"),
        ("row += FEW)", "row += FEW + 1)", "another product than torch"),
        ("number * COLUMN * of->in", "0 * COLUMN * of->in", "another product than torch"),
        ("(const bf16 *)of->bias + number * COLUMN", "(const bf16 *)of->bias", "another product than torch"),
        ("(row + own) * of->out", "own * of->out", "another product than torch"),
        ("case 3: few(3,", "case 3: few(2,", "another product than torch"),
        ("matrix + (int64_t)from * in", "matrix", "another sum of experts than torch"),
        ("chosen[place] != expert", "chosen[place] == expert", "another sum of experts than torch"),
        ("count < FEW; place++", "count < 1; place += 2", "another sum of experts than torch"),
        ("kept[tap] = kept[tap + 1]", "kept[tap] = kept[0]", "another convolution than torch"),
        ("row[i] * fade + change[i]", "row[i] * fade - change[i]", "another state than torch"),
        ("x > 20.0f ? x", "x > 0.1f ? x", "another state than torch"),
        ("* silu(wide(gate[i]))", "* wide(gate[i])", "another answer of a state than torch"),
        ("asked[i] += row[i] * query[at]", "asked[i] += query[at]", "another answer of a state than torch"),
        ("(positions - 1) * width", "positions * width", "another new keys and values than torch"),
    ],
)
def test_code_that_computes_something_else_is_not_used(
    was: str, becomes: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: Path
) -> None:
    assert_seen(was, becomes, said, tmp_path, monkeypatch, objects)


@needs_compiler
@pytest.mark.usefixtures("chunk_kernels")  # a CPU with AVX-512
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("_mm512_slli_epi32(pairs, 16)", "_mm512_slli_epi32(pairs, 15)"),
        ("at + own : positions - 1) * width", "at : positions - 1) * width"),
        ("own[i][1] = second_of(pairs)", "own[i][1] = first_of(pairs)"),
        ("unpacklo_pd(two, more)", "unpackhi_pd(two, more)"),
        ("_mm512_load_ps(asked[head][0] + i)", "_mm512_load_ps(asked[head][0])"),
    ],
)
def test_code_for_wide_heads_that_computes_something_else_is_not_used(
    was: str, becomes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: Path
) -> None:
    assert_seen(was, becomes, "another attention than torch", tmp_path, monkeypatch, objects)


@needs_compiler
@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("_mm512_fmadd_ps(_mm512_set1_ps(one)", "_mm512_fnmadd_ps(_mm512_set1_ps(one)", "product"),
        ("(from + row * from_stride + VECTOR * i)", "(from + VECTOR * i)", "product"),
        ("memcpy(&both, x, 4)", "memcpy(&both, x, 2)", "product"),
        ("(int)0xffff0000u", "(int)0xfff00000u", "product"),
        ("job->x) + top * stride + (int64_t)start * size", "job->x) + top * stride", "product"),
        ("switch (next - row) { TILE(1); TILE(2);", "switch (next - row) { TILE(1);", "product"),
        ("((const float *)of->bias)[number * COLUMN + i]", "((const float *)of->bias)[i]", "product"),
        ("wide(((const bf16 *)of->bias)[number * COLUMN + i])", "0.0f", "product"),
        ("int its = before + (row + own) / sharing + 1", "int its = before + (row + own) / sharing + 2", "attention"),
        ("*sum *= scale[0];", "", "attention"),
        ("for (int i = 0; i < width; i += VECTOR) *(vector *)(found + i) *= scale;", "", "attention"),
        ("y * r * r + r + 1.0f", "y * r + r + 1.0f", "attention"),
        ("y * r + 1.6666665459e-1f", "y * r + 1.6e-1f", "attention"),
        ("+ i, at->way) * at->scaling", "+ i, at->way)", "attention"),
        ("head * at->value_stride +", "", "attention"),
        ("= (first + row / sharing) * at->query_stride", "= (row / sharing) * at->query_stride", "attention"),
        ("(int64_t)(i / COLUMN) * KEYS * COLUMN +", "", "attention"),
        ("start < before + last - first", "start < KEYS", "attention"),
        ("if (at->other) add_row", "if (0) add_row", "sum"),
        ("at->gate_up + 2 * row * at->width", "at->gate_up + row * at->width", "gate"),
        ("all->before + row + 1", "all->before + row", "keys"),
        ("all->qkv + row * wide_row", "all->qkv", "queries"),
        ("all->sines + row * width", "all->sines", "queries"),
    ],
)
def test_code_for_chunks_that_computes_something_else_is_not_used(
    was: str,
    becomes: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    objects: Path,
    chunk_kernels: StepKernels,
) -> None:
    of_bfloat16 = ("memcpy(&both", "0xffff0000u", "(const bf16 *)of->bias")
    if ProductWay.PAIRS not in chunk_kernels.product_ways and any(each in was for each in of_bfloat16):
        pytest.skip("this CPU has no instructions for bfloat16")
    assert_seen(was, becomes, f"another {said} of a chunk than torch", tmp_path, monkeypatch, objects)


def assert_seen(
    was: str, becomes: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: Path
) -> None:
    """Whether kernels of code with a change are refused."""
    texts = {path: path.read_text("utf-8") for path in (*module.SOURCES, *module.HEADERS)}
    assert any(was in text for text in texts.values())
    for path, text in texts.items():
        (tmp_path / path.name).write_text(text.replace(was, becomes), "utf-8")
    monkeypatch.setattr(module, "SOURCES", {tmp_path / path.name: flags for path, flags in module.SOURCES.items()})
    monkeypatch.setattr(module, "HEADERS", tuple(tmp_path / path.name for path in module.HEADERS))
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_run", partial(run_once, module._run, objects))
    kernels = StepKernels(module._built()[0])
    with pytest.raises(UnsupportedModelError, match=said):
        check(kernels)
    assert kernels_here.__wrapped__().kernels is None


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what was compiled of unchanged sources is kept: a change is of one of them."""
    return tmp_path_factory.mktemp("objects")


def run_once(run: Callable[[list[str], Path], str], objects: Path, command: list[str], makes: Path) -> str:
    """As ``run``, but what was compiled of the same text before is taken."""
    if "-c" not in command:
        return run(command, makes)
    *how, source, _, _ = command
    text = Path(source).read_bytes()
    headers = [header.read_bytes() for header in module.HEADERS if header.name.encode() in text]
    kept = objects / hashlib.sha256(repr((how, text, headers)).encode()).hexdigest()
    if kept.exists():
        shutil.copy(kept, makes)
        return ""
    complaint = run(command, makes)
    if not complaint:
        shutil.copy(makes, kept)
    return complaint
