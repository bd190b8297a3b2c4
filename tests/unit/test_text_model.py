"""Text models from files: what ids a conversation has, where answers end, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from meshnet_core.errors import RequestRefusedError, UnsupportedModelError
from meshnet_core.text_file_names import TEXT_FILE_NAMES
from meshnet_gateway.text_model import TextModel
from smollm2 import reference_folder, reference_tokenizer
from tiny_tokenizers import byte_fallback_files, byte_level_files

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello 你好"}]
KINDS = pytest.mark.parametrize("files_of", [byte_level_files, byte_fallback_files])


def built(files: dict[str, bytes]) -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, files)


def with_json(files: dict[str, bytes], name: str, **fields: Any) -> dict[str, bytes]:
    return {**files, name: json.dumps(json.loads(files.get(name, b"{}")) | fields).encode()}


@pytest.fixture(scope="module")
def smollm2() -> TextModel:
    folder = reference_folder()
    files = {name: (folder / name).read_bytes() for name in TEXT_FILE_NAMES if (folder / name).is_file()}
    return TextModel.from_files("smollm2", "f" * 64, files)


@KINDS
def test_a_conversation_is_rendered_by_the_models_template(files_of: Callable[[], dict[str, bytes]]) -> None:
    model = built(files_of())
    ids = model.render_chat(CHAT)
    assert ids[0] == 1  # <|im_start|>, written by the template; nothing is put before it
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert "hello 你好" in model.decode(ids)


def test_plain_text_gets_the_tokenizers_own_beginning() -> None:
    assert built(byte_fallback_files()).encode("the fox")[0] == 0  # its post-processor puts the bos there
    assert built(byte_level_files()).encode("the fox")[0] != 0


@KINDS
def test_decoding_leaves_special_tokens_out_and_keeps_the_spaces(files_of: Callable[[], dict[str, bytes]]) -> None:
    model = built(files_of())
    ids = [2, *model.encode("the fox"), 2, *model.encode(" hello"), 2]
    assert model.decode(ids).split() == ["the", "fox", "hello"]
    assert model.decode(model.encode("a  b ")) == "a  b "


def test_pieces_are_whole_characters() -> None:
    decoder = built(byte_level_files()).decoder()
    pieces = [decoder.feed(token) for token in built(byte_level_files()).encode("ż👩‍👧")]
    assert [piece for piece in pieces if piece] == ["ż", "👩", "\u200d", "👧"]
    assert decoder.flush() == ""


@KINDS
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_end_cuts_is_left_out(files_of: Callable[[], dict[str, bytes]], cut: int) -> None:
    model = built(files_of())
    ids = model.encode("hello 👧")[:-cut]
    decoder = model.decoder()
    assert "".join(decoder.feed(token) for token in ids) == "hello "
    assert decoder.flush() == ""
    assert model.decode(ids) == "hello "


@KINDS
def test_a_replacement_character_that_was_meant_stays_at_the_end(files_of: Callable[[], dict[str, bytes]]) -> None:
    model = built(files_of())
    for text in ("hello \ufffd", "\ufffd\ufffd", "你\ufffd"):
        assert model.decode(model.encode(text)) == text
        assert model.decode([*model.encode(text), *model.encode("👧")[-4:-1]]) == text


@KINDS
def test_bytes_that_never_make_a_character_are_a_replacement_at_the_end_too(
    files_of: Callable[[], dict[str, bytes]],
) -> None:
    model = built(files_of())
    last = model.encode("👧")[-1]  # a continuation byte, with nothing before it to continue
    assert model.decode([*model.encode("hello"), last]) == "hello\ufffd"


def test_broken_bytes_do_not_take_the_good_ones_along() -> None:
    model = built(byte_fallback_files())
    byte = {value: 4 + value for value in range(256)}  # ids of <0x00> and up
    good, broken = [byte[value] for value in "好".encode()], [byte[0x80]]
    decoder = model.decoder()
    pieces = [decoder.feed(token) for token in [*good, *broken, *model.encode("the")[1:]]]
    assert "".join(pieces) == "好\ufffd the"


@KINDS
def test_bytes_of_tokens(files_of: Callable[[], dict[str, bytes]]) -> None:
    model = built(files_of())
    ids = model.encode("the 好")
    assert b"".join(model.token_bytes(token) for token in ids if token).strip() == "the 好".encode()
    assert model.token_bytes(2) == b"<|im_end|>"
    assert model.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, {2}),  # the tokenizer's
        ({}, {"eos_token_id": 0}, {0, 2}),
        ({}, {"eos_token_id": [0, 1]}, {0, 1, 2}),
        ({"eos_token_id": 7}, {}, {2, 7}),
        ({"text_config": {"eos_token_id": [8]}}, {}, {2, 8}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {2}),
    ],
)
def test_stop_ids_are_the_union(config: dict[str, Any], generation: dict[str, Any], expected: set[int]) -> None:
    files = with_json(byte_level_files(), "config.json", **config)
    files["generation_config.json"] = json.dumps(generation).encode()
    assert built(files).stop_ids == expected


def test_limits_come_from_the_config() -> None:
    assert built(byte_level_files()).max_positions == 64
    nested = {
        **byte_level_files(),
        "config.json": json.dumps({"text_config": {"max_position_embeddings": 99}}).encode(),
    }
    assert built(nested).max_positions == 99
    nameless = {name: data for name, data in byte_level_files().items() if name != "config.json"}
    assert built(nameless).max_positions is None
    assert built(nameless).vocab_size == built(byte_level_files()).vocab_size


def test_a_template_may_come_in_files_of_its_own() -> None:
    plain = byte_level_files(template=None)
    jinja = {**plain, "chat_template.jinja": b"{{ messages[0]['content'] }}"}
    processor = {**plain, "chat_template.json": json.dumps({"chat_template": "{{ messages[0]['content'] }}"}).encode()}
    for files in (jinja, processor):
        assert built(files).decode(built(files).render_chat(CHAT[1:])) == "hello 你好"


def test_a_model_without_a_template_is_no_chat_model() -> None:
    with pytest.raises(RequestRefusedError, match=r"no chat template.*use /v1/completions") as caught:
        built(byte_level_files(template=None)).render_chat(CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0]['content'] + 1 }}", "{% broken"]
)
def test_what_a_template_refuses_is_refused_with_its_words(template: str) -> None:
    with pytest.raises(RequestRefusedError, match="chat template of tiny refuses"):
        built(byte_level_files(template=template)).render_chat(CHAT)


def test_a_template_runs_in_a_sandbox() -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RequestRefusedError, match="unsafe"):
        built(byte_level_files(template=template)).render_chat(CHAT)


def test_other_files_and_broken_ones_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'../evil.py' is none of the files"):
        built({**byte_level_files(), "../evil.py": b""})
    with pytest.raises(UnsupportedModelError, match="make no tokenizer"):
        built({**byte_level_files(), "tokenizer.json": b"{}"})
    with pytest.raises(UnsupportedModelError, match="make no tokenizer"):
        built({})
    with pytest.raises(UnsupportedModelError):
        built({**byte_level_files(), "config.json": b"no json"})


def test_code_of_a_model_folder_is_never_asked_for() -> None:
    files = with_json(byte_level_files(), "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    try:
        model = built(files)
    except UnsupportedModelError:
        return
    assert model.encode("the")


def test_threads_share_a_model() -> None:
    model = built(byte_level_files())
    expected = model.render_chat(CHAT)
    text = model.decode(expected)
    right: list[bool] = []

    def work() -> None:
        right.extend(model.render_chat(CHAT) == expected and model.decode(expected) == text for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200


@pytest.mark.real_model
def test_smollm2_has_the_ids_that_transformers_gives(smollm2: TextModel) -> None:
    tokenizer = reference_tokenizer()
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(smollm2.render_chat(CHAT)) == expected
    text = "Machines that people own; 机器, 기계, 👩‍👩‍👧.\n\n  def f(x):\n\treturn x"
    assert list(smollm2.encode(text)) == tokenizer(text)["input_ids"]
    assert smollm2.decode(smollm2.encode(text)) == text
    assert smollm2.stop_ids == {2}
    assert smollm2.vocab_size == 49152


NO_TORCH = """
import importlib.util, sys
BLOCKED = ("torch", "safetensors", "gguf", "accelerate")
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in BLOCKED else real(name, package)
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import meshnet_gateway.api, meshnet_gateway.text_store
from concurrent.futures import ThreadPoolExecutor
from meshnet_gateway.text_model import TextModel, preload
with ThreadPoolExecutor(4) as threads:  # the first requests may come while the gateway warms up
    list(threads.map(lambda _: preload(), range(4)))
from tiny_tokenizers import byte_level_files
model = TextModel.from_files("tiny", "f", byte_level_files())
print(model.decode(model.render_chat([{"role": "user", "content": "hello"}])).split())
assert not set(BLOCKED) & set(sys.modules)
"""


def test_a_gateway_needs_no_torch() -> None:
    script = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}\n{NO_TORCH}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['user', 'hello', 'assistant']\n"
    assert done.stderr == ""
