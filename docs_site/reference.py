"""Reference pages made from the code: the command line, the settings, the errors. Nothing here is written by hand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from meshnet_cli import settings, variables
from meshnet_cli.main import app
from meshnet_core.errors import ERRORS_BY_CODE, MissReason
from meshnet_core.remedies import MISSES, REMEDIES


def pages() -> dict[str, str]:
    """Each page's file name and text."""
    return {"cli.md": cli_page(), "configuration.md": configuration_page(), "errors.md": errors_page()}


def commands() -> dict[str, Any]:
    """Every command that is not hidden, by its full name such as ``mesh ticket``."""
    return dict(_walk("", _root()))


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if command.hidden:
        return
    if isinstance(inner := getattr(command, "commands", None), dict):
        for each, sub in inner.items():
            yield from _walk(f"{name} {each}".strip(), sub)
    else:
        yield name, command


def cli_page() -> str:
    lines = [
        "# The command line",
        "",
        "Made from the program. `meshnet COMMAND --help` says the same. Exit codes: 0 all went well,",
        "2 input that cannot be right, 1 any other failure.",
    ]
    for name, command in commands().items():
        context = command.make_context(f"meshnet {name}", [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [
            "",
            f"## meshnet {name}",
            "",
            inspect.cleandoc(command.help or ""),
            "",
            f"    meshnet {name} {usage}",
            "",
        ]
        lines += ["| option | what it does | default |", "| --- | --- | --- |"]
        lines += [_row(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)]
    return "\n".join(lines) + "\n"


def _row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        shown = f"`{parameter.display_name_raw}`"
    else:
        shown = ", ".join(f"`{one}`" for one in [*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            shown += f" `{parameter.metavar or parameter.display_type(context)}`"
    if getattr(parameter, "multiple", False):
        shown += " (may be repeated)"
    return f"| {_cell(shown)} | {_cell(parameter.help or '')} | {_cell(_default(parameter))} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = parameter.default
    if value is None or callable(value) or value in ((), []):
        return ""
    if isinstance(value, bool):
        if not value and not parameter.secondary_opts:
            return ""
        return f"`{(parameter.opts if value else parameter.secondary_opts)[0]}`"
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def configuration_page() -> str:
    lines = [
        "# Configuration",
        "",
        "Made from the program. A flag goes before a variable, a variable before the file, the file before the",
        "default; `meshnet config --all` shows every setting with its value and where that comes from.",
        "",
        "The file is `$MESHNET_CONFIG`, else `config.toml` in `$MESHNET_HOME`, else in `~/.config/meshnet`. A table is",
        "a command; `[all]` is every command that has the option. A name that is no option is an error, and so is",
        "a value of another kind.",
        "",
        "```toml",
        "[all]",
        'tracker = "https://10.0.0.5:7400"',
        "",
        "[node]",
        "max-sessions = 4",
        "```",
        "",
        "## Variables besides those of options",
        "",
        "| variable | what it is for |",
        "| --- | --- |",
        *(f"| `{name}` | {_cell(purpose)} |" for name, purpose in variables.FIXED.items()),
        "",
        "## Options of all commands that have them",
        "",
        "In `[all]`, and as a variable; a command's own table and variable go before.",
        "",
        "| option | variable |",
        "| --- | --- |",
        *(f"| `{key}` | `MESHNET_{key.replace('-', '_').upper()}` |" for key in sorted(settings.SHARED)),
        "",
        "## Options of each command",
        "",
        "| table | option | variable |",
        "| --- | --- | --- |",
        *(f"| `[{one.command}]` | `{one.key}` | `{one.names[0]}` |" for one in settings.settings_of(_root())),
    ]
    return "\n".join(lines) + "\n"


def _root() -> Any:
    return typer.main.get_command(app)


def errors_page() -> str:
    lines = [
        "# Errors and what to do",
        "",
        "Made from the program. Every error that meshnet raises on purpose has a code; a gateway puts it into the",
        "`code` of an OpenAI-style error object, trackers and nodes into `error.code` of theirs.",
        "",
        "| code | HTTP | when | what to do |",
        "| --- | --- | --- | --- |",
    ]
    for code, cls in sorted(ERRORS_BY_CODE.items(), key=lambda item: (item[1].http_status, item[0])):
        lines.append(
            f"| `{code}` | {cls.http_status} | {_cell(REMEDIES[code].when)} | {_cell(REMEDIES[code].remedy)} |"
        )
    lines += [
        "",
        "## Why a node had no state",
        "",
        "Said with `cache_miss`, in logs, in an answer's `meshnet.recoveries` and in the counters of misses. The",
        "gateway mends each by itself: it prefills the prompt and the answer so far again, and the stream goes on.",
        "What is to be done is for when a reason shows often.",
        "",
        "| reason | when | if it is frequent |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| `{reason.value}` | {_cell(MISSES[reason].when)} | {_cell(MISSES[reason].remedy)} |" for reason in MissReason
    ]
    return "\n".join(lines) + "\n"
