"""How the command line shows what went wrong: one or two lines with the remedy, and an exit code. Never a traceback,
unless MESHNET_DEBUG=1 asks for it.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, cast

import typer

from meshnet_core.errors import (
    InvalidInputError,
    MeshnetError,
    ModelNotFoundError,
    RequestRefusedError,
    UnsupportedModelError,
)

FAILURE = 1
BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_INPUT_ERRORS = (InvalidInputError, RequestRefusedError, ModelNotFoundError, UnsupportedModelError)


_OF_NODES = frozenset({"gguf", "psutil", "safetensors", "torch"})  # the extra `node` of pyproject.toml
MORE_MEMORY = "Hold fewer layers here (--layers), or in 16 bits (--dtype bfloat16), or free memory."


class CommandFailedError(MeshnetError):
    """A command could not do its work on this machine. Said to the person who typed it; never travels."""


# Typer re-exports only this leaf of click's tree of usage errors; the root is the same in all versions.
UsageError = cast("type[Any]", typer.BadParameter.__mro__[1])


_ENV_VARS = re.compile(r"\(env var: '\[(.*?)\]'\)")


def run(command: Any, arguments: list[str] | None = None) -> int:
    """Run a typer command; returns the exit code, having shown on stderr what went wrong."""
    try:
        code = command.main(args=arguments, prog_name="meshnet", standalone_mode=False)
    except UsageError as error:
        return _show_usage(error)
    except MeshnetError as error:
        if debugging():
            raise
        say(error.message)
        return exit_code(error)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush does not fail too
        return FAILURE
    except Exception as error:
        if debugging():
            raise
        say(_unexpected(error))
        return FAILURE
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception) -> str:
    if is_out_of_memory(error):
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"memory ran out ({reason[:200]})\n{MORE_MEMORY}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _OF_NODES:
        return f"this needs {error.name}, which nodes need and which is not installed here: pip install 'meshnet[node]'"
    return f"unexpected {type(error).__name__}: {error}\nThis is a bug; MESHNET_DEBUG=1 shows where it happened."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had: Python's error, torch's of a GPU, or that of its allocator for the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def exit_code(error: MeshnetError) -> int:
    """2 for what the caller could have typed right, 1 for the rest."""
    return BAD_INPUT if isinstance(error, _INPUT_ERRORS) else FAILURE


def say(message: str) -> None:
    """Show one message on stderr."""
    sys.stderr.write(f"meshnet: {message.rstrip()}\n")
    sys.stderr.flush()


def debugging() -> bool:
    return os.environ.get("MESHNET_DEBUG", "") not in {"", "0"}


def _show_usage(error: Any) -> int:
    message = error.format_message()
    if not message:  # bare `meshnet`: the help has been printed
        return int(error.exit_code)
    command = error.ctx.command_path if error.ctx is not None else "meshnet"
    sys.stderr.write(f"{command}: {plain_words(message)}\nTry: {command} --help\n")
    return BAD_INPUT


def plain_words(message: str) -> str:
    """A usage error's message without what only programmers read: a list of variables as Python writes it, and the
    kind of an exception."""
    message = _ENV_VARS.sub(lambda found: f"(env var: {found[1].replace(', ', ' or ')})", message)
    return message.replace("Value error, ", "")
