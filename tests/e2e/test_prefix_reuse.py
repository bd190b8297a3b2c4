"""A chat with SmolLM2 on two real nodes, through the API: later turns cost their new tokens, and say the same."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from node_fleet import NodeFleet, node_fleet

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M-Instruct"
NODES = {"head": "0-14", "tail": "15-29"}
SYSTEM = {"role": "system", "content": "You are a keeper of a lighthouse. Answer in two sentences."}
QUESTIONS = (
    "What do you see from the tower tonight?",
    "Which ship was it?",
    "How far away is the next port?",
    "Were there ever storms that you were afraid of?",
    "What will you do in the morning?",
)
OTHER_QUESTIONS = ("Who built the tower?", "How tall is it?", "And how old?")
PLAIN: dict[str, Any] = {"meshnet": {"prefix": "off"}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFleet]:
    with node_fleet(tmp_path_factory.mktemp("fleet"), NODES) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def api(fleet: NodeFleet) -> str:
    return fleet.start_gateway()


class Chat:
    """Turns of one conversation, greedy."""

    def __init__(self, api: str, key: str, **more: Any) -> None:
        self.client = openai.OpenAI(api_key=key, base_url=api, max_retries=0, timeout=300)
        self.more = more
        self.messages: list[Any] = [SYSTEM]
        self.answers: list[Any] = []

    def turn(self, question: str) -> Any:
        self.messages.append({"role": "user", "content": question})
        answer = self.client.chat.completions.create(
            model=MODEL, messages=self.messages, temperature=0, max_tokens=40, extra_body=self.more
        )
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        self.answers.append(answer)
        return answer

    @property
    def texts(self) -> list[str]:
        return [answer.choices[0].message.content for answer in self.answers]


def cached(answer: Any) -> int:
    count: int = answer.usage.prompt_tokens_details.cached_tokens
    return count


def saved(fleet: NodeFleet) -> dict[str, float]:
    """Positions that each node did not have to run, by its metrics."""
    found = {}
    for name in NODES:
        with urllib.request.urlopen(f"{fleet.url(name)}/metrics", timeout=10) as response:  # noqa: S310 - our own nodes
            lines = response.read().decode().splitlines()
        (line,) = [line for line in lines if line.startswith("meshnet_node_prefill_positions_saved_total ")]
        found[name] = float(line.split()[1])
    return found


def test_every_turn_costs_its_new_tokens_and_says_what_it_says_without_reuse(fleet: NodeFleet, api: str) -> None:
    plain, chat = Chat(api, "turns", **PLAIN), Chat(api, "turns")
    for question in QUESTIONS:
        assert cached(plain.turn(question)) == 0
    before = saved(fleet)
    for question in QUESTIONS:
        chat.turn(question)
    assert chat.texts == plain.texts
    for one, following in zip(chat.answers, chat.answers[1:], strict=False):
        ended = one.usage.prompt_tokens + one.usage.completion_tokens
        # An answer that its length cut off has a last token that no node has run.
        assert ended - (one.choices[0].finish_reason == "length") == cached(following)
    total = sum(map(cached, chat.answers))
    assert {name: count - before[name] for name, count in saved(fleet).items()} == dict.fromkeys(NODES, total)
    last = chat.answers[-1].usage
    print(f"turn 5: {last.prompt_tokens} tokens of prompt, {last.prompt_tokens - cached(chat.answers[-1])} computed")


def test_two_chats_over_one_system_prompt_interleaved_equal_themselves_alone(api: str) -> None:
    alone = [Chat(api, "alone", **PLAIN), Chat(api, "alone", **PLAIN)]
    chats = [Chat(api, "two"), Chat(api, "two")]
    for one, other in zip(QUESTIONS[:3], OTHER_QUESTIONS, strict=True):
        for each in (alone, chats):
            each[0].turn(one)
            each[1].turn(other)
    assert [chat.texts for chat in chats] == [chat.texts for chat in alone]
    first = cached(chats[1].answers[0])
    assert 0 < first < chats[1].answers[0].usage.prompt_tokens  # the system prompt


def test_another_key_sees_nothing_of_it(api: str) -> None:
    for key in ("one of them", "another"):
        assert cached(Chat(api, key).turn(QUESTIONS[0])) == 0
    assert cached(Chat(api, "another").turn(QUESTIONS[0])) > 0


@pytest.mark.parametrize("name", NODES)
def test_a_node_that_restarts_between_turns_costs_a_prefill(fleet: NodeFleet, api: str, name: str) -> None:
    plain, chat = Chat(api, name, **PLAIN), Chat(api, name)
    for each in (plain, chat):
        each.turn(QUESTIONS[0])
    fleet.kill(name)
    fleet.start_again(name)
    for each in (plain, chat):
        each.turn(QUESTIONS[1])
        each.turn(QUESTIONS[2])
    assert chat.texts == plain.texts
    assert [cached(answer) > 0 for answer in chat.answers] == [False, False, True]
