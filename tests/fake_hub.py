"""A stand-in for huggingface.co on loopback: the few routes that the hub client uses to list and fetch one repository.

Serves the files of a folder as ``org/tiny``, ranges of them too, and records which were fetched and from where on. It
can be told to break a connection in mid-file, to refuse, or to send other bytes than it told of.
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
    """What was asked for, and what goes wrong.

    Attributes:
        url: where it listens.
        fetched: names of files, for each body that was asked for.
        starts: (file, first byte) of each of them.
        cuts: bytes of body after which the connection breaks, for the next bodies of weights, one after the other.
        refuses: status and ``X-Error-Code`` for weights.
        damaged: whether the last byte of weights is another one.
    """

    url: str
    fetched: list[str] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    refuses: tuple[int, str] | None = None
    damaged: bool = False


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
        hub, data = self.server.hub, (self.server.folder / name).read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        is_weights = name.endswith(".safetensors")
        if is_weights and hub.refuses is not None:
            return self._send(hub.refuses[0], b"", {"X-Error-Code": hub.refuses[1]}, body=body)
        if not body:
            return self._send(200, data, headers, body=False)
        if is_weights and hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        hub.fetched.append(name)
        hub.starts.append((name, start))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = hub.cuts.pop(0) if is_weights and hub.cuts else None
        return self._send(206 if start else 200, data[start:], headers, cut=cut)

    def _send_json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
            self.close_connection = cut is not None

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
