"""A model's text half: messages to token ids, token ids to text. Built from a few small files; needs no torch.

transformers' `AutoTokenizer` reads the files, so that ids are the ones that the model was trained on; no code from a
model folder is ever run. Knows no mesh and no API.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from meshnet_core.errors import RequestRefusedError, UnsupportedModelError
from meshnet_core.text_file_names import TEXT_FILE_NAMES
from meshnet_gateway.chat_template import TemplateTraits
from meshnet_gateway.prompt_encoder import PromptEncoder
from meshnet_gateway.text_decoder import TextDecoder
from meshnet_gateway.token_bytes import TokenBytes

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer, chat template and limits of one model. Its methods may be called from several threads at once.

    Attributes:
        name: under which the model is served.
        fingerprint: of the model.
        stop_ids: token ids that end an answer.
        max_positions: positions a session may have, prompt and answer together; None where the files do not tell.
        vocab_size: token ids are below this.
        traits: of the chat template.
    """

    name: str
    fingerprint: str
    stop_ids: frozenset[int]
    max_positions: int | None
    vocab_size: int
    _encode: Callable[[str, bool], list[int]] = field(repr=False)
    _decode: Callable[[list[int]], str] = field(repr=False)
    _render: Callable[[list[dict[str, Any]], Mapping[str, Any]], str] | None = field(repr=False)
    _bytes: TokenBytes = field(repr=False)
    _prompts: PromptEncoder = field(repr=False)
    traits: TemplateTraits = field(default_factory=TemplateTraits, repr=False)

    @classmethod
    def from_files(cls, name: str, fingerprint: str, files: Mapping[str, bytes]) -> TextModel:
        """Read a tokenizer from files by name; takes from 0.1 s to some seconds, and touches no network.

        Raises:
            UnsupportedModelError: a name that is no tokenizer's, or files that make no tokenizer.
        """
        if strays := sorted(set(files).difference(TEXT_FILE_NAMES)):
            raise UnsupportedModelError(f"{name}: {strays[0]!r} is none of the files that a tokenizer is made of")
        with tempfile.TemporaryDirectory(prefix="meshnet-text-") as folder:
            for file_name, content in files.items():
                (Path(folder) / file_name).write_bytes(content)
            tokenizer = _load(name, folder)
        template = tokenizer.chat_template or _document(files, "chat_template.json").get("chat_template")
        if template is not None:
            tokenizer.chat_template = template
        backend = tokenizer.backend_tokenizer
        # With neither set, encoding reads the tokenizer only, so that threads can share it.
        backend.no_truncation()
        backend.no_padding()

        def encode(text: str, special: bool) -> list[int]:
            ids: list[int] = backend.encode(text, add_special_tokens=special).ids
            return ids

        def decode(ids: list[int]) -> str:
            text: str = backend.decode(ids, skip_special_tokens=True)
            return text

        def render(messages: list[dict[str, Any]], more: Mapping[str, Any]) -> str:
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, **{"add_generation_prompt": True, **more}
            )
            return text

        config = _document(files, "config.json")
        configs = [config, *(part for part in (config.get("text_config"),) if isinstance(part, dict))]
        return cls(
            name=name,
            fingerprint=fingerprint,
            stop_ids=_stop_ids([*configs, _document(files, "generation_config.json")], tokenizer.eos_token_id),
            max_positions=_first_whole(configs, POSITION_KEYS),
            vocab_size=_first_whole(configs, ("vocab_size",)) or len(tokenizer),
            _encode=encode,
            _decode=decode,
            _render=None if template is None else render,
            _bytes=TokenBytes(backend),
            _prompts=PromptEncoder(backend),
            traits=TemplateTraits.of(
                template, {added.content for added in backend.get_added_tokens_decoder().values()}
            ),
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        to_answer: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins, by the model's own template.

        Special tokens come from the template alone; one that a message or a tool spells is text (`PromptEncoder`).

        Args:
            messages: in the form that templates take.
            tools: likewise; for a template that knows them.
            variables: further ones for the template.
            to_answer: False stops where the messages do, before what an answer begins with.

        Raises:
            RequestRefusedError: the model has no template, or its template refuses these messages.
        """
        if (template := self._render) is None:
            raise RequestRefusedError(
                f"{self.name} has no chat template, so it is no chat model; use /v1/completions with a prompt",
                param="messages",
            )

        def render(given: dict[str, Any]) -> str:
            try:
                return template(given["messages"], {name: part for name, part in given.items() if name != "messages"})
            except (TemplateError, TypeError, ValueError, KeyError) as error:
                raise RequestRefusedError(
                    f"the chat template of {self.name} refuses these messages: {error}", param="messages"
                ) from error

        given = {**(variables or {}), **({"tools": [dict(tool) for tool in tools]} if tools else {})}
        given |= {} if to_answer else {"add_generation_prompt": False}
        return tuple(self._prompts.encode(render, {**given, "messages": [dict(message) for message in messages]}))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt as it is, with the special tokens that the tokenizer puts before a text, if any.

        Special tokens that the text spells are those tokens: whoever writes a whole prompt has no template to do it.
        """
        return tuple(self._encode(text, True))

    def decoder(self) -> TextDecoder:
        """A new incremental decoder, for one answer; special tokens are left out of the text."""
        return TextDecoder(self._decode, self._bytes.text_of)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a whole answer: what a :meth:`decoder` gives piece by piece."""
        decoder = self.decoder()
        return "".join([*(decoder.feed(token) for token in ids), decoder.flush()])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; they need not be whole characters."""
        return self._bytes.of(token)


def preload() -> None:
    """Import what reads tokenizers, which takes seconds; a gateway does it before its first model comes."""
    _auto_tokenizer()


def _load(name: str, folder: str) -> Any:
    """The tokenizer of a folder; Any, because transformers gives no type that mypy could follow."""
    try:
        tokenizer = _auto_tokenizer().from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever broken files make transformers and tokenizers raise
        raise UnsupportedModelError(f"the files of {name} make no tokenizer: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise UnsupportedModelError(
            f"the tokenizer of {name} ({kind}) is not one of the tokenizers library; a tokenizer.json would be"
        )
    return tokenizer


_one_import = threading.Lock()


def _auto_tokenizer() -> Any:
    """`AutoTokenizer`, imported late: transformers takes one second, or several where torch is installed too.

    By one thread at a time: transformers puts another module in its own place at the end of its import, and a second
    thread, which waited for that end, would look for the name in the first one and miss it.
    """
    with _one_import:
        logger = logging.getLogger("transformers")
        if _not_about_torch not in logger.filters:
            logger.addFilter(_not_about_torch)
        from transformers import AutoTokenizer  # noqa: PLC0415

        return AutoTokenizer


def _not_about_torch(record: logging.LogRecord) -> bool:
    """Drops the advice that models need PyTorch: a gateway has none, on purpose."""
    return "PyTorch was not found" not in record.getMessage()


def _document(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON file's object; empty where there is none."""
    try:
        document = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UnsupportedModelError(f"{name} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def _stop_ids(documents: Iterable[Mapping[str, Any]], tokenizer_eos: int | None) -> frozenset[int]:
    """Union over config, generation config and tokenizer: each of them is right for some family, none for all."""
    found: set[int] = set()
    for value in [*(document.get("eos_token_id") for document in documents), tokenizer_eos]:
        found.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    return frozenset(found)


def _first_whole(documents: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> int | None:
    for document in documents:
        for key in keys:
            if isinstance(value := document.get(key), int) and value > 0:
                return value
    return None
