"""Whether a string can be dialled: the check that all addresses get which people type."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_web_address(url: str) -> bool:
    """Whether ``url`` is of HTTP or HTTPS, in small letters as all that looks at the scheme expects, with a host and no
    impossible port. Nothing is looked up."""
    if not url.startswith(("http://", "https://")) or any(character.isspace() for character in url):
        return False
    try:
        parts = urlsplit(url)
        port = parts.port  # raises where it is none
    except ValueError:
        return False
    return bool(parts.hostname) and port != 0
