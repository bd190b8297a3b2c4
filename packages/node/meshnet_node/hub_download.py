"""One weight file of a hub repository into the hub client's own cache, going on where an earlier try broke off.

The client itself goes on after a broken connection only while its process lives, and deletes what it had when it
gives up; a shard has gigabytes. So what arrived is kept beside the cache's blobs, and the rest is asked for with a
range. What is whole is checked against the hub's hash and becomes the blob, under the client's own lock; the client
then links the snapshot to it. Knows no layers.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils._fixes import WeakFileLock
from huggingface_hub.utils._headers import build_hf_headers

from meshnet_core.errors import InvalidInputError, MeshnetError, ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

PARTIAL = ".meshnet-partial"  # a name that the hub client neither uses nor cleans up
_ROOM_LEFT = 64 * 2**20  # bytes that the disk keeps, for whatever else writes there
_READ = 4 * 2**20
_SHA256_DIGITS = 64
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM}


@dataclass(frozen=True)
class HubFile:
    """One weight file.

    Attributes:
        repository, commit, name: which.
        hash: what the hub tells of its contents: a sha256, or another id that is not checked.
        size: bytes; None where the hub did not tell.
    """

    repository: str
    commit: str
    name: str
    hash: str
    size: int | None = None

    @property
    def folder(self) -> Path:
        """The repository's in the hub client's cache."""
        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.repository, repo_type="model")


def check_room(files: list[HubFile]) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        InvalidInputError: says how much is needed and where.
    """
    needed = sum(max(0, (file.size or 0) - partial_bytes(file)) for file in files)
    cache = Path(constants.HF_HUB_CACHE)
    place = next((folder for folder in (cache, *cache.parents) if folder.is_dir()), None)
    if place is not None and needed and (free := shutil.disk_usage(place).free) < needed + _ROOM_LEFT:
        raise InvalidInputError(_no_room(f"needs {_size(needed)}, and {_size(free)} are free"))


def partial_bytes(file: HubFile) -> int:
    """How much of a file an earlier try has left."""
    kept = file.folder / "blobs" / f"{file.hash}{PARTIAL}"
    return kept.stat().st_size if kept.is_file() else 0


def fetch(file: HubFile, on_bytes: Callable[[int], None]) -> None:
    """Make sure that the cache has the file's blob.

    Args:
        file: which.
        on_bytes: told how many bytes of it are here, counted from its beginning.

    Raises:
        ModelNotFoundError: no access, a connection that broke for good (what came is kept), or contents that are not
            what the hub told of them.
        InvalidInputError: the disk is full, or the cache cannot be written to.
    """
    try:
        _fetch(file, hf_hub_url(file.repository, file.name, revision=file.commit), on_bytes)
    except MeshnetError:
        raise
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise ModelNotFoundError(
            f"the hub gives no access to {file.name} of {file.repository}; log in with `hf auth login`"
        ) from error
    except HfHubHTTPError as error:
        raise ModelNotFoundError(f"the hub refused {file.name} of {file.repository}: {error}") from error
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            raise InvalidInputError(_no_room(str(error.strerror or error))) from error
        raise _broken_off(file, error) from error
    except Exception as error:  # the hub client raises whatever its HTTP library does
        raise _broken_off(file, error) from error


def _fetch(file: HubFile, url: str, on_bytes: Callable[[int], None]) -> None:
    told = get_hf_file_metadata(url)
    if told.etag is None:
        raise ModelNotFoundError(f"the hub tells no etag of {file.name} of {file.repository}")
    blobs = file.folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    lock = file.folder.parent / ".locks" / file.folder.name / f"{told.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        blob = blobs / told.etag
        if not blob.exists():
            partial = blobs / f"{file.hash}{PARTIAL}"
            _download(url, partial, told.size, on_bytes)
            _check(file, partial)
            partial.replace(blob)


def _download(url: str, partial: Path, size: int | None, on_bytes: Callable[[int], None]) -> None:
    kept = partial.stat().st_size if partial.is_file() else 0
    if size is not None and kept > size:
        partial.unlink()
        kept = 0
    on_bytes(kept)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # a range is one of the bytes themselves
    with partial.open("ab") as target:
        http_get(url, target, resume_size=kept, headers=headers, expected_size=size, tqdm_class=_bar(kept, on_bytes))


def _check(file: HubFile, path: Path) -> None:
    if len(file.hash) != _SHA256_DIGITS:
        return
    digest = hashlib.sha256()
    with path.open("rb") as whole:
        while block := whole.read(_READ):
            digest.update(block)
    if digest.hexdigest() != file.hash:
        path.unlink()  # going on from it would never come out right
        raise ModelNotFoundError(f"{file.name} of {file.repository} arrived damaged, and is thrown away; start again")


def _bar(at: int, on_bytes: Callable[[int], None]) -> type[Any]:
    """What the hub client takes for the class of a progress bar; it draws nothing and tells ``on_bytes``."""

    class Bar:
        def __init__(self, *_: object, **__: object) -> None:
            self._at = at

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was opened."""

        def update(self, nbytes: float) -> None:
            self._at += int(nbytes)
            on_bytes(self._at)

    return Bar


def _broken_off(file: HubFile, error: Exception) -> ModelNotFoundError:
    kept = partial_bytes(file)
    of = "" if file.size is None else f" of {_size(file.size)}"
    return ModelNotFoundError(
        f"fetching {file.name} of {file.repository} broke off at {_size(kept)}{of}: {error}; "
        "start again, and it goes on from there"
    )


def _no_room(why: str) -> str:
    return (
        f"cannot download to {constants.HF_HUB_CACHE}: {why}; make room, or set HF_HOME to a folder on a larger disk "
        "that can be written to"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
