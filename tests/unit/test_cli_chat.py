"""`meshnet chat` against a scripted gateway: one question, several turns, Ctrl-C, errors."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from meshnet_process import MESHNET, run, wait_until
from scripted_gateway import ScriptedGateway, serving


def test_one_question_gets_its_answer_and_the_speed() -> None:
    with serving(ScriptedGateway([["Hel", "lo ☀"]])) as gateway:
        result = run("chat", "--url", gateway.url, "-m", "hi")
    assert result.returncode == 0
    assert result.stdout == "Hello ☀\n"
    assert "2 tokens, 12.5 tokens/s, first after 0.25 s" in result.stderr
    assert gateway.requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert gateway.requests[0]["model"] == "tiny"
    assert gateway.requests[0]["temperature"] == 0.6


def test_what_the_model_thinks_is_shown_beside_the_answer_and_is_no_part_of_it() -> None:
    with serving(ScriptedGateway([["(let me", "( see", "hello"]])) as gateway:
        done = run("chat", "--url", gateway.url, "--message", "hi")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello\n"
    assert "(let me( see\n\n" in done.stderr


def test_a_terminal_that_cannot_show_all_gets_what_it_can() -> None:
    with serving(ScriptedGateway([["Hel", "lo ☀"]])) as gateway:
        result = run("chat", "--url", gateway.url, "-m", "hi", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout) == (0, "Hello ?\n")


def test_the_model_and_the_temperature_can_be_chosen() -> None:
    with serving(ScriptedGateway([["ok"]], models=["tiny", "other"])) as gateway:
        result = run("chat", "--url", gateway.url, "-m", "hi", "--model", "other", "--temperature", "0")
        wrong = run("chat", "--url", gateway.url, "-m", "hi", "--model", "third")
    assert result.returncode == 0
    assert gateway.requests[0]["model"] == "other"
    assert gateway.requests[0]["temperature"] == 0
    assert wrong.returncode == 2
    assert "serves no model 'third'; it serves tiny, other" in wrong.stderr


def test_turns_build_on_each_other_until_the_end_of_input() -> None:
    with serving(ScriptedGateway([["one"], ["two"]])) as gateway:
        result = run("chat", "--url", gateway.url, stdin="first\n\nsecond\n")
    assert result.returncode == 0
    assert result.stdout == "one\ntwo\n"
    assert gateway.requests[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]


def test_exit_leaves() -> None:
    with serving(ScriptedGateway([["one"]])) as gateway:
        result = run("chat", "--url", gateway.url, stdin="first\n/exit\nsecond\n")
    assert result.returncode == 0
    assert len(gateway.requests) == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    with serving(ScriptedGateway([["half an ans", None], ["whole"]])) as gateway:
        log = tmp_path / "log"
        with log.open("wb") as file:
            chat = subprocess.Popen(
                [*MESHNET, "chat", "--url", gateway.url], stdin=subprocess.PIPE, stdout=file, stderr=file
            )
        assert chat.stdin is not None
        chat.stdin.write(b"first\n")
        chat.stdin.flush()
        wait_until(lambda: "half an ans" in log.read_text())
        chat.send_signal(signal.SIGINT)
        wait_until(lambda: "[stopped]" in log.read_text())
        assert gateway.hung_up.wait(20)
        chat.stdin.write(b"second\n")
        chat.stdin.close()
        assert chat.wait(20) == 0
    assert "whole" in log.read_text()
    assert gateway.requests[1]["messages"][1] == {"role": "assistant", "content": "half an ans"}


def test_a_failed_answer_is_told_and_the_question_can_be_asked_again() -> None:
    failure = RuntimeError("layers 15-29 are served by no node")
    with serving(ScriptedGateway([["half", failure], ["whole"]])) as gateway:
        result = run("chat", "--url", gateway.url, stdin="first\nfirst\n")
    assert result.returncode == 0
    assert "the answer failed: layers 15-29 are served by no node" in result.stderr
    assert gateway.requests[1]["messages"] == [{"role": "user", "content": "first"}]


def test_a_failed_answer_to_one_question_is_exit_code_1() -> None:
    with serving(ScriptedGateway([[RuntimeError("no room")]])) as gateway:
        result = run("chat", "--url", gateway.url, "-m", "hi")
    assert result.returncode == 1
    assert "the answer failed: no room" in result.stderr


def test_a_mesh_without_a_whole_model_is_told() -> None:
    with serving(ScriptedGateway([], models=[])) as gateway:
        result = run("chat", "--url", gateway.url, "-m", "hi")
    assert result.returncode == 1
    assert "serves no complete model yet" in result.stderr


def test_one_question_as_a_json_document() -> None:
    with serving(ScriptedGateway([["(hm", "yes"]])) as gateway:
        result = run("chat", "--url", gateway.url, "-m", "hi", "--json")
        alone = run("chat", "--url", gateway.url, "--json")
    assert "[2 tokens, 12.5 tokens/s" in result.stderr
    document = json.loads(result.stdout)
    assert (document["model"], document["answer"], document["reasoning"]) == ("tiny", "yes", "(hm")
    assert document["meshnet"]["tokens_per_s"] == 12.5
    assert alone.returncode == 2
    assert "give it with --message" in alone.stderr
