"""Meshes and machines in them, made on the spot: for tests of who is let in; and clients that are not to be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

from aiohttp import web

from meshnet_core import certificates
from meshnet_core.credentials import Credentials
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.mesh_folder import MeshFolder
from meshnet_core.secure_site import SecureSite


def new_mesh(path: Path, name: str = "home") -> MeshFolder:
    """A mesh, with machine ``first`` in it."""
    folder = MeshFolder(path)
    folder.create(name, "first")
    return folder


def machine_of(mesh: MeshFolder, path: Path, *, name: str = "other", ended: timedelta | None = None) -> MeshFolder:
    """One more machine of a mesh; with ``ended``, one whose certificate ended that long ago."""
    authority = mesh.authority()
    assert authority is not None
    key, now = certificates.new_key(), certificates.utc_now()
    if ended is not None:
        now -= ended + certificates.MACHINE_LIFETIME
    certificate = authority.sign(certificates.make_request(key, name), now)
    folder = MeshFolder(path)
    folder.store(authority.certificate_pem, certificate, key, ())
    return folder


@contextlib.asynccontextmanager
async def secured(
    app: web.Application, credentials: Credentials, doorkeeper: Doorkeeper, *, optional_client: bool = False
) -> AsyncIterator[int]:
    """Serve ``app`` on loopback over TLS; yields its port."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    try:
        await SecureSite(runner, sock, credentials.server_context(optional_client=optional_client), doorkeeper).start()
        yield int(sock.getsockname()[1])
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)


def without_certificate(mesh: MeshFolder) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(mesh.authority_path)
    return context


def believing_all(credentials: Credentials) -> ssl.SSLContext:
    """Shows what ``credentials`` show, and accepts whatever answers."""
    context = credentials.client_context()
    context.verify_mode = ssl.CERT_NONE
    return context
