"""Options from the environment and from one TOML file: over click's default map, for all commands at once.

A flag goes before a variable, a variable before the file, the file before the default. Each option has a variable,
MESHNET_COMMAND_OPTION; those of `SHARED` mean the same in every command and have MESHNET_OPTION as well, which gives
way to the former. In the file a table is a command, and [all] is every command that has such an option:

    [all]
    tracker = "https://10.0.0.5:7400"

    [node]
    max-sessions = 4

Knows no command by name. The processes of `meshnet up` take no settings: their parent has told them all.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from meshnet_cli import complaint, lifeline, variables
from meshnet_cli.setting_value import check_kind, words
from meshnet_core.errors import InvalidInputError

SHARED = frozenset(
    {"tracker", "url", "mesh", "insecure", "dtype", "quantize", "compile", "device", "threads", "cache-bytes"}
    | {"max-sessions", "session-ttl", "prefix-reuse", "recovery", "speculate", "step-deadline", "traces", "wire"}
)
EVERYWHERE = "all"
_NO_SETTING = {"help", "json", "api-key"}  # keys have a variable of their own; see `access`


@dataclass(frozen=True)
class Setting:
    """One option of one command.

    Attributes:
        path: names of the command and of the groups that it is in, outermost first.
        owner: the command, click's.
        key: the option's name without its dashes.
        option: click's.
    """

    path: tuple[str, ...]
    owner: Any
    key: str
    option: Any

    @property
    def command(self) -> str:
        """Such as ``node`` or ``mesh-create``; a table of the file."""
        return "-".join(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that set it, the one that counts more first."""
        shared = (self.key,) if self.key in SHARED else ()
        return tuple(f"MESHNET_{name.replace('-', '_').upper()}" for name in (f"{self.command}-{self.key}", *shared))


class ConfiguredGroup(TyperGroup):
    """The root of a command line whose options come from variables and a file too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not _told_all():
            for setting in settings_of(self):
                setting.option.envvar = list(setting.names) if len(setting.names) > 1 else setting.names[0]

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for, with the file's values as its defaults."""
        if not _told_all():
            try:
                ctx.default_map = defaults_from_file(self)
            except InvalidInputError as error:
                ctx.default_map = _Refusal(error)
        return super().invoke(ctx)


class _Refusal(dict[str, Any]):
    """Stands for a file that is wrong: no command runs with it, but the one that tells what is wrong."""

    def __init__(self, error: InvalidInputError) -> None:
        super().__init__()
        self._error = error

    def get(self, name: str, default: Any = None) -> Any:
        if name == "doctor":
            return default
        raise self._error


def settings_of(group: Any, above: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Every option of a click group's commands, those of groups in it too, that can be set elsewhere."""
    for name, command in group.commands.items():
        path = (*above, name)
        if hasattr(command, "commands"):
            yield from settings_of(command, path)
        elif not command.hidden:
            for option in command.params:
                key = max(option.opts, key=len).removeprefix("--")
                if option.param_type_name == "option" and key not in _NO_SETTING:
                    yield Setting(path, command, key, option)


def usual_path() -> Path:
    """Where the file is, unless MESHNET_CONFIG names another: beside the mesh's folder."""
    from meshnet_core.mesh_folder import default_path

    return default_path().parent / "config.toml"


def config_path() -> Path | None:
    """The settings' file; None where there is none.

    Raises:
        InvalidInputError: the one that MESHNET_CONFIG names is not there.
    """
    named = os.environ.get(variables.CONFIG)
    path = Path(named).expanduser() if named else usual_path()
    if path.is_file():
        return path
    if named:
        raise InvalidInputError(f"{variables.CONFIG}={named} is no file; make it, or unset the variable")
    return None


def read_file(path: Path | None) -> dict[str, Any]:
    """What a settings' file says, unchecked.

    Raises:
        InvalidInputError: it cannot be read, or is no TOML.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInputError(f"the settings in {path} cannot be read: {error}; correct the file") from error


def defaults_from_file(group: Any) -> dict[str, Any]:
    """As `defaults_of`, of the settings' file; its errors name it."""
    path = config_path()
    document = read_file(path)
    try:
        return defaults_of(group, document)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.message}") from error


def defaults_of(group: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    """Click's default map, ``{command: {parameter: value}}``, of what a settings' file says.

    Raises:
        InvalidInputError: a table is of no command, a key is no option of it, or a value cannot be one of it.
    """
    known = list(settings_of(group))
    _check(document, known)
    found: dict[str, Any] = {}
    for setting in known:
        tables = [document[name] for name in (setting.command, EVERYWHERE) if setting.key in document.get(name, {})]
        if tables:
            value = tables[0][setting.key]
            if setting.option.multiple and not isinstance(value, list):
                value = [value]
            _check_value(setting, value)
            table = found
            for name in setting.path:
                table = table.setdefault(name, {})
            table[setting.option.name] = value
    return found


def _check(document: Mapping[str, Any], known: list[Setting]) -> None:
    tables: dict[str, set[str]] = {EVERYWHERE: set(SHARED)}
    for setting in known:
        tables.setdefault(setting.command, set()).add(setting.key)
    for table, values in document.items():
        if not isinstance(values, dict):
            raise InvalidInputError(f"{table!r} is in no table; write it below [{EVERYWHERE}] or [COMMAND]")
        if table not in tables:
            raise InvalidInputError(f"[{table}] is no command{_meant(table, tables)}")
        for key in values:
            if key not in tables[table]:
                raise InvalidInputError(f"[{table}] has no option {key!r}{_meant(key, tables[table])}")


def _check_value(setting: Setting, value: Any) -> None:
    context = setting.owner.make_context(setting.command, [], resilient_parsing=True)
    try:
        meant = setting.option.process_value(context, value)
        check_kind(value, meant, switch=setting.option.is_flag)
    except (complaint.UsageError, InvalidInputError) as error:
        raise InvalidInputError(
            f"[{setting.command}] {setting.key} = {words(value)}: {complaint.plain_words(error.message)}"
        ) from error


def _meant(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {near[0]}?" if near else f"; there is {', '.join(sorted(known))}"


def _told_all() -> bool:
    return lifeline.VARIABLE in os.environ
