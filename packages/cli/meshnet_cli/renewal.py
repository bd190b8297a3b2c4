"""Keeps this machine's certificate from ending while it is in use, and takes up one that another process renewed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

from meshnet_cli.trust import Identity
from meshnet_core.errors import MeshnetError

LOOK_EVERY_S = 6 * 3600.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def keeping_renewed(identity: Identity | None) -> AsyncIterator[None]:
    """Look after the certificate while the block runs."""
    if identity is None:
        yield
        return
    task = asyncio.create_task(_keep(identity), name="renewal")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _keep(identity: Identity) -> None:
    from meshnet_core import certificates

    in_use = identity.folder.certificate_path.read_bytes()
    while True:
        try:
            await renew(identity, certificates.utc_now())
            now_there = identity.folder.certificate_path.read_bytes()
            if now_there != in_use:
                identity.credentials.reload()
                in_use = now_there
                logger.info("this machine's certificate is renewed, until %s", certificates.expires_at(in_use).date())
        except (MeshnetError, OSError) as error:
            logger.warning(
                "this machine's certificate ends on %s and could not be renewed: %s",
                certificates.expires_at(in_use).date(), error,
            )  # fmt: skip
        await asyncio.sleep(LOOK_EVERY_S)


async def renew(identity: Identity, now: datetime) -> bool:
    """Renew the certificate in the folder if that is due; whether it was.

    Raises:
        MeshnetError: it is due, and nobody who can sign answers.
    """
    from meshnet_core import certificates
    from meshnet_core.tracker_client import TrackerClient

    folder = identity.folder
    certificate = folder.certificate_path.read_bytes()
    if not certificates.is_due(certificate, now):
        return False
    request = certificates.make_request(folder.key_path.read_bytes(), certificates.common_name(certificate))
    if (authority := folder.authority()) is not None:
        folder.renew(authority.sign(request, now))
        return True
    failed: MeshnetError = MeshnetError("no tracker is known; join again with a new ticket")
    for url in folder.trackers():
        client = TrackerClient(url, tls=identity.credentials.client_context())
        try:
            folder.renew(await client.enroll(request))
        except MeshnetError as error:
            failed = error
        else:
            return True
        finally:
            await client.close()
    raise failed
