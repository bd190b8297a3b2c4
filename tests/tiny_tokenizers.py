"""Small real tokenizers, of the two kinds that write bytes differently, as the files of a model folder."""

from __future__ import annotations

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = (
    "The quick brown fox jumps over the lazy dog. Say: hello, world! 0123456789",
    "machines that people own answer one chat together, none of them alone",
)


def _folder(tokenizer: Tokenizer, *, template: str | None = CHAT_TEMPLATE, bos: str | None = None) -> dict[str, bytes]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        **({"bos_token": bos} if bos else {}),
        **({"chat_template": template} if template else {}),
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": json.dumps(
            {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": tokenizer.get_vocab_size()}
        ).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [0, 2]}).encode(),
    }


@functools.cache
def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level_files(*, template: str | None = CHAT_TEMPLATE) -> dict[str, bytes]:
    """GPT-2's kind: every byte has a letter; a character outside ASCII takes several ids."""
    return _folder(_byte_level(), template=template)


@functools.cache
def _ascii() -> Tokenizer:
    letters = [chr(code) for code in range(0x21, 0x7F) if chr(code) not in "`~"]
    vocab = {token: index for index, token in enumerate([*SPECIAL, "\u0120", "\u010a", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def ascii_files(*, template: str | None = CHAT_TEMPLATE) -> dict[str, bytes]:
    """As many tokens as the tiny models have: letters, digits and signs of ASCII, each a token."""
    return _folder(_ascii(), template=template)


@functools.cache
def _byte_fallback() -> Tokenizer:
    letters = sorted({character for text in TEXTS for character in text.replace(" ", "▁")} | {"你", "▁"})
    words = ["▁the", "▁fox", "▁hello", "llo", "he"]
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab["<unk>"] = len(vocab)
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "▁th", "▁f", "▁fo", "▁he", "ll", *words]:
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "f"), ("▁f", "o"), ("▁fo", "x"), ("l", "l"), ("ll", "o")]
    merges += [("h", "e"), ("▁", "he"), ("▁he", "llo")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def byte_fallback_files() -> dict[str, bytes]:
    """Llama's kind: a text begins with a space that is not shown, and rare characters are ids of single bytes."""
    return _folder(_byte_fallback(), bos="<|endoftext|>")
