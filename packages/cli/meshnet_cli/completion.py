"""What the shell offers when Tab is pressed for a model. Typer's `--install-completion` does the rest."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import typer

from meshnet_core.errors import MeshnetError

DEMO = "smollm2"
PATIENCE_S = 1.0


def complete_model(incomplete: str) -> list[str]:
    """Models to load: the demo's, folders with a config.json, GGUF files, and folders that may hold some."""
    typed = Path(incomplete).expanduser()
    parent = typed if incomplete.endswith("/") else typed.parent
    found = [DEMO] if DEMO.startswith(incomplete) else []
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            shown = f"{incomplete.rpartition('/')[0]}/{path.name}" if "/" in incomplete else path.name
            if shown.startswith(incomplete) and not path.name.startswith("."):
                if path.is_dir():
                    found.append(shown if (path / "config.json").exists() else f"{shown}/")
                elif path.suffix == ".gguf":
                    found.append(shown)
    return found


def complete_served(context: typer.Context, incomplete: str) -> list[str]:
    """Models that the gateway serves; none where it does not answer at once."""
    from meshnet_cli import options
    from meshnet_cli.chat_stream import Gateway

    async def names() -> list[str]:
        async with asyncio.timeout(PATIENCE_S), Gateway(url, context.params.get("api_key")) as gateway:
            return await gateway.models()

    url = context.params.get("url") or options.DEFAULT_API_URL
    try:
        return [name for name in asyncio.run(names()) if name.startswith(incomplete)]
    except (MeshnetError, TimeoutError):
        return []
