"""The commands that README and docs tell people to type.

Fenced blocks of `sh` and `console` are read: comments are left out, lines that end in a backslash are put together, and
of a `console` block the lines after `$ `. Blocks of another language, and indented text, show what a program says.
"""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer

from meshnet_cli.main import app

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])  # typer re-exports only this leaf of its tree
_SPAN = re.compile(r"`(meshnet [a-z][^`]*)`", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One line to type: ``words`` as a shell splits them, without what is set before it and where its
    output goes."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        words = shlex.split(self.text, comments=True)
        ends = [index for index, word in enumerate(words) if re.fullmatch(r"[|&;]+|\d*[<>].*", word)]
        words = words[: min(ends, default=len(words))]
        while words and re.match(r"^[A-Z_]+=", words[0]):
            words = words[1:]
        return words

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "ARCHITECTURE.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def commands(page: Path) -> Iterator[Command]:
    """Those of the fenced blocks of ``page``, in order."""
    for block in typed_blocks(page.read_text(encoding="utf-8")):
        yield from (Command(str(page.relative_to(ROOT)), line) for line in block.commands)


@dataclass(frozen=True)
class TypedBlock:
    """A fenced block of `sh`, or of `console`, where what is typed comes after `$ ` and what is said stands below."""

    body: str
    console: bool

    @property
    def lines(self) -> list[str]:
        """What is to be typed, comments among it."""
        lines = [line.strip() for line in self.body.replace("\\\n", " ").splitlines()]
        if self.console:
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line]

    @property
    def commands(self) -> list[str]:
        return [line for line in self.lines if not line.startswith("#")]

    def said(self, line: str) -> str:
        """What stands below ``line``; empty where that is nothing."""
        if not self.console:
            return ""
        lines = textwrap.dedent(self.body).splitlines()
        below = itertools.takewhile(lambda one: not one.startswith("$ "), lines[lines.index(f"$ {line}") + 1 :])
        return "\n".join(below).strip()


def typed_blocks(text: str) -> list[TypedBlock]:
    """Those of a page, or of a part of one, in order."""
    return [
        TypedBlock(one["body"], one["language"] == "console")
        for one in _FENCE.finditer(text)
        if one["language"] in {"sh", "console"}
    ]


def blocks(page: Path, language: str) -> list[str]:
    return [one["body"] for one in _FENCE.finditer(page.read_text(encoding="utf-8")) if one["language"] == language]


def spans(page: Path) -> Iterator[Command]:
    """What stands in the text as code and begins with `meshnet`; may be no whole command."""
    return spans_of(str(page.relative_to(ROOT)), _FENCE.sub("", page.read_text(encoding="utf-8")))


def spans_of(page: str, text: str) -> Iterator[Command]:
    for found in _SPAN.finditer(text):
        yield Command(page, " ".join(found[1].split()))


def bare(line: str) -> str:
    """A line without its remark, and without the `&` that leaves it running."""
    return re.sub(r"(\s+&)?(\s+#.*)?$", "", line)


class NotTakenError(Exception):
    """The program would refuse a command."""


def parsed(command: Command) -> str:
    """The name of the subcommand that the program takes ``command`` for; nothing of it is run.

    Raises:
        NotTakenError: it knows no such command or option, or lacks an argument.
    """
    here: Any = typer.main.get_command(app)
    context = here.make_context("meshnet", [], resilient_parsing=True)
    words, names = command.words[1:], []
    while isinstance(inner := getattr(here, "commands", None), dict):
        if words in (["--version"], ["--help"]):
            return ""
        if not words or words[0] not in inner:
            raise NotTakenError(f"{command}: no such command")
        names.append(words[0])
        here, words = inner[words[0]], words[1:]
    if words and words[-1] in {"--help", "-h"}:
        return " ".join(names)
    try:
        here.make_context(names[-1], words, parent=context)
    except _UsageError as error:
        raise NotTakenError(f"{command}: {error}") from error
    return " ".join(names)


def sections(page: Path) -> dict[str, list[TypedBlock]]:
    """What ``page`` tells to type, by the heading of second level that it stands under."""
    found: dict[str, list[TypedBlock]] = {}
    for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        found[title] = typed_blocks(text)
    return found
