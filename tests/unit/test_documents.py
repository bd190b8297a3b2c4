"""README and docs: they build without a warning, links lead somewhere, commands are commands of the program, and the
reference has all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer
from docs_site import reference
from docs_site.build import build

from documents import (
    ROOT,
    Command,
    NotTakenError,
    bare,
    blocks,
    commands,
    pages,
    parsed,
    sections,
    spans,
    spans_of,
    typed_blocks,
)
from guide_scenes import EXCUSES, README_SECTIONS, SCENES, STAND_INS
from meshnet_cli import settings, variables
from meshnet_cli.main import app
from meshnet_core.errors import ERRORS_BY_CODE, MissReason
from meshnet_core.remedies import MISSES, REMEDIES
from meshnet_gateway.api_types import ChatRequest

ALL = [command for page in pages() for command in commands(page)]
OTHERS = {"make", "curl", "export", "pip", "docker", "sudo", "python3.11", ".venv/bin/python", "python"}
"""Programs of others. `make` has to name a target of the Makefile; the rest is not looked at: it installs, asks a part
that runs, needs root or a container engine, or is a developer's."""


@pytest.mark.parametrize("command", [one for one in ALL if one.words[0].endswith("meshnet")], ids=str)
def test_a_command_in_the_docs_is_one_of_the_program(command: Command) -> None:
    try:
        parsed(command)
    except NotTakenError as error:
        pytest.fail(str(error))


def test_a_wrong_option_would_be_found() -> None:
    with pytest.raises(NotTakenError, match="--no-such"):
        parsed(Command("here", "meshnet up smollm2 --no-such 3"))


def test_there_are_commands_and_no_others_than_known_ones() -> None:
    assert len(ALL) > 40
    assert {one.words[0] for one in ALL if not one.words[0].endswith("meshnet")} <= OTHERS


@pytest.mark.parametrize("command", [one for one in ALL if one.words[0] == "make"], ids=str)
def test_a_target_in_the_docs_is_one_of_the_makefile(command: Command) -> None:
    targets = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [word for word in command.words[1:] if "=" not in word]
    assert set(named) <= {target for line in targets for target in line.split()}, command


def test_each_page_with_commands_has_its_scene_with_a_step_for_each_block() -> None:
    steps = {name: len(scene.steps) for name, scene in SCENES.items()}
    found = {str(page.relative_to(ROOT)): len(typed_blocks(page.read_text("utf-8"))) for page in pages()}
    readme = found.pop("README.md")
    assert steps == {name: count for name, count in found.items() if count}
    # What the README tells to type stands under a heading whose commands are typed, or has an excuse.
    told = sections(ROOT / "README.md")
    assert readme == sum(map(len, told.values()))
    for section, typed in told.items():
        lines = {bare(line) for block in typed for line in block.commands}
        assert bool(lines) is (section in README_SECTIONS) or lines <= set(EXCUSES), section
        assert section not in README_SECTIONS or not lines & set(EXCUSES), section


def test_a_command_of_a_program_that_no_test_types_has_its_excuse() -> None:
    typed = ("meshnet", "curl", "export")
    assert [str(one) for one in ALL if bare(one.text) not in EXCUSES and one.words[0] not in typed] == []


def test_an_excuse_and_a_stand_in_are_of_something_that_stands_in_the_docs() -> None:
    lines = {bare(command.text) for command in ALL}
    assert set(EXCUSES) <= lines
    assert all(EXCUSES.values())
    assert all(any(own in line for line in lines) for own in STAND_INS)


def test_programs_in_the_docs_are_programs() -> None:
    programs = [(page, text) for page in pages() for text in blocks(page, "python")]
    assert len(programs) > 2
    for page, text in programs:
        compile(text, str(page), "exec")


def test_what_curl_sends_in_the_docs_is_taken() -> None:
    sent = [
        one.words for one in ALL if one.words[0] == "curl" and any("/chat/completions" in word for word in one.words)
    ]
    assert sent
    for words in sent:
        ChatRequest.model_validate_json(words[words.index("-d") + 1])


def test_options_named_in_the_text_are_options() -> None:
    known = reference.commands()
    wrong = []
    told = [one for page in pages() for one in spans(page)]
    for span in [*told, *spans_of("errors.md", reference.errors_page())]:
        words = span.text.split()[1:]
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        if name not in known:
            if not any(one.startswith(f"{name} ") for one in known):
                wrong.append(f"{span}: no command")
            continue
        options = {
            option for parameter in known[name].params for option in [*parameter.opts, *parameter.secondary_opts]
        }
        wrong += [
            f"{span}: no {word}"
            for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span.text)
            if word not in options | {"--help"}
        ]
    assert not wrong


def test_the_site_names_each_page_once() -> None:
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert len(named) > 20
    assert sorted(named) == sorted(set(named))


def test_messages_quoted_in_troubleshooting_are_messages_of_the_program() -> None:
    quoted = re.findall(r'"([^"]+)"', (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"))
    assert len(quoted) > 8
    said = messages()
    assert [quote for quote in quoted if quote not in said] == []


def test_codes_named_in_troubleshooting_are_codes() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([a-z_]+)`", page, re.MULTILINE)) <= set(ERRORS_BY_CODE)


def messages() -> str:
    """The fixed parts of all strings in the source of the program; what is put into them is an ellipsis."""
    found = []
    for path in sorted((ROOT / "packages").rglob("*.py")):
        walked = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        docstrings = {one.value for one in walked if isinstance(one, ast.Expr)}
        for one in walked:
            if one in docstrings:
                continue
            if isinstance(one, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in one.values))
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                found.append(one.value)
    return "\n".join(found)


def test_every_error_and_every_miss_has_its_remedy() -> None:
    assert set(REMEDIES) == set(ERRORS_BY_CODE)
    assert set(MISSES) == set(MissReason)
    page = reference.errors_page()
    assert all(f"| `{code}` | {cls.http_status} |" in page for code, cls in ERRORS_BY_CODE.items())


def test_what_a_remedy_tells_to_raise_or_set_is_an_option_of_some_command() -> None:
    told = " ".join(one.remedy for one in [*REMEDIES.values(), *MISSES.values()])
    options = {option for command in reference.commands().values() for one in command.params for option in one.opts}
    assert set(re.findall(r"`(--[a-z-]+)`", told)) <= options | {"--version"}


def test_the_reference_has_every_command_and_option() -> None:
    page = reference.cli_page()
    for name, command in reference.commands().items():
        section = page.split(f"\n## meshnet {name}\n")[1].split("\n## ")[0]
        assert all(
            f"`{option}`" in section for one in command.params if one.param_type_name == "option" for option in one.opts
        )
    assert {"up", "chat", "node", "mesh ticket", "verify"} <= set(reference.commands())
    assert "demo" not in reference.commands()


def test_the_reference_has_every_setting() -> None:
    page = reference.configuration_page()
    named = {name for one in settings.settings_of(typer.main.get_command(app)) for name in one.names}
    assert {"MESHNET_NODE_MAX_SESSIONS", "MESHNET_TRACKER"} < named
    assert set(re.findall(r"`(MESHNET_[A-Z_]+)`", page)) == named | set(variables.FIXED)


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    made = sorted((tmp_path / "site").rglob("*.html"))
    assert len(made) > 40
    for page in made:
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"(https?:[^\"]*)", page.read_text())
        assert fetched == [], page


def test_a_link_to_nothing_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "docs" / "adr").mkdir(parents=True)
    (root / "deploy").mkdir()
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"):
        (root / name).write_text("# A page\n")
    (root / "mkdocs.yml").write_bytes((ROOT / "mkdocs.yml").read_bytes().split(b"nav:")[0])
    assert build(root, tmp_path / "sound").returncode == 0
    (root / "README.md").write_text("# A page\n\n[there](CONTRIBUTING.md#no-such-heading)\n")
    assert build(root, tmp_path / "broken").returncode != 0
