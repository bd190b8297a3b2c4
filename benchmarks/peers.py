"""Which peers can be measured here, and why the others cannot: llama.cpp's RPC servers, and language-pipes.

Neither is installed by `make bench`: `docs/benchmarks.md` tells how to get them. A peer that is not there is left out
and named with its reason, so that a table without it does not look like one that won.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.language_pipes import language_pipes_system
from benchmarks.llama_rpc import LlamaPrograms, llama_rpc_system
from benchmarks.models import PreparedModel
from benchmarks.openai_peer import openai_system
from benchmarks.systems import System

LLAMA_RPC, LANGUAGE_PIPES = "llama.cpp RPC", "language-pipes"
_SERVERS, _RPC_SERVERS = ("llama-server",), ("ggml-rpc-server", "rpc-server")


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Where peers are to be found.

    Attributes:
        llama_bin: folder with ``llama-server`` and ``ggml-rpc-server``; None looks on the path.
        pipes_python: the Python of an environment that has language-pipes; its two nodes are started then.
        pipes_url: base address of a running language-pipes' OpenAI API, such as ``http://127.0.0.1:8000/v1``.
        pipes_model: what it calls the model.
    """

    llama_bin: Path | None = None
    pipes_python: Path | None = None
    pipes_url: str | None = None
    pipes_model: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """One that is here; ``start`` starts it."""

    name: str
    start: Callable[[], AbstractAsyncContextManager[System]]


@dataclass(frozen=True, slots=True)
class Absent:
    """One that is not."""

    name: str
    reason: str


def found_peers(
    options: PeerOptions, prepared: PreparedModel, threads: int, which: Callable[[str], str | None] = shutil.which
) -> list[Peer | Absent]:
    """All peers, each as what can be started for this model or with the reason why not.

    Args:
        threads: of each of their processes.
        which: finds a program on the path.
    """
    return [_llama(options, prepared, threads, which), _pipes(options, prepared, threads)]


def _llama(
    options: PeerOptions, prepared: PreparedModel, threads: int, which: Callable[[str], str | None]
) -> Peer | Absent:
    gguf = prepared.gguf
    if gguf is None:
        return Absent(LLAMA_RPC, "it reads GGUF files, and this model is none")
    server, rpc = (_program(names, options.llama_bin, which) for names in (_SERVERS, _RPC_SERVERS))
    if server is None or rpc is None:
        lacking = " and ".join(names[0] for names, got in ((_SERVERS, server), (_RPC_SERVERS, rpc)) if got is None)
        where = "the path" if options.llama_bin is None else str(options.llama_bin)
        return Absent(LLAMA_RPC, f"no {lacking} in {where}; give --llama-bin DIR")
    return Peer(LLAMA_RPC, lambda: llama_rpc_system(LLAMA_RPC, LlamaPrograms(server, rpc), gguf, threads))


def _pipes(options: PeerOptions, prepared: PreparedModel, threads: int) -> Peer | Absent:
    url, python = options.pipes_url, options.pipes_python
    if python is not None:
        if prepared.texts is None:
            return Absent(LANGUAGE_PIPES, "it reads text, and this model has no tokenizer")
        if not python.is_file():
            return Absent(LANGUAGE_PIPES, f"there is no {python}")
        return Peer(LANGUAGE_PIPES, lambda: language_pipes_system(LANGUAGE_PIPES, python, prepared, threads))
    if url is None:
        return Absent(LANGUAGE_PIPES, "give --language-pipes-python PATH, or --language-pipes URL of one that runs")
    model = options.pipes_model or prepared.name
    return Peer(LANGUAGE_PIPES, lambda: openai_system(LANGUAGE_PIPES, url, model))


def _program(names: tuple[str, ...], folder: Path | None, which: Callable[[str], str | None]) -> str | None:
    for name in names:
        if folder is None and (found := which(name)) is not None:
            return found
        if folder is not None and (folder / name).is_file():
            return str(folder / name)
    return None


def options_of(given: Mapping[str, str | None]) -> PeerOptions:
    """Of the command line's ``llama_bin``, ``language_pipes_python``, ``language_pipes`` and
    ``language_pipes_model``."""
    folder, python = given.get("llama_bin"), given.get("language_pipes_python")
    return PeerOptions(
        None if folder is None else Path(folder),
        None if python is None else Path(python),
        given.get("language_pipes"),
        given.get("language_pipes_model") or "",
    )
