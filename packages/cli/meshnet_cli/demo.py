"""The demo: a real model cut in two answers a question, and what happened is told. `make demo` runs it."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import lifeline
from meshnet_cli.complaint import CommandFailedError, say
from meshnet_cli.happened import describe, session_on
from meshnet_cli.up import StoppedError, stop_on_signals
from meshnet_core.layer_range import LayerRange

if TYPE_CHECKING:
    from meshnet_cli.chat_stream import Ended

MODEL = "smollm2"
SPLITS = (LayerRange(0, 15), LayerRange(15, 30))


def demo(
    prompt: Annotated[str, typer.Option("--prompt", help="The question.")] = "Why is the sky blue?",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest answer.")] = 256,
) -> None:
    """Answer a question with SmolLM2, cut in two, and tell what happened."""
    lifeline.hold_on()
    stop_on_signals()
    try:
        _run(prompt, max_tokens)
    except StoppedError:
        say("stopped")


def _run(prompt: str, max_tokens: int) -> None:
    from meshnet_cli.child_progress import showing_children
    from meshnet_cli.local_mesh import LocalMesh, Plan, threads_each

    began = time.monotonic()
    plan = Plan(MODEL, SPLITS, threads=threads_each(len(SPLITS)))
    with LocalMesh(plan) as mesh:
        print(f"Starting a tracker, a gateway and {len(SPLITS)} nodes, layers {' and '.join(map(str, SPLITS))}.")
        sys.stdout.flush()
        with showing_children() as show:
            mesh.start(show)
        print(f"Ready after {time.monotonic() - began:.1f} s at {mesh.api_url}\n\n> {prompt}\n", flush=True)
        ended = asyncio.run(_answer(mesh.api_url, prompt, max_tokens))
        nodes = mesh.status()["nodes"]
        print("\n\n" + "\n".join(describe(ended.report, ended.finish_reason, nodes)), flush=True)
        unseen = [node["node"] for node in nodes if session_on(node, str(ended.report.get("session"))) is None]
        if unseen:
            raise CommandFailedError(
                f"the session was not seen by {', '.join(unseen)}, which holds layers of the model"
            )


async def _answer(url: str, prompt: str, max_tokens: int) -> Ended:
    """Stream the answer to stdout; returns what the gateway told at its end."""
    from meshnet_cli.chat_stream import Ended, Gateway, Prefill, Text

    async with Gateway(url) as gateway:
        model = (await gateway.models())[0]
        messages = [{"role": "user", "content": prompt}]
        async for event in gateway.chat(model, messages, max_tokens=max_tokens, temperature=0):
            match event:
                case Text(text):
                    sys.stdout.write(text)
                    sys.stdout.flush()
                case Ended():
                    return event
                case Prefill():
                    pass  # a short prompt is read at once
    raise CommandFailedError("the gateway ended the answer without saying so")


if __name__ == "__main__":
    from meshnet_cli.main import main

    main(["demo", *sys.argv[1:]])
