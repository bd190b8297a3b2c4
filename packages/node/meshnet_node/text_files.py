"""The files of a model folder that a gateway needs to turn text into token ids and back. Knows not what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshnet_core.errors import InvalidInputError
from meshnet_core.text_file_names import TEXT_FILE_NAMES

if TYPE_CHECKING:
    from pathlib import Path

# The largest tokenizers (262,144 pieces with merges) are about 35 MB as tokenizer.json.
MAX_TEXT_FILE_BYTES = 128 * 1024 * 1024


def read_text_files(folder: Path) -> dict[str, bytes]:
    """The whitelisted files that ``folder`` has, by name.

    Raises:
        InvalidInputError: one of them is larger than :data:`MAX_TEXT_FILE_BYTES`, so it cannot be what its name says.
    """
    found: dict[str, bytes] = {}
    for name in TEXT_FILE_NAMES:
        path = folder / name
        if not path.is_file():
            continue
        if (size := path.stat().st_size) > MAX_TEXT_FILE_BYTES:
            raise InvalidInputError(f"{path} has {size} bytes; a {name} has at most {MAX_TEXT_FILE_BYTES}")
        found[name] = path.read_bytes()
    return found
