"""Which files of a model folder a gateway needs to turn text into token ids and back.

Knows names only: a whitelist, so that no weight, script or stray file of a model folder ever travels to a gateway.
Knows nothing of what the files mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

TEXT_FILE_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
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
