"""`meshnet verify`: it passes what is right, and names what is wrong, with bugs put in on purpose."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

import smollm2
from meshnet_cli import complaint
from meshnet_cli import verify as verify_command
from meshnet_cli.main import app
from meshnet_core.errors import UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node import frame_attempts, layer_slicing, shard_route, verification
from meshnet_node.layer_view import LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.model_files import open_model
from meshnet_node.session_state import SessionState
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_route import ShardRoute
from meshnet_node.split import parse_splits
from meshnet_node.unsplit_model import UnsplitModel
from meshnet_node.verification import Verification, verify
from native_compiler import needs_compiler
from tiny_models import VOCAB, num_layers, save_tiny
from tiny_tokenizers import byte_level_files

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ([5, 6, 7, 8, 9], [(7 * at) % VOCAB for at in range(19)])
TOKENS = 8
REFILLS = {5 + 1, 19 + 7}  # positions of the frames that refill the two prompts, and of no other frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("verified")

    def made(family: str) -> Path:
        place = root / family
        return place if place.exists() else save_tiny(family, place)

    return made


def check(folder: Path, family: str, splits: str, dtype: str = "float32") -> Verification:
    chosen = parse_splits(splits, num_layers(family))
    return verify(folder, chosen, PROMPTS, tokens=TOKENS, dtype=dtype, device="cpu")


def differing(found: Verification) -> set[str]:
    return {result.name for result in found.differing}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_moe_text"])
def test_what_is_right_is_verified(family: str, dtype: str, folder: Callable[[str], Path]) -> None:
    found = check(folder(family), family, "0-1,2-3|0-2,1-3" if family == "llama" else "0-1,2-4|0-2,1-4", dtype)
    assert found.verdict == "verified 11/11", [(result.name, result.objection) for result in found.differing]
    assert all(result.found is not None for result in found.results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_of_the_whole_shard_is_found_where_shards_overlap(
    dtype: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = LayerView.__init__

    def with_shard_config(self: Any, shard: Any, held: LayerRange, start: int, family: Any) -> None:
        self.wide = copy.deepcopy(shard.config)
        layer_slicing._slice_config(self.wide, held)
        begin(self, shard, held, start, family)

    monkeypatch.setattr(LayerView, "__init__", with_shard_config)
    monkeypatch.setattr(LayerView, "new_cache", lambda self: DynamicCache(config=self.wide))
    found = check(folder("gemma3_text"), "gemma3_text", "0-1,2-4|0-1,1-4", dtype)
    assert "split of 0-1,1-4" in differing(found)
    assert all(name.endswith(" of 0-1,1-4") for name in differing(found))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_that_a_refill_leaves_empty_is_found_in_recovery_alone(
    dtype: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = SessionState.advance

    def forgetting(self: SessionState, count: int) -> None:
        if self.position == 0 and count in REFILLS:
            for tensor in self.tensors():
                tensor.zero_()
        advance(self, count)

    monkeypatch.setattr(SessionState, "advance", forgetting)
    found = check(folder("llama"), "llama", "0-1,2-3", dtype)
    assert differing(found) == {"recovery of 0-1,2-3"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_position_off_by_one_in_later_hops_is_found_in_all_but_the_stateless(
    dtype: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LayerView.forward

    def off_by_one(self: Any, inputs: torch.Tensor, *, position: int, cache: Any, **rest: Any) -> torch.Tensor:
        off = int(inputs.shape[1] == 1 and cache is not None and self.layers.start > 0)
        return forward(self, inputs, position=position + off, cache=cache, **rest)

    monkeypatch.setattr(LayerView, "forward", off_by_one)
    found = check(folder("llama"), "llama", "0-1,2-3", dtype)
    assert differing(found) == {f"{name} of 0-1,2-3" for name in ("split", "chunks", "recovery")}


def test_a_mask_missing_from_a_later_chunk_is_found_in_chunks_alone(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerView, "_masks", lambda self, _seq_len: self._no_masks)
    found = check(folder("qwen3"), "qwen3", "0-1,2-3")
    assert differing(found) == {"chunks of 0-1,2-3"}


def test_a_lost_state_that_nobody_misses_is_found(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_attempts, "check_fit", lambda _work, _layers: None)
    found = check(folder("llama"), "llama", "0-1,2-3")
    assert differing(found) == {"recovery of 0-1,2-3"}
    assert found.differing[0].objection == "a state lost after 1 tokens was not missed"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_backend_that_rounds_by_chance_is_found_in_replay_alone(
    dtype: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LayerView.forward

    def noisy(self: Any, *arguments: Any, **rest: Any) -> torch.Tensor:
        output = forward(self, *arguments, **rest)
        return output * (1 + torch.finfo(output.dtype).eps * torch.randint_like(output, 2))

    monkeypatch.setattr(LayerView, "forward", noisy)
    found = check(folder("llama"), "llama", "0-1,2-3", dtype)
    assert differing(found) == {"replay of 0-1,2-3"}


def test_a_check_that_fails_is_named_and_the_others_go_on(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LayerView.forward

    def broken(self: Any, inputs: torch.Tensor, *, cache: Any, **rest: Any) -> torch.Tensor:
        if cache is None:
            raise RuntimeError("no kernel")
        return forward(self, inputs, cache=cache, **rest)

    monkeypatch.setattr(LayerView, "forward", broken)
    found = check(folder("llama"), "llama", "0-1,2-3")
    assert differing(found) == {"stateless of 0-1,2-3"}
    assert "no kernel" in (found.differing[0].objection or "")


def test_a_split_that_the_model_refuses_is_told_apart(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(place: Path, layers: LayerRange, **rest: Any) -> TorchModelShard:
        if layers == LayerRange(0, 2):
            raise UnsupportedModelError("layer 2 shares with layer 1; split at 1 or 3")
        return load_shard(place, layers, **rest)

    monkeypatch.setattr(shard_route, "load_shard", refusing)
    found = check(folder("llama"), "llama", "0-1,2-3|0-2,3")
    assert [str(split) for split, _ in found.refused] == ["0-1,2-3"]
    assert found.verdict == "verified 6/6"
    with pytest.raises(UnsupportedModelError, match="split at 1 or 3"):
        check(folder("llama"), "llama", "0-1,2-3")


def test_a_multimodal_checkpoint_is_verified_by_its_text_tower(folder: Callable[[str], Path], tmp_path: Path) -> None:
    text = AutoConfig.from_pretrained(folder("qwen3_5_moe_text"))
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    assert check(tmp_path, "qwen3_5_moe_text", "0-1,2-4").verdict == "verified 6/6"


def test_only_one_copy_of_the_model_is_held_at_a_time(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[object]] = []
    alive: list[int] = []

    def noted(kind: type) -> Callable[..., object]:
        def make(*arguments: Any, **rest: Any) -> object:
            alive.append(sum(one() is not None for one in held))
            made = kind(*arguments, **rest)
            held.extend(weakref.ref(part) for part in (made, getattr(made, "_model", made)))
            return made

        return make

    monkeypatch.setattr(verification, "UnsplitModel", noted(UnsplitModel))
    monkeypatch.setattr(verification, "ShardRoute", noted(ShardRoute))
    check(folder("llama"), "llama", "0-1,2-3|0-2,3")
    assert alive == [0, 0, 0]


# --- the command


def command(*arguments: str) -> int:
    return complaint.run(typer.main.get_command(app), ["verify", *arguments, "--device", "cpu"])


def test_the_command_ends_with_the_verdict(folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(folder("llama")), "--splits", "0-1,2-3", "--tokens", "4") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "verified 6/6"
    for word in ("largest logit difference", "whole", "0-1,2-3", "stateless", "chunks", "recovery", "replay"):
        assert word in shown.out
    assert "random ids" in shown.err


def test_the_command_names_what_differs(
    folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_attempts, "check_fit", lambda _work, _layers: None)
    assert command(str(folder("llama")), "--splits", "0-1,2-3", "--tokens", "4") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "verified 5/6"
    assert lines[-2].startswith("differs: recovery of 0-1,2-3: a state lost")


def test_json_is_one_document_and_texts_are_used_where_there_is_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama", tmp_path, vocab_size=400)
    for name, content in byte_level_files().items():
        if name.startswith("tokenizer"):
            (tmp_path / name).write_bytes(content)
    assert command(str(tmp_path), "--splits", "0-2,3", "--tokens", "3", "--dtype", "bfloat16", "--json") == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["verified"], document["total"], document["differs"]) == (6, 6, [])
    assert document["dtype"] == "bfloat16"
    assert [row["check"] for row in document["checks"]][:2] == ["whole", "split"]
    assert document["checks"][-1]["largest_logit_difference"] == 0
    assert "3 texts" in shown.err
    assert shown.err.endswith("verified 6/6\n")


@needs_compiler
@pytest.mark.parametrize(("option", "steps"), [((), "native"), (("--compile", "off"), "plain")])
def test_what_steps_were_is_told(
    option: tuple[str, ...], steps: str, folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (str(folder("llama")), "--splits", "0-1,2-3", "--tokens", "12", "--dtype", "bfloat16", "--json")
    assert command(*arguments, *option) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == steps


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe_text"])
def test_a_model_without_a_tokenizer_gets_the_same_random_ids_each_time(
    family: str, folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files = open_model(str(folder(family)))
    prompts = verify_command._prompts(files, tokens=4)
    assert [len(ids) for ids in prompts] == [5, 30, 90]
    assert all(0 <= token < VOCAB for ids in prompts for token in ids)
    assert verify_command._prompts(files, tokens=4) == prompts
    assert "random ids, 5, 30, 90 of them" in capsys.readouterr().err
    assert [len(ids) for ids in verify_command._prompts(files, tokens=500)] == [5, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--splits", "0-1,2-9"], "the model's last is 3"),
        (["--splits", "0-1;2-3"], "write FIRST-LAST"),
        (["--tokens", "1"], "--tokens"),
        (["--tokens", "512"], "leaves no position for a prompt"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_a_mistake_is_told(
    arguments: list[str], told: str, folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(folder("llama")), *arguments) == 2
    assert told in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_split_of_a_random_mixture_of_experts_is_verified(
    dtype: str, folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(folder("qwen3_5_moe_text")), "--splits", "all", "--dtype", dtype) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verified 31/31"


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model_is_verified(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    smollm2.gguf_path()
    assert command("smollm2", "--dtype", dtype) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verified 26/26"
