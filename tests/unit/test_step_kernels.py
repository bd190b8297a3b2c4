"""The C code of decode steps: what it computes, against torch's bits or double precision; and where there is none."""

from __future__ import annotations

import hashlib
import logging
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from meshnet_core.errors import UnsupportedModelError
from meshnet_node import step_kernels as module
from meshnet_node.kernel_check import check
from meshnet_node.kernel_library import MOST_HEADS, AttentionShape, DeltaShape, ProductWay, StepKernels
from meshnet_node.step_kernels import compiler, kernels_here, step_kernels
from native_compiler import needs_compiler

BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels() -> StepKernels:
    found = step_kernels()
    assert found is not None
    return found


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Values of many sizes, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4 ** torch.randn(shape, generator=generator)).to(BFLOAT16)


@needs_compiler
def test_this_machines_kernels_are_made_once() -> None:
    assert step_kernels() is step_kernels() is not None


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.integers(0, 1000))
def test_sums_norms_and_gates_have_torchs_bits(kernels: StepKernels, rows: int, width: int, seed: int) -> None:
    inputs, other, weight = drawn(seed, rows, width), drawn(seed + 1, rows, width), drawn(seed + 2, width)
    out, summed = torch.empty_like(inputs), inputs.clone()
    kernels.norm(inputs.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 1e-5)
    close_to_bits(out, functional.rms_norm(inputs, (width,), None, 1e-5) * weight)
    kernels.add_norm(summed.data_ptr(), other.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 1e-6)
    assert torch.equal(summed, inputs + other)
    close_to_bits(out, functional.rms_norm(summed, (width,), None, 1e-6) * weight)
    gates = drawn(seed + 3, rows, 2 * width)
    kernels.silu_mul(gates.data_ptr(), out.data_ptr(), rows, width)
    close_to_bits(out, functional.silu(gates[:, :width]) * gates[:, width:])


def close_to_bits(ours: torch.Tensor, torchs: torch.Tensor) -> None:
    """The same, but where a sum in another order rounds to the neighbour."""
    assert (ours == torchs).double().mean() >= 0.99 or ours.numel() < 100
    torch.testing.assert_close(ours.float(), torchs.float(), rtol=2**-6, atol=1e-30)


@needs_compiler
def test_what_is_no_number_and_what_is_too_large_stay_so(kernels: StepKernels) -> None:
    odd = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 3e38, -0.0, 1e-39], dtype=BFLOAT16)
    odd[0].view(torch.int16).fill_(0x7FFF)  # all bits of the fraction set: rounding must not carry it over
    summed = odd.clone()
    kernels.add(summed.data_ptr(), odd.data_ptr(), odd.numel())
    torch.testing.assert_close(summed, odd + odd, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from((2, 24, 64, 80, 128)),
    st.integers(1, 300),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_attention_is_that_of_double_precision(
    kernels: StepKernels,
    key_heads: int,
    sharing: int,
    width: int,
    positions: int,
    normed: bool,
    turned: bool,
    seed: int,
) -> None:
    heads = key_heads * sharing
    projected = torch.randn(heads + 2 * key_heads, width, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)
    keys, values = (drawn(seed + each, key_heads, positions + 2, width).clamp(-3, 3) for each in (1, 2))
    norm = drawn(seed + 3, heads + key_heads, width).clamp(-1, 1)
    angles = torch.randn(width // 2, generator=torch.Generator().manual_seed(seed + 4))
    cosines, sines = angles.cos().repeat(2).to(BFLOAT16), torch.cat([-angles.sin(), angles.sin()]).to(BFLOAT16)
    asked = projected.clone()
    turning = asked[: heads + key_heads]
    if normed:
        turning = functional.rms_norm(turning, (width,), None, 1e-6) * norm
    if turned:
        turning = (turning * cosines) + turning.roll(width // 2, -1) * sines
    query, key, value = turning[:heads], turning[heads:], asked[heads + key_heads :]
    past = [each.clone() for each in (keys, values)]
    past[0][:, positions - 1], past[1][:, positions - 1] = key, value
    expected = functional.scaled_dot_product_attention(
        query.double().view(1, heads, 1, width),
        *(each[:, :positions].double().repeat_interleave(sharing, 0).unsqueeze(0) for each in past),
        scale=0.2,
    ).view(heads, width)

    found, scores = torch.empty(heads, width, dtype=BFLOAT16), torch.empty(MOST_HEADS * positions)
    shape = AttentionShape(norm.data_ptr() if normed else None, heads, key_heads, width, turned, 0.2, 1e-6)
    kernels.attend(
        *(shape, projected.data_ptr(), cosines.data_ptr(), sines.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(keys.stride(0), values.stride(0), positions, scores.data_ptr(), found.data_ptr()),
    )
    # A norm that rounds to the neighbour moves one query or key by a last place.
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(keys.float(), past[0].float(), rtol=2**-6, atol=2**-6)
    assert torch.equal(values, past[1])


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from((1, 24, 64, 128, 200)),
    st.integers(1, 80),
    st.integers(2, 5),
    st.integers(0, 1000),
)
def test_a_gated_delta_rule_is_that_of_double_precision(
    kernels: StepKernels, rows: int, key_heads: int, sharing: int, width: int, key_width: int, taps: int, seed: int
) -> None:
    heads, keys = key_heads * sharing, key_heads * key_width
    channels = 2 * keys + heads * width
    mixed, conv = drawn(seed, rows, channels).clamp(-9, 9), drawn(seed + 1, channels, taps).clamp(-2, 2)
    gate, norm = drawn(seed + 2, rows, heads, width), drawn(seed + 3, width)
    beta, step = drawn(seed + 4, rows, heads), drawn(seed + 5, rows, heads)
    rate, step_bias = -drawn(seed + 6, heads).float().abs(), drawn(seed + 7, heads).float()
    columns = [drawn(seed + 8 + row, channels, taps).clamp(-9, 9) for row in range(rows)]
    states = [drawn(seed + 20 + row, heads, key_width, width).float().clamp(-9, 9) for row in range(rows)]

    def rule(row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns, state and what goes out; rounded to bfloat16 where the modules round."""
        seen = torch.cat([columns[row][:, 1:], mixed[row][:, None]], 1)
        summed = (seen.double() * conv.double()).sum(1).to(BFLOAT16)
        query, key, value = functional.silu(summed).double().split([keys, keys, heads * width])
        query, key = (
            (of / (of.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(sharing, 0)
            for of in (query.view(key_heads, key_width), key.view(key_heads, key_width))
        )
        fade = (rate.double() * functional.softplus(step[row].double() + step_bias.double())).exp()
        state = states[row].double() * fade[:, None, None]
        lacking = value.view(heads, width) - torch.einsum("hkw,hk->hw", state, key)
        state = state + torch.einsum("hk,hw->hkw", key, lacking * beta[row].sigmoid().double()[:, None])
        found = (torch.einsum("hkw,hk->hw", state, query) / key_width**0.5).to(BFLOAT16)
        normed = functional.rms_norm(found.double(), (width,), None, 1e-5).to(BFLOAT16) * norm
        return seen, state, normed.double() * functional.silu(gate[row].double())

    wanted = [rule(row) for row in range(rows)]
    shape = DeltaShape(
        *(each.data_ptr() for each in (conv, rate, step_bias, norm)), heads, key_heads, width, key_width, taps, 1e-5
    )

    def run(first: int, last: int, columns: list[torch.Tensor], states: list[torch.Tensor]) -> torch.Tensor:
        some = slice(first, last)
        kept = torch.tensor([[c.data_ptr(), s.data_ptr()] for c, s in zip(columns[some], states[some], strict=True)])
        room, out = torch.empty(channels), torch.empty(last - first, heads, width, dtype=BFLOAT16)
        given = (kept, mixed[some], gate[some], beta[some], step[some], room, out)
        kernels.delta(shape, last - first, *(each.data_ptr() for each in given))
        return out

    apart = [[each.clone() for each in of] for of in (columns, states)]
    out = run(0, rows, columns, states)
    for row, (seen, state, given_out) in enumerate(wanted):
        assert torch.equal(columns[row], seen)
        # A convolution that rounds to the neighbour moves one query, key or value by a last place.
        torch.testing.assert_close(states[row].double(), state, rtol=0.02, atol=0.02 * float(state.abs().max()))
        near = 0.03 * float(given_out.abs().max())
        assert float((out[row].double() - given_out).abs().median()) <= near + 1e-6
        assert torch.equal(run(row, row + 1, *apart)[0], out[row])  # rows are each other's business in no bit
        assert torch.equal(apart[1][row], states[row])


@needs_compiler
def test_without_a_place_for_it_attention_is_left_out(kernels: StepKernels) -> None:
    shape = AttentionShape(None, 2, 1, 8, 0, 1.0, 0.0)
    projected, keys, values = drawn(0, 4, 8), torch.zeros(1, 3, 8).to(BFLOAT16), torch.zeros(1, 3, 8).to(BFLOAT16)
    addresses = (projected.data_ptr(), None, None, keys.data_ptr(), values.data_ptr())
    kernels.attend(shape, *addresses, keys.stride(0), values.stride(0), 3, None, None)
    assert torch.equal(keys[0, 2], projected[2])
    assert torch.equal(values[0, 2], projected[3])
    assert not keys[0, :2].any()


@needs_compiler
def test_what_was_built_is_kept_for_a_compiler_and_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path))
    path, is_new = module._built()
    assert is_new
    with monkeypatch.context() as patched:
        patched.setattr(module, "_build", lambda *_: pytest.fail("built again"))
        assert module._built() == (path, False)
        patched.setattr(module, "processor_name", lambda: "another")
        with pytest.raises(pytest.fail.Exception, match="built again"):
            module._built()
    path.write_bytes(b"damaged")
    assert kernels_here.__wrapped__().kernels is not None
    assert path.stat().st_size > len(b"damaged")


def test_without_a_compiler_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.INFO):
        here = kernels_here.__wrapped__()
    assert here.kernels is None
    assert "there is no C compiler on the path" in here.reason
    assert here.reason in caplog.text
    monkeypatch.setenv("CC", "nonsense -O9")
    with caplog.at_level(logging.INFO):
        assert kernels_here.__wrapped__().kernels is None
    assert "CC names nonsense, which is not on the path" in caplog.text
    monkeypatch.setenv("CC", "gcc 'half a word")
    with caplog.at_level(logging.INFO):
        assert kernels_here.__wrapped__().kernels is None
    assert "CC is no command" in caplog.text


def test_a_compiler_may_be_named_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = script(tmp_path / "wrapper", "")
    monkeypatch.setenv("CC", f"{shlex.quote(str(tool))} gcc '-DA=b c'")
    assert compiler() == [str(tool), "gcc", "-DA=b c"]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'no such machine' >&2; exit 1", "cannot build them: no such machine"),
        (r"printf 'caf\351\n' >&2; exit 1", "cannot build them: caf"),
        ("exit 1", "cannot build them: it says nothing"),
        ("exit 0", "cannot build them: it says nothing"),
    ],
)
def test_a_compiler_that_fails_is_quoted(
    does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = script(tmp_path / "my-cc", does)
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", shlex.quote(str(broken)))
    with caplog.at_level(logging.INFO):
        assert kernels_here.__wrapped__().kernels is None
    assert f"{broken} {said}" in caplog.text
    assert not list((tmp_path / "cache" / "kernels").iterdir())


@needs_compiler
def test_a_library_of_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.c"
    other.write_text("int nothing_of_ours(void) { return 0; }\n", "utf-8")
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SOURCES", {other: ()})
    with caplog.at_level(logging.INFO):
        assert kernels_here.__wrapped__().kernels is None
    assert "steps and chunks are torch's alone" in caplog.text


@needs_compiler
def test_a_cpu_without_instructions_for_bfloat16_rounds_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: StepKernels
) -> None:
    if ProductWay.PAIRS not in kernels.product_ways:
        pytest.skip("this CPU has none")
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", shlex.join([*compiler(), "-mno-avx512bf16"]))
    monkeypatch.setattr(module, "_NATIVE", (["-march=native", "-mno-avx512bf16"][0],))
    plain = kernels_here.__wrapped__().kernels
    assert plain is not None
    if ProductWay.PAIRS in plain.product_ways:  # the compiler takes the last word for -march
        pytest.skip("this compiler cannot leave them out")
    assert plain.product_ways == {ProductWay.FLOATS, ProductWay.WIDENED}  # and what they give was checked


def script(path: Path, does: str) -> Path:
    path.write_text(f"#!/bin/sh\n{does}\n", "utf-8")
    path.chmod(0o700)
    return path


@needs_compiler
@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("/ (float)width + eps", "/ (float)width + 0.1f", "another norm than torch"),
        ("NARROW(WIDE(x[i]) + WIDE(other[i]))", "NARROW(WIDE(x[i]) - WIDE(other[i]))", "another sum than torch"),
        ("1.0f + exponential(-x)", "1.0f + exponential(x)", "another gate than torch"),
        ("weights[at] - most[head]", "0.5f * weights[at]", "another attention than torch"),
        ("NARROW(ROUNDED(first * WIDE", "NARROW(0.5f * ROUNDED(first * WIDE", "another new keys and values"),
        ("if (norms) OF(norm_row)", "if (0) OF(norm_row)", "another new keys and values"),
        (
            ">> shift) & 15);\n            if",
            ">> 0) & 15);\n            if",
            "another row of a packed matrix than torch",
        ),
        ("code * 16.0f +", "code * 8.0f +", "another row of a packed matrix than torch"),
        ("pairs[i] << 16) + second", "pairs[i] << 16) - second", "another sum of experts than torch"),
        ("chosen[place] != expert", "chosen[place] == expert", "another sum of experts than torch"),
        ("count < MOST_ROWS; place++", "count < 1; place += 2", "another sum of experts than torch"),
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
    was: str, becomes: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: Path
) -> None:
    here = step_kernels()
    assert here is not None
    if not here.product_ways:
        pytest.skip("this CPU has no AVX-512, and no code for chunks")
    of_bfloat16 = ("memcpy(&both", "0xffff0000u", "(const bf16 *)of->bias")
    if ProductWay.PAIRS not in here.product_ways and any(each in was for each in of_bfloat16):
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
