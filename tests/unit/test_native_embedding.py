"""Rows of packed embeddings from C code against the module that they are looked up in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshnet_node.native_embedding import native_embedding
from meshnet_node.quantised_layers import QuantisedEmbedding
from meshnet_node.step_kernels import step_kernels
from native_compiler import needs_compiler
from step_logits import WIDE, whole_shard
from tiny_models import VOCAB

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@torch.inference_mode()
def test_embeddings_of_packed_weights_have_the_modules_bits(quantize: str, tmp_path: Path) -> None:
    module = whole_shard(tmp_path, "llama", quantize=quantize, **WIDE).whole_view().model.get_input_embeddings()
    kernels = step_kernels()
    assert kernels is not None
    rows = native_embedding(module, kernels)
    ids = torch.arange(VOCAB).unsqueeze(1)
    assert isinstance(module, QuantisedEmbedding)
    assert torch.equal(rows(ids), module(ids))
    for beyond in (VOCAB, -1):
        with pytest.raises(IndexError):
            rows(torch.tensor([[beyond]]))
