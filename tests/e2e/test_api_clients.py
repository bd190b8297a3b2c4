"""Real clients, unchanged, against two real nodes that hold halves of SmolLM2, and a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from meshnet_node.cache_folder import default_cache_dir
from node_fleet import node_fleet
from process_mesh import fetch_json

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(1200)]

MODEL = "SmolLM2-135M-Instruct"
NPM_OPENAI = "7.59.0"
OTHERS = ("litellm==1.110.2", "llm==0.36", "anthropic==2.14.0")
MESSAGES: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of the mesh; after all tests nothing of any session is left on it."""
    with node_fleet(tmp_path_factory.mktemp("fleet"), {"head": "0-14", "tail": "15-29"}) as fleet:
        url = fleet.start_gateway("--step-deadline", "60")
        yield url
        for name in ("head", "tail"):
            deadline = time.monotonic() + 60
            while running := asyncio.run(fetch_json(f"{fleet.url(name)}/healthz"))["running"]:
                assert time.monotonic() < deadline, running
                time.sleep(0.1)


@pytest.fixture
async def client(api: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key="none", base_url=api, max_retries=0, timeout=300) as one:
        yield one


async def chat(client: openai.AsyncOpenAI, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **more}
    return await client.chat.completions.create(**fields)


async def streamed(client: openai.AsyncOpenAI, **more: Any) -> tuple[list[str], list[str | None], Any]:
    """Texts and finish reasons by choice, and the usage."""
    count = more.get("n", 1)
    texts, finishes, usage = [""] * count, [None] * count, None
    async for chunk in await chat(client, stream=True, stream_options={"include_usage": True}, **more):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    return texts, finishes, usage


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize("fields", [{}, {"temperature": 1, "seed": 5, "n": 3}, {"stop": [" the", "\n"]}])
async def test_chat_stream_and_usage(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> None:
    whole = await chat(client, **fields)
    texts, finishes, usage = await streamed(client, **fields)
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) == fields.get("n", 1)
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


async def test_seed(client: openai.AsyncOpenAI) -> None:
    one, two, other = [await chat(client, temperature=1.5, seed=seed) for seed in (3, 3, 4)]
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.choices[0].message.content != other.choices[0].message.content


async def test_stop_and_bias(client: openai.AsyncOpenAI) -> None:
    text = (await chat(client, max_tokens=24)).choices[0].message.content
    word = text.split(" ")[3]
    cut = (await chat(client, max_tokens=24, stop=[word, "never"])).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(word)], "stop")
    first = (await chat(client, max_tokens=1, logprobs=True)).choices[0].logprobs.content[0]
    completion = await client.completions.create(model=MODEL, prompt=[[5, 6, 7]], max_tokens=1, logit_bias={"42": 100})
    assert completion.choices[0].text
    assert first.logprob <= 0


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    content = (await chat(client, logprobs=True, top_logprobs=3)).choices[0].logprobs.content
    assert len(content) == 12
    assert all(len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob for token in content)
    plain = await client.completions.create(model=MODEL, prompt="The sky is", max_tokens=3, logprobs=2, temperature=0)
    logprobs: Any = plain.choices[0].logprobs
    assert [len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs)] == [3, 3, 3]


async def test_completions(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    both = await client.completions.create(prompt=["The sky is", "Rome is"], echo=True, **fields)
    alone = [
        await client.completions.create(prompt=prompt, echo=True, **fields) for prompt in ("The sky is", "Rome is")
    ]
    assert [choice.text for choice in both.choices] == [one.choices[0].text for one in alone]
    assert both.choices[0].text.startswith("The sky is")


async def test_tools(client: openai.AsyncOpenAI) -> None:
    forced: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
    }
    choice = (await chat(client, **forced)).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, **forced) as stream:
        async for _ in stream:
            pass
        final: Any = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    history = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert (await chat(client, messages=history, tools=[WEATHER])).choices[0].message is not None


class Person(BaseModel):
    name: str = Field(max_length=12)
    mood: Literal["happy", "sad"]
    ages: list[int] = Field(max_length=2)


async def test_json_schema(client: openai.AsyncOpenAI) -> None:
    parsed: Any = await client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=200, response_format=Person
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    loose = (await chat(client, response_format={"type": "json_object"}, max_tokens=4)).choices[0]
    assert loose.message.content.startswith("{")
    assert loose.finish_reason in ("length", "stop")


async def test_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await chat(client, model="other")
    with pytest.raises(openai.BadRequestError, match="store is not supported") as refused:
        await chat(client, store=True)
    assert refused.value.param == "store"
    with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens; .* takes at most \d+") as long:
        await chat(client, messages=[{"role": "user", "content": "word " * 10_000}])
    assert long.value.code == "context_length_exceeded"
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "wizard"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: wizard"):
        await chat(client, response_format=schema)
    with pytest.raises(openai.NotFoundError, match="embeddings is not supported"):
        await client.embeddings.create(model=MODEL, input="hello")


async def test_cancel(client: openai.AsyncOpenAI, api: str) -> None:
    stream = await chat(client, stream=True, max_tokens=1500)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    while (await fetch_json(f"{api}/meshnet/status"))["gateway"]["active_generations"]:  # noqa: ASYNC110
        await asyncio.sleep(0.1)  # the test's own timeout is the limit


CLIENTS = 64


def asked_by(number: int) -> dict[str, Any]:
    """What one of many clients asks for; prompts and answers are of many lengths."""
    words = " ".join(f"word{at}" for at in range(number * 37 % 60))
    return {
        "messages": [{"role": "user", "content": f"Question {number}: {words} why?"}],
        "max_tokens": 3 + number * 13 % 30,
        "temperature": number % 3 / 2,
        "seed": number,
    }


async def test_64_clients_at_once_each_get_the_answer_that_they_would_have_alone(
    client: openai.AsyncOpenAI, api: str
) -> None:
    leaving = set(range(0, CLIENTS, 10))

    async def ask(number: int) -> str | None:
        if number in leaving:
            stream = await chat(client, **{**asked_by(number), "max_tokens": 500, "stream": True})
            for _ in range(1 + number % 4):
                await anext(aiter(stream))
            await stream.close()
            return None
        if number % 2:
            return (await streamed(client, **asked_by(number)))[0][0]
        return str((await chat(client, **asked_by(number))).choices[0].message.content)

    together = await asyncio.gather(*(ask(number) for number in range(CLIENTS)))
    while (await fetch_json(f"{api}/meshnet/status"))["gateway"]["active_generations"]:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    alone = [None if number in leaving else await ask(number) for number in range(CLIENTS)]
    assert together == alone


def installed(command: list[str], folder: Path) -> Path:
    """The folder, once the command has filled it; skips the test where that does not work."""
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        done = subprocess.run(command, cwd=partial, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            shutil.rmtree(partial)
            pytest.skip(f"{' '.join(command[:3])} did not work: {done.stderr.strip()[-300:]}")
        try:
            partial.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    return folder


def test_the_npm_client(api: str) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    folder = default_cache_dir() / "tests" / f"npm-openai-{NPM_OPENAI}"
    command = [npm, "install", "--no-audit", "--no-fund", f"openai@{NPM_OPENAI}"]
    installed(command, folder)
    script = shutil.copy(Path(__file__).with_name("openai_client.mjs"), folder)
    environment = {**os.environ, "MESHNET_API": api, "MESHNET_MODEL": MODEL}
    done = subprocess.run([node, script], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.stdout.splitlines()[-1:] == ["all"], f"{done.stdout}\n{done.stderr}"


def others() -> Path:
    """A folder with litellm, llm and anthropic, apart from this project's packages, whose pins they would move."""
    name = "-".join(other.replace("==", "-") for other in OTHERS)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", "packages", *OTHERS]
    return installed(command, default_cache_dir() / "tests" / f"clients-{name}-{version}") / "packages"


def run_python(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(others()), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_litellm(api: str) -> None:
    script = (
        "import sys, litellm\n"
        "answer = litellm.completion(model=f'openai/{sys.argv[2]}', api_base=sys.argv[1], api_key='none',\n"
        "    temperature=0, max_tokens=8, messages=[{'role': 'user', 'content': 'Why is the sky blue?'}])\n"
        "print(answer.choices[0].message.content)"
    )
    assert run_python(["-c", script, api, MODEL])


def test_llm(api: str, tmp_path: Path) -> None:
    entry = {"model_id": "mesh", "model_name": MODEL, "api_base": api}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    arguments = ["-m", "llm", "-m", "mesh", "Why is the sky blue?", "-o", "max_tokens", "8", "--no-log"]
    assert run_python(arguments, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none")
    assert run_python([*arguments, "--no-stream"], LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none")


def test_anthropics_client(api: str) -> None:
    script = (
        "import sys, anthropic\n"
        "client = anthropic.Anthropic(base_url=sys.argv[1], api_key='none', max_retries=0)\n"
        "fields = dict(model=sys.argv[2], max_tokens=8, extra_body={'temperature': 0}, system='Be brief.',\n"
        "    messages=[{'role': 'user', 'content': 'Why is the sky blue?'}])\n"
        "whole = client.messages.create(**fields)\n"
        "with client.messages.stream(**fields) as stream:\n"
        "    text = ''.join(stream.text_stream)\n"
        "    final = stream.get_final_message()\n"
        "assert text == whole.content[0].text == final.content[0].text, (text, whole, final)\n"
        "assert whole.stop_reason == final.stop_reason == 'max_tokens'\n"
        "assert whole.usage.output_tokens == final.usage.output_tokens == 8\n"
        "print(text)"
    )
    assert run_python(["-c", script, api.removesuffix("/v1"), MODEL])
