"""What a person is told on stderr while an answer is on its way: how far the prompt is, and why nothing comes."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from meshnet_cli.chat_silence import reason_of, watched
from meshnet_cli.chat_stream import Ended, Prefill, Text, Thought
from meshnet_core.chat_sampling import CHAT_TOP_P
from meshnet_core.errors import MeshnetError

if TYPE_CHECKING:
    from meshnet_cli.chat import Message, Partner
    from meshnet_cli.chat_stream import Gateway


class ProgressLine:
    """One line of a terminal that goes when there is something else to say; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()
        self._there = False

    def show(self, text: str) -> None:
        if self._wanted:
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()
            self._there = True

    def clear(self) -> None:
        if self._there:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._there = False


async def answer_events(
    partner: Partner,
    messages: list[Message],
    line: ProgressLine,
    mid_line: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Thought | Text | Ended]:
    """An answer as it comes.

    Args:
        line: shows how far a long prompt is. Whoever shows something else where it is clears it; at the end it is gone.
        mid_line: whether the terminal's last line is one that was not ended.

    Raises:
        CommandFailedError: as `Gateway.chat`.
    """
    async with partner.gateway as gateway:

        async def tell_why() -> None:
            if (reason := await reason_for(gateway, partner.model)) is not None:
                line.clear()
                sys.stderr.write("\n" * mid_line() + f"nothing yet: {reason}\n")
                sys.stderr.flush()

        asked = gateway.chat(partner.model, messages, temperature=partner.temperature, top_p=CHAT_TOP_P)
        try:
            async with aclosing(watched(asked, tell_why)) as events:
                async for event in events:
                    match event:
                        case Prefill(done, total):
                            if done < total:
                                line.show(f"reading the prompt: {done} of {total} tokens")
                        case _:
                            yield event
        finally:
            line.clear()  # what went wrong is told where it is


async def reason_for(gateway: Gateway, model: str) -> str | None:
    """Why nothing comes; None where nobody knows."""
    try:
        return reason_of(await gateway.get("/meshnet/status"), model)
    except (
        MeshnetError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # a help, and no reason to end what may still come
        return None
