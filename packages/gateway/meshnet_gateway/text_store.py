"""Text models of the mesh, fetched from the nodes that hold them and kept by fingerprint.

A gateway has no model files; the nodes do. Knows no tokenizer and no route: which nodes there are the mesh tells, what
the files mean is `TextModel`'s.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import aiohttp

from meshnet_core.coverage import ModelSummary
from meshnet_core.errors import HopUnreachableError, MeshnetError
from meshnet_core.membership import NodeInfo
from meshnet_core.text_file_names import TEXT_FILE_NAMES
from meshnet_gateway.text_model import TextModel

MAX_TEXT_BYTES = 192 * 1024 * 1024  # of one answer; the largest tokenizers have 35 MB, a third more as base64
KEPT = 16  # text models; each takes some tens of MB
_TIMEOUT = aiohttp.ClientTimeout(total=60, connect=5)

logger = logging.getLogger(__name__)


class Holders(Protocol):
    """Who holds which model; `meshnet_gateway.mesh.Mesh` is one."""

    async def model(self, name: str) -> ModelSummary: ...

    async def nodes_of(self, model: ModelSummary) -> Sequence[NodeInfo]: ...


class TextStore:
    """Gives the `TextModel` of a model by name.

    Args:
        holders: asked on every call, so that a model whose contents changed gets its new tokenizer.
        session: HTTP client; whoever made it closes it.
    """

    def __init__(self, holders: Holders, session: aiohttp.ClientSession) -> None:
        self._holders = holders
        self._session = session
        self._models: dict[str, TextModel] = {}  # by fingerprint, least recently used first
        self._loading: dict[str, asyncio.Task[TextModel]] = {}

    async def get(self, name: str) -> TextModel:
        """The text model that is served as ``name``; its ``max_positions`` is what the nodes can hold.

        The first call for a model fetches and reads its files, which takes some seconds; later ones take none.

        Raises:
            ModelNotFoundError: no node serves it.
            TrackerUnreachableError: no tracker answers, nor ever did.
            HopUnreachableError: no node gives files that make a tokenizer.
        """
        summary = await self._holders.model(name)
        if (model := self._models.pop(summary.fingerprint, None)) is not None:
            self._models[summary.fingerprint] = model
        else:
            model = await self._loaded(summary)
        limit = min(summary.max_positions, model.max_positions or summary.max_positions)
        return replace(model, name=name, max_positions=limit)

    async def _loaded(self, summary: ModelSummary) -> TextModel:
        """Load once, however many ask for it meanwhile."""
        fingerprint = summary.fingerprint
        task = self._loading.get(fingerprint)
        if task is None:
            self._loading[fingerprint] = task = asyncio.create_task(self._load(summary))
            task.add_done_callback(lambda _: self._loading.pop(fingerprint, None))
        # Shielded: others may wait for it when the one that began it is cancelled.
        return await asyncio.shield(task)

    async def _load(self, summary: ModelSummary) -> TextModel:
        reasons = []
        for node in await self._holders.nodes_of(summary):
            try:
                body = await self._fetch(f"{node.url.rstrip('/')}/text/{summary.fingerprint}")
                model = await asyncio.to_thread(_read, summary.name, summary.fingerprint, body)
            except (MeshnetError, aiohttp.ClientError, TimeoutError, OSError) as error:
                reasons.append(f"{node.node_id}: {error or type(error).__name__}")
                logger.warning("no tokenizer of %s from %s", summary.name, reasons[-1])
                continue
            self._models[summary.fingerprint] = model
            while len(self._models) > KEPT:
                del self._models[next(iter(self._models))]
            return model
        raise HopUnreachableError(
            f"no node gives the tokenizer of {summary.name}: {'; '.join(reasons) or 'none holds it any more'}"
        )

    async def _fetch(self, url: str) -> bytes:
        async with self._session.get(url, timeout=_TIMEOUT, allow_redirects=False) as response:
            if response.status != 200:
                raise HopUnreachableError(f"{url} answers with status {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 20):
                body += chunk
                if len(body) > MAX_TEXT_BYTES:
                    raise HopUnreachableError(f"{url} sends more than {MAX_TEXT_BYTES} bytes, which no tokenizer has")
            return bytes(body)


def read_text_files(body: bytes) -> dict[str, bytes]:
    """Files by name from a node's answer, a JSON object of base64 strings.

    Raises:
        HopUnreachableError: if it is something else, or names a file that is none of a tokenizer's.
    """
    try:
        document = json.loads(body)
        files = {str(name): base64.b64decode(content, validate=True) for name, content in document.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HopUnreachableError(f"the answer is no JSON object of base64 strings: {error}") from error
    if strays := sorted(set(files).difference(TEXT_FILE_NAMES)):
        raise HopUnreachableError(f"it holds {strays[0][:80]!r}, which is none of the files of a tokenizer")
    return files


def _read(name: str, fingerprint: str, body: bytes) -> TextModel:
    return TextModel.from_files(name, fingerprint, read_text_files(body))
