"""Text models ready before the first request that needs them: reading one takes seconds, and the first most of all."""

from __future__ import annotations

import asyncio
import logging

from meshnet_core.errors import MeshnetError
from meshnet_gateway.ports import Mesh, TextModels
from meshnet_gateway.text_model import preload

logger = logging.getLogger(__name__)

EVERY_S = 2.0


async def keep_warm(mesh: Mesh, texts: TextModels, *, every_s: float = EVERY_S) -> None:
    """Every ``every_s`` seconds, get the text models of what has become whole since; runs until cancelled."""
    await asyncio.to_thread(preload)
    tried: set[tuple[str, str]] = set()
    while True:
        try:
            whole = {(model.name, model.fingerprint) for model in await mesh.models() if model.complete}
            tried &= whole  # one that comes back is tried again
            for name, fingerprint in sorted(whole - tried):
                tried.add((name, fingerprint))
                await texts.get(name)
                logger.info("%s is ready to be asked", name)
        except MeshnetError as error:
            # A request for it will meet the same error, and tell it to someone who can mend it.
            logger.info("no warm-up: %s", error)
        await asyncio.sleep(every_s)
