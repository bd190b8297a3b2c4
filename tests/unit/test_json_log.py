"""Logs as JSON: one object a line, with what the line is about; nothing that was said, no keys."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from api_client import USER, client_of
from in_process_mesh import random_prompt, tiny_mesh
from meshnet_cli import serving
from meshnet_cli.access import headers_with
from meshnet_core.errors import InvalidInputError
from meshnet_core.json_log import AboutFilter, JsonLines, about
from meshnet_core.sampling import SamplingParams
from meshnet_gateway.api import create_app
from meshnet_gateway.api_keys import ApiKeys
from meshnet_gateway.generation import GenerationRequest
from meshnet_gateway.text_model import TextModel
from scripted_engine import FixedMesh, FixedTexts, ScriptedEngine, summary, tokens
from tiny_models import save_tiny
from tiny_tokenizers import byte_level_files

OURS = ("meshnet_core", "meshnet_gateway", "meshnet_node")


class Log:
    """What was written, in both forms."""

    def __init__(self) -> None:
        self.json, self.text = io.StringIO(), io.StringIO()
        self.handlers = [logging.StreamHandler(self.json), logging.StreamHandler(self.text)]
        self.handlers[0].addFilter(AboutFilter())
        self.handlers[0].setFormatter(JsonLines())
        self.handlers[1].setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.json.getvalue().splitlines()]

    @property
    def everything(self) -> str:
        return self.json.getvalue() + self.text.getvalue()


@pytest.fixture
def log() -> Iterator[Log]:
    """All that our loggers say, from DEBUG on."""
    log, before = Log(), {name: logging.getLogger(name).level for name in OURS}
    for name in OURS:
        logging.getLogger(name).setLevel(logging.DEBUG)
        for handler in log.handlers:
            logging.getLogger(name).addHandler(handler)
    yield log
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
        for handler in log.handlers:
            logging.getLogger(name).removeHandler(handler)


def test_a_line_is_one_object_whatever_is_in_it(log: Log) -> None:
    logger = logging.getLogger("meshnet_node.tried")
    try:
        int("two\nlines")
    except ValueError:
        logger.exception('it said "%s"', "ä\n\u2028", extra={"session": "s-1", "colour": "red"})
    assert len(log.json.getvalue().rstrip("\n").split("\n")) == 1
    (line,) = log.lines
    assert line["message"] == 'it said "ä\n\u2028"'
    assert (line["level"], line["logger"], line["session"]) == ("ERROR", "meshnet_node.tried", "s-1")
    assert "ValueError: invalid literal" in line["exception"]
    assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    assert set(line) == {"time", "level", "logger", "message", "session", "exception"}


async def test_what_a_task_is_about_is_on_its_lines_and_on_those_of_tasks_begun_there(log: Log) -> None:
    logger = logging.getLogger("meshnet_node.tried")

    async def say(what: str) -> None:
        await asyncio.sleep(0)
        logger.info(what)

    async def one(session: str) -> None:
        with about(session=session, hop=0, route=None):
            with about(hop=1):
                task = asyncio.create_task(say("later"))
            await say("here")
            logger.info("itself", extra={"session": "other"})
        await task

    await asyncio.gather(one("s-1"), one("s-2"))
    logger.info("outside")
    told = {(line["message"], line.get("session"), line.get("hop")) for line in log.lines}
    assert told == {
        ("outside", None, None),
        ("itself", "other", 0),
        *(("here", session, 0) for session in ("s-1", "s-2")),
        *(("later", session, 1) for session in ("s-1", "s-2")),
    }
    assert all("route" not in line for line in log.lines)


async def test_gateway_and_nodes_name_the_session_the_hop_and_the_route(tmp_path: Path, log: Log) -> None:
    async with tiny_mesh(save_tiny("llama", tmp_path), ["0-0", "1-1", "2-3", "2-3"]) as mesh:
        mesh.break_at(2)
        prompt = tuple(random_prompt(9))
        generation = mesh.engine().start(GenerationRequest("tiny", prompt, 5, SamplingParams()))
        async for _ in generation:
            pass
        await generation.aclose()
    gateway = [line for line in log.lines if line["logger"] == "meshnet_gateway.mending"]
    assert [line["session"] for line in gateway] == [generation.session] * len(gateway)
    assert any(line.get("hop") == 2 and "node-1" in line["route"] for line in gateway)
    nodes = [line for line in log.lines if line["logger"] == "meshnet_node.frame_runs"]
    assert {line["session"] for line in nodes} == {generation.session}
    assert {line["hop"] for line in nodes} <= {0, 1, 2}
    assert all("node-0" in line["route"] for line in nodes)
    assert nodes
    assert ", ".join(map(str, prompt[:4])) not in log.everything
    assert "route" not in log.text.getvalue().split(": ", 1)[0]


async def test_neither_prompts_nor_answers_nor_keys_are_ever_logged(log: Log) -> None:
    secret, said, key = "the badger sleeps at noon", "under the old bridge", "k-0123456789abcdef"
    model = TextModel.from_files("tiny", "f" * 64, byte_level_files())
    app = create_app(
        ScriptedEngine(tokens(model.encode(said))),
        FixedTexts({"tiny": model}),
        FixedMesh([summary("tiny")]),
        keys=ApiKeys([key]),
    )
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": secret}]}
    async with client_of(app) as client:
        for change in ({}, {"stream": True}, {"max_tokens": 0}, {"model": "none"}, {"colour": secret}, {"n": 2}):
            await client.post("/v1/chat/completions", json={**body, **change}, headers=headers_with(key))
        await client.post("/v1/completions", json={"model": "tiny", "prompt": secret}, headers=headers_with(key))
        await client.post("/v1/chat/completions", json=body, headers=headers_with(key + "x"))
        await client.post("/v1/chat/completions", json={"model": "tiny", "messages": USER})
    answered = [line for line in log.lines if line["logger"] == "meshnet_gateway.jobs"]
    assert {line["outcome"] for line in answered} == {"ok"}
    assert len(answered) >= 3
    assert all(line["request"] for line in answered)
    assert "turned" in log.everything
    for never in ("badger", "bridge", key):
        assert never not in log.everything


@pytest.mark.parametrize("form", ["json", "text", None])
def test_the_form_of_the_log_is_that_of_the_variable(
    form: str | None, log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del log  # puts the levels back
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a fresh process
    if form is not None:
        monkeypatch.setenv("MESHNET_LOG_FORMAT", form)
    serving.set_up_logging()
    logging.getLogger("meshnet_node.tried").info("hello %d", 1, extra={"session": "s-1"})
    err = capsys.readouterr().err
    if form == "json":
        assert json.loads(err)["session"] == "s-1"
    else:
        assert err.endswith("INFO meshnet_node.tried: hello 1\n")
    assert len(logging.getLogger().handlers) == 1


def test_a_form_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_LOG_FORMAT", "xml")
    with pytest.raises(InvalidInputError, match="MESHNET_LOG_FORMAT=xml is no format; write one of text, json"):
        serving.set_up_logging()
