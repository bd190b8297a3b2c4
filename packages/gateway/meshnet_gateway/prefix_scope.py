"""Whose prefixes a request may use: those of requests with the same API key, and the same `prompt_cache_key`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

from meshnet_core.prefix import EVERYONE

# Scopes are told to nodes. A key that nobody checked may be short enough to be guessed from a plain hash.
_SALT = secrets.token_bytes(16)


def scope_of(api_key_id: str | None, headers: Mapping[str, str], cache_key: str | None) -> str:
    """The scope of a request, fit to be an id on the wire.

    Args:
        api_key_id: id of the key that the request was let in with; None where none is needed.
        headers: of the request, OpenAI's clients' or Anthropic's. Where no key is needed, clients that send different
            ones anyway still share nothing.
        cache_key: ``prompt_cache_key``.
    """
    scope = EVERYONE
    if api_key_id is not None:
        scope = f"key-{api_key_id}"
    elif given := headers.get("authorization") or headers.get("x-api-key"):
        scope = f"said-{_digest(given, _SALT)}"
    return scope if cache_key is None else f"named-{_digest(f'{scope} {cache_key}', b'')}"


def _digest(text: str, salt: bytes) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16, salt=salt).hexdigest()
