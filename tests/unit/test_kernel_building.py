"""How this machine's kernels are built, kept and had no more than once; and where there are none."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest

from meshnet_node import step_kernels as module
from meshnet_node.kernel_library import ProductWay, StepKernels
from meshnet_node.step_kernels import compiler, kernels_here, step_kernels
from native_compiler import needs_compiler


@needs_compiler
def test_this_machines_kernels_are_made_once() -> None:
    assert step_kernels() is step_kernels() is not None


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
