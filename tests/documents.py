"""The commands that README and docs tell people to type.

Fenced blocks of `sh` and `console` are read: comments are left out, lines that end in a backslash are put together, and
of a `console` block the lines after `$ `. Blocks of another language, and indented text, show what a program says.
"""

from __future__ import annotations

import re
import shlex
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
    for found in _FENCE.finditer(page.read_text(encoding="utf-8")):
        lines = [line.strip() for line in found["body"].replace("\\\n", " ").splitlines()]
        if found["language"] == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        elif found["language"] != "sh":
            continue
        for line in lines:
            if line and not line.startswith("#"):
                yield Command(str(page.relative_to(ROOT)), line)


def blocks(page: Path, language: str) -> list[str]:
    return [one["body"] for one in _FENCE.finditer(page.read_text(encoding="utf-8")) if one["language"] == language]


def spans(page: Path) -> Iterator[Command]:
    """What stands in the text as code and begins with `meshnet`; may be no whole command."""
    return spans_of(str(page.relative_to(ROOT)), _FENCE.sub("", page.read_text(encoding="utf-8")))


def spans_of(page: str, text: str) -> Iterator[Command]:
    for found in _SPAN.finditer(text):
        yield Command(page, " ".join(found[1].split()))


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


def sections(page: Path) -> dict[str, list[str]]:
    """The `sh` blocks of ``page`` by the heading of second level that they stand under."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        found[title] = [one["body"] for one in _FENCE.finditer(text) if one["language"] == "sh"]
    return found
