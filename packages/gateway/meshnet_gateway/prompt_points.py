"""Where in a prompt others may begin or have ended, found by rendering less of it and comparing token ids. Pure.

    [ system prompt, how a question begins | the first question | answer | the last question | how an answer begins ]
                                           ^ instructions       ^ the question before        ^ the question

Templates render the past otherwise than it was made: they drop thinking, or begin an answer with it. Renderings are
compared token by token, so a point is never beyond what both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from meshnet_core.errors import RequestRefusedError
from meshnet_gateway.prefix_reuse import BLOCK, PrefixWish

Messages = Sequence[Mapping[str, Any]]


class Render(Protocol):
    """Token ids of messages, as far as they go or, ``to_answer``, up to where an answer begins."""

    def __call__(self, part: Messages, *, to_answer: bool = False) -> tuple[int, ...]: ...


def chat_wish(scope: str, messages: Messages, ids: Sequence[int], render: Render) -> PrefixWish:
    """What a conversation may take and leave.

    Args:
        scope: whose it is.
        messages: the conversation, its last message a question.
        ids: its token ids, up to where the answer begins.
        render: as they were made.
    """

    def shared(part: Messages) -> int:
        """How many of ``ids`` are those of ``part``; 0 where the template does not take it."""
        try:
            other = render(part)
        except RequestRefusedError:
            return 0
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False)))

    instructions = list(takewhile(lambda message: message.get("role") in ("system", "developer"), messages))
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    keep_at = {shared([*instructions, {"role": "user", "content": "?"}]), shared(messages)}
    look_at = {shared(messages[: answers[-1]])} if answers else set()
    return PrefixWish(scope, tuple(sorted(keep_at - {0})), tuple(sorted(look_at - {0})))


def text_wish(scope: str, ids: Sequence[int]) -> PrefixWish:
    """What a plain text may take and leave: nothing tells where others may part from it, so its last whole block."""
    end = (len(ids) - 1) // BLOCK * BLOCK
    return PrefixWish(scope, (end,) if end else ())
