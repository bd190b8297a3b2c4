"""Which files of a model a node may send a gateway: data files, by their exact names, and nothing else.

A whitelist on both ends, so that no weight, script or stray file of a model folder ever travels. Knows names only.
"""

from __future__ import annotations

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
