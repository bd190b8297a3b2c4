"""Answers that are held to a grammar: what the tail allows, and that a node's death in mid-answer changes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from in_process_mesh import random_prompt, tiny_mesh
from meshnet_core.errors import GrammarError
from meshnet_core.grammar import Grammar
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.answer_grammar import grammar_of_schema
from meshnet_gateway.text_model import TextModel
from meshnet_node.constraint import MAX_LEXER_STATES, Constraint, GrammarCompiler
from tiny_models import VOCAB, save_tiny
from tiny_tokenizers import ascii_files


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


FILES = ascii_files()
STOP = 2
TEXT = TextModel.from_files("tiny", "f" * 64, FILES)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "home": {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]},
    },
    "required": ["name", "kind", "ages", "home"],
}
GRAMMAR = Grammar(grammar_of_schema(SCHEMA, thinks=False), (STOP,))


async def constraint(lark: str, answer: str = "", **changes: Any) -> Constraint:
    compiler = changes.pop("compiler", None) or GrammarCompiler()
    tokenizer = changes.pop("tokenizer", FILES["tokenizer.json"])
    return await compiler.compile(Grammar(lark, (STOP,)), "f" * 64, tokenizer, VOCAB, TEXT.encode(answer), **changes)


def allowed(at: Constraint, answer: str) -> set[str]:
    """What may come next, as text; the end as ``END``."""
    ids = at.allowed(TEXT.encode(answer)).nonzero().flatten().tolist()
    return {"END" if token == STOP else TEXT.decode([token]) for token in ids}


async def test_what_may_come_next_is_a_function_of_the_answer_alone() -> None:
    lark = 'start: "cat" | "cow" | "dog"'
    one = await constraint(lark)
    for answer, expected in [
        ("", {"c", "d"}), ("c", {"a", "o"}), ("ca", {"t"}), ("cat", {"END"}), ("co", {"w"}), ("d", {"o"}),
        ("", {"c", "d"}),
    ]:  # fmt: skip
        assert allowed(one, answer) == expected  # forth and back, and to another branch
        assert allowed(await constraint(lark, answer), answer) == expected  # made again at open


async def test_it_is_so_for_random_walks_through_a_schema() -> None:
    draw = random.Random(5)
    wandering = await constraint(GRAMMAR.lark)
    answer: list[int] = []
    for _ in range(150):
        mask = wandering.allowed(answer)
        fresh = await GrammarCompiler().compile(GRAMMAR, "f" * 64, FILES["tokenizer.json"], VOCAB, answer)
        assert torch.equal(mask, fresh.allowed(answer))
        choices = mask.nonzero().flatten().tolist()
        if STOP in choices or draw.random() < 0.2:
            answer = answer[: draw.randrange(len(answer) + 1)]
        else:
            answer = [*answer, draw.choice(choices)]


async def test_an_answer_that_left_its_grammar_is_told() -> None:
    one = await constraint('start: "cat"')
    with pytest.raises(GrammarError, match="left its grammar"):
        one.allowed(TEXT.encode("dog"))
    with pytest.raises(GrammarError, match="left its grammar"):
        await constraint('start: "cat"', "dog")


@pytest.mark.parametrize(
    "lark", ["start: nowhere", "start", 'start: %json {"type": "wizard"}', "start: /(/", "(" * 5000]
)
async def test_a_grammar_that_cannot_be_read_is_an_error_with_its_reason(lark: str) -> None:
    with pytest.raises(GrammarError, match=r"cannot be compiled: \S"):
        await constraint(lark)


@pytest.mark.parametrize("tokenizer", [b"", b"{}", b"\xff", b'{"model": {}}'])
async def test_a_vocabulary_that_cannot_be_read_is_an_error(tokenizer: bytes) -> None:
    with pytest.raises(GrammarError, match="vocabulary cannot be read"):
        await constraint("start: /a/", tokenizer=tokenizer)


async def test_a_model_without_a_tokenizer_file_says_so() -> None:
    with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        await constraint("start: /a/", tokenizer=None)


async def test_a_long_answer_can_be_followed_again_and_one_beyond_the_bound_is_an_error() -> None:
    lark = 'start: %json {"type": "string", "maxLength": 100000}'
    (letter,), quote = TEXT.encode("a"), TEXT.encode('"')
    answer = [*quote, *[letter] * (MAX_LEXER_STATES // 2)]
    one = await constraint(lark)
    assert one.allowed(answer)[letter]
    again = await GrammarCompiler().compile(Grammar(lark, (STOP,)), "f" * 64, FILES["tokenizer.json"], VOCAB, answer)
    assert torch.equal(again.allowed(answer), one.allowed(answer))
    with pytest.raises(GrammarError, match="too many states"):
        one.allowed([*answer, *[letter] * MAX_LEXER_STATES])


async def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(GrammarError, match="not compiled in 0 s"):
        await constraint("start: /a/", compiler=GrammarCompiler(timeout_s=0))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.5, seed=5)], ids=["greedy", "drawn"]
)
async def test_a_random_model_writes_what_the_schema_says(
    tiny_llama: Path, sampling: SamplingParams, cache: bool
) -> None:
    async with tiny_mesh(tiny_llama, ["0-1", "2-3"], text_files=FILES) as mesh:
        tokens, _ = await mesh.answer(
            random_prompt(20), 150, sampling, cache=cache, stop_ids=frozenset({STOP}), grammar=GRAMMAR
        )
        answer = json.loads(TEXT.decode(token.id for token in tokens))
        assert set(answer) == set(SCHEMA["properties"])
        assert mesh.held_sessions == 0


async def test_a_death_in_mid_answer_changes_no_token(tiny_llama: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    prompt = random_prompt(20)
    async with tiny_mesh(tiny_llama, ["0-1", "2-3", "2-3"], text_files=FILES) as mesh:

        async def answer(at: int | None) -> list[int]:
            made = 0

            def during(_: object, __: SampledToken) -> None:
                nonlocal made
                made += 1
                if made == at:
                    tail = next(
                        url for url, service in mesh.services.items() if url != "http://node-0" and len(service.store)
                    )
                    mesh.kill(tail)

            tokens, report = await mesh.answer(
                prompt, 150, sampling, stop_ids=frozenset({STOP}), grammar=GRAMMAR, during=during
            )
            assert at is None or report["recoveries"]
            return [token.id for token in tokens]

        undisturbed = await answer(None)
        json.loads(TEXT.decode(undisturbed))
        assert await answer(len(undisturbed) // 2) == undisturbed


async def test_a_grammar_that_the_tail_cannot_read_fails_the_generation_at_once(tiny_llama: Path) -> None:
    async with tiny_mesh(tiny_llama, ["0-3"], text_files=FILES) as mesh:
        with pytest.raises(GrammarError, match="cannot be compiled"):
            await mesh.answer(random_prompt(5), 5, grammar=Grammar("start: nowhere", (STOP,)))
        assert mesh.held_sessions == 0
    async with tiny_mesh(tiny_llama, ["0-3"]) as mesh:
        with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
            await mesh.answer(random_prompt(5), 5, grammar=GRAMMAR)
