"""What `--compile` takes, and what is said where a machine cannot compile."""

from __future__ import annotations

import pytest
import torch

from meshnet_core.errors import InvalidInputError, UnsupportedModelError
from meshnet_node.compile_choice import COMPILE, compiles_steps, takes_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("choice", ["off", "auto"])
def test_what_is_not_torchs_compiler_asks_for_nothing(choice: str) -> None:
    assert not compiles_steps(choice, torch.device("mps"), find=lambda name: None, platform="win32", free_threaded=True)


def test_kernels_are_for_auto_alone() -> None:
    assert [takes_kernels(choice) for choice in COMPILE] == [True, False, False]


def test_a_machine_with_a_compiler_compiles() -> None:
    found = {"g++": "/usr/bin/g++"}
    assert compiles_steps("step", CPU, find=found.get, platform="linux", free_threaded=False)
    assert compiles_steps("step", torch.device("cuda"), find=found.get, platform="linux", free_threaded=False)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInputError, match="--compile 'all' is unknown; write auto, off, step"):
        compiles_steps("all", CPU)


@pytest.mark.parametrize(
    ("device", "found", "platform", "free_threaded", "said"),
    [
        ("mps", "/usr/bin/c++", "linux", False, "not for mps; add --device cpu"),
        ("cpu", None, "linux", False, "no C\\+\\+ compiler on the path; install g\\+\\+"),
        ("cpu", "/usr/bin/c++", "darwin", False, "on Linux alone, not on darwin"),
        ("cpu", "/usr/bin/c++", "linux", True, "a build without free threading"),
    ],
)
def test_what_a_machine_lacks_is_told(
    device: str, found: str | None, platform: str, free_threaded: bool, said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        compiles_steps(
            "step", torch.device(device), find=lambda name: found, platform=platform, free_threaded=free_threaded
        )


def test_a_compiler_that_is_named_is_the_one_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "my-compiler")
    looked: list[str] = []

    def find(name: str) -> str:
        looked.append(name)
        return name

    assert compiles_steps("step", CPU, find=find, platform="linux", free_threaded=False)
    assert looked == ["my-compiler"]
