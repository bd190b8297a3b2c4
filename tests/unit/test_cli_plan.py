"""`meshnet plan`: machines as people write them, and what they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from announcements import node, shard
from meshnet_cli import find_trackers
from meshnet_cli.machine_text import MachineText
from meshnet_cli.main import app
from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import Snapshot
from meshnet_core.placeable import Placeable
from meshnet_node.model_files import open_model
from meshnet_node.placeable_model import PlaceableModel
from tiny_models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=12)


def planned(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", str(folder), *arguments, "--json"])
    assert result.exit_code == code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def layers(document: dict[str, Any]) -> dict[str, str]:
    return {row["machine"]: row["layers"] for row in document["machines"]}


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("gpu:24GiB", MachineText(None, "gpu", "cuda", 24 << 30)),
        ("desk=cpu:16GiB@1.5ms", MachineText("desk", "cpu", "cpu", 16 << 30, None, 1.5)),
        ("a-1=mac:8G/bfloat16@2ms+12.5ms", MachineText("a-1", "mac", "mps", 8 << 30, "bfloat16", 2.0, 12.5)),
        ("cpu:2GiB/int4", MachineText(None, "cpu", "cpu", 2 << 30, "bfloat16+int4")),
        ("cpu:500MB+0ms", MachineText(None, "cpu", "cpu", 500_000_000, None, None, 0.0)),
    ],
)
def test_a_machine_as_it_is_written(text: str, machine: MachineText) -> None:
    assert MachineText.parse(text) == machine


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu", "no machine; write"),
        ("gpu:", "no machine; write"),
        ("gpu:24GiB@fast", "no machine; write"),
        ("tpu:24GiB", "device tpu is unknown; write gpu"),
        ("cpu:2GiB/int3", "dtype int3 is unknown; write float32"),
        ("cpu:2GiB@0ms", "more than 0 ms"),
        ("a b=cpu:2GiB", "a machine's name"),
        ("cpu:2.2.2GiB", "no number of bytes"),
    ],
)
def test_what_is_no_machine_is_told_with_the_form(text: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        MachineText.parse(text)


def test_a_machine_twice_as_fast_gets_twice_the_layers_and_all_is_told(folder: Path) -> None:
    found = planned(folder, "--on", "a=cpu:700K@1ms", "--on", "b=cpu:500K@2ms", "--context", "64")
    assert sorted(layers(found).items()) in ([("a", "0-7"), ("b", "8-11")], [("a", "4-11"), ("b", "0-3")])
    assert found["missing"] == []
    assert found["alone"]["machine"] == "a"
    assert all(row["bytes"] <= row["memory"] and not row["guessed"] for row in found["machines"])
    steps = [row["step_ms"] for row in found["machines"]]
    assert found["expected"]["tokens_per_s"] == pytest.approx(1000 / sum(steps), rel=0.01)
    assert found["expected"]["tokens_per_s_together"] == pytest.approx(1000 / max(steps), rel=0.01)


def test_it_says_when_one_machine_alone_would_be_faster(folder: Path) -> None:
    assert "one machine alone would be faster for one answer: a" in str(
        planned(folder, "--on", "a=cpu:2M@1ms", "--on", "b=cpu:2M@1ms")["verdict"]
    )
    assert "no one machine holds it all" in planned(folder, "--on", "cpu:600K", "--on", "cpu:600K")["verdict"]
    assert (
        planned(folder, "--on", "gpu:1GiB", "--on", "cpu:1GiB@900ms")["verdict"] == "one machine alone is best: gpu-1"
    )


def test_what_does_not_fit_is_told_and_is_a_failure(folder: Path) -> None:
    found = planned(folder, "--on", "cpu:600K", code=1)
    assert (layers(found), found["missing"], found["expected"]) == ({"cpu-1": "0-5"}, ["6-11"], {})
    assert "layers 6-11 are left over" in found["verdict"]


def test_the_table_says_the_same(folder: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(folder), "--on", "cpu:600K", "--on", "x=cpu:600K", "--prompt", "99"])
    assert result.exit_code == 0
    told = " ".join(result.stdout.split())
    assert "0-5" in told
    assert "6-11" in told
    assert "first token after a prompt of 99" in told
    assert "guessed by device" in told


def test_machines_of_a_mesh_count_with_what_was_measured_on_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = PlaceableModel(open_model(str(folder)), device="cpu").facts()
    known = {"model": facts.model, "fingerprint": facts.fingerprint, "num_layers": 12, "hidden_size": 32}
    nodes = (
        node("auto", placement=Placeable(600 * 1024, "float32", facts, LayerRange(0, 6))),
        node("fixed", shard("6-11", decode_ms=2.0, **known)),
    )

    async def snapshot(*_: object, **__: object) -> Snapshot:
        return Snapshot(nodes)

    monkeypatch.setattr(find_trackers, "snapshot_of", snapshot)
    found = planned(folder, "--on-mesh")
    assert layers(found) == {"auto": "0-5", "fixed": "6-11"}
    assert {row["machine"]: row["guessed"] for row in found["machines"]} == {"auto": True, "fixed": False}


def test_a_mesh_without_the_model_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def snapshot(*_: object, **__: object) -> Snapshot:
        return Snapshot(())

    monkeypatch.setattr(find_trackers, "snapshot_of", snapshot)
    result = CliRunner().invoke(app, ["plan", str(folder), "--on-mesh"])
    assert "no node of the mesh serves tiny" in str(result.exception)
