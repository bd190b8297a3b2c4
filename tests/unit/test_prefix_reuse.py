"""The next turn of a chat begins where the last one ended, and answers as if it had not: whole meshes, tiny models."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from in_process_mesh import TinyMesh, tiny_mesh
from meshnet_core.frames import Phase
from prefix_chat import HOLDING, Chat, far_apart
from tiny_models import save_tiny

FAMILIES = {
    "llama": ["0-1", "2-3"],
    "mistral": ["0-1", "2-3"],  # a window shorter than the chat: it has slid, and cannot be cut back
    "gemma3_text": ["0-2", "3-4"],  # windows and full attention
    "lfm2": ["0-1", "2-4"],  # the first node holds conv layers alone
    "qwen3_next": ["0-1", "2-4"],  # the first node holds recurrent layers alone
    "qwen3_5_moe_text": ["0-2", "3-4"],
}
TURNS = 5
TinyModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    root = tmp_path_factory.mktemp("models")
    return lru_cache(maxsize=None)(lambda family: save_tiny(family, root / family))


def prefilled(mesh: TinyMesh) -> int:
    """Positions that came to the first hop in prefill frames."""
    first = mesh.urls[0]
    frames = [frame for url, frame in mesh.transport.frames if url == first and frame.phase is not Phase.DECODE]
    mesh.transport.frames.clear()
    return sum(frame.seq_len for frame in frames)


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_turn_prefills_its_new_tokens_only_and_answers_as_without_reuse(
    tiny_model: TinyModel, family: str
) -> None:
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        plain, chat = Chat(mesh, reuse=False), Chat(mesh)
        without = [await plain.turn() for _ in range(TURNS)]
        prefilled(mesh)
        for at in range(TURNS):
            turn = await chat.turn()
            assert far_apart(turn.tokens, without[at].tokens) is None
            before = len(chat.turns[at - 1].prompt) + len(chat.turns[at - 1].ids) if at else 0
            # An answer cut off by its length has a last token that no node has run.
            assert before - 1 <= turn.cached <= before or at == 0
            assert prefilled(mesh) == len(turn.prompt) - turn.cached
        saved = [service.status()["prefill_positions_saved"] for service in mesh.services.values()]
        assert saved == [sum(turn.cached for turn in chat.turns)] * 2
        assert mesh.held_sessions == 0
