"""A stand-in for huggingface.co on loopback: the few routes that the hub client uses to list and fetch one repository.

Serves the files of a folder as ``org/tiny`` and records which were fetched.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HUB_ID, COMMIT = "org/tiny", "c" * 40


@dataclass
class FakeHub:
    url: str
    fetched: list[str] = field(default_factory=list)


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.hub = FakeHub(f"http://127.0.0.1:{self.server_port}")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path, files = self.path.split("?")[0], sorted(self.server.folder.iterdir())
        if path.startswith(f"/{HUB_ID}/resolve/{COMMIT}/"):
            self._answer_file(path.rsplit("/", 1)[1], body=body)
        elif path.startswith(f"/api/models/{HUB_ID}/tree/"):
            self._send_json([_row(file, "path") | {"type": "file"} for file in files])
        elif path.startswith(f"/api/models/{HUB_ID}"):
            siblings = [_row(file, "rfilename") for file in files]
            self._send_json({"id": HUB_ID, "modelId": HUB_ID, "sha": COMMIT, "siblings": siblings})
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _answer_file(self, name: str, *, body: bool) -> None:
        if not (self.server.folder / name).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if body:
            self.server.hub.fetched.append(name)
        data = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(200, data, headers, body=body)

    def _send_json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        pass


@contextmanager
def serve(folder: Path) -> Iterator[FakeHub]:
    """Serve until the block ends; a free port is taken."""
    with _Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.hub
        finally:
            server.shutdown()
            thread.join()


def _row(file: Path, key: str) -> dict[str, object]:
    data = file.read_bytes()
    row: dict[str, object] = {key: file.name, "size": len(data), "oid": "0" * 40, "blobId": "0" * 40}
    if file.suffix == ".safetensors":
        row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "oid": "1", "size": len(data), "pointerSize": 1}
    return row
