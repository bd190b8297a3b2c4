"""``config.json`` as the arguments of a config class. Imports no transformers."""

from __future__ import annotations

from typing import Any


def settings_of(document: dict[str, Any]) -> dict[str, Any]:
    """All but what names the class and what would name code of the repository's own.

    transformers writes an infinite float, which JSON has no word for, as ``{"__float__": "Infinity"}``.
    """
    return {key: _decoded(value) for key, value in document.items() if key not in {"model_type", "auto_map"}}


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        tagged = value.get("__float__")
        if set(value) == {"__float__"} and tagged in {"Infinity", "-Infinity", "NaN"}:
            return float(str(tagged))
        return {key: _decoded(entry) for key, entry in value.items()}
    return [_decoded(entry) for entry in value] if isinstance(value, list) else value
