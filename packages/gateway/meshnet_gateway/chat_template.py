"""What a chat template tells of its model when it is read: the variables it takes, tool calls, reasoning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshnet_gateway.answer_parts import THINK, THOUGHT
from meshnet_gateway.tool_format import ToolFormat, format_of


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Traits of one model's template.

    Attributes:
        variables: names that it reads, ``messages`` among them.
        tools: how it tells its model to write tool calls; None where it knows no tools, or writes them in a way that is
            not known here.
        thinks: whether answers may begin with reasoning in ``<think>`` tags.
    """

    variables: frozenset[str] = frozenset()
    tools: ToolFormat | None = None
    thinks: bool = False

    @classmethod
    def of(cls, template: Any, vocabulary: Collection[str]) -> TemplateTraits:
        """Traits of a template, or of several by name, and of a vocabulary that may have the tags as tokens."""
        texts = list(template.values()) if isinstance(template, dict) else [template]
        text = "\n".join(part for part in texts if isinstance(part, str))
        variables: set[str] = set()
        for part in texts:
            variables |= _variables(part) if isinstance(part, str) else set()
        tools = format_of(text) if "tools" in variables else None
        thinks = THOUGHT in text or (THINK in vocabulary and THOUGHT in vocabulary)
        return cls(frozenset(variables), tools, thinks)


def _variables(template: str) -> set[str]:
    # transformers adds this extension's tag; the environment only parses here, and runs nothing.
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return set(find_undeclared_variables(environment.parse(template)))
    except TemplateError:  # a tag that only transformers knows; what the text names may be read
        return {word for word in ("messages", "tools", "enable_thinking", "reasoning_effort") if word in template}
