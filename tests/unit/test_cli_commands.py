"""Every command's likeliest mistakes, each told in a line or two with its remedy; and that no command was forgotten.

Against a tracker without nodes, one with a gap, and gateways: one that asks for a key, one whose mesh is not whole.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from announcements import node
from app_thread import serving_app
from meshnet_cli import complaint, join
from meshnet_cli import node as node_command
from meshnet_cli.main import app
from meshnet_core.clock import SystemClock
from meshnet_core.join_ticket import JoinTicket
from meshnet_core.mesh_folder import MeshFolder
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app
from scripted_gateway import ScriptedGateway, serving
from tiny_models import save_tiny

NOBODY = "http://127.0.0.1:1"
TICKET = str(JoinTicket("0" * 64, "token", ("https://127.0.0.1:1",)))
NO_MODEL = "./no/such/folder"

MISTAKES: list[tuple[str, str, int, str]] = [
    # -- a wrong address
    ("address", "status --url NOBODY/v1", 1, r"no gateway answers at .*Connection refused.*meshnet up smollm2"),
    ("address", "status --tracker NOBODY", 1, r"no tracker answers at .*start one with `meshnet tracker`"),
    ("address", "status --url TRACKER", 1, r"no API of a gateway is at .*--url"),
    ("address", "nodes --url NOBODY/v1", 1, r"no gateway answers at .*--url"),
    ("address", "nodes --tracker NOBODY", 1, r"start one with `meshnet tracker`"),
    ("address", "chat --url NOBODY/v1 -m hi", 1, r"no gateway answers at .*name yours with --url"),
    ("address", "bench --url NOBODY/v1", 1, r"no gateway answers at .*name yours with --url"),
    ("address", "route m --tracker NOBODY", 1, r"start one with `meshnet tracker`"),
    ("address", "route m --tracker GATEWAY", 1, r"no tracker|start one with `meshnet tracker`"),
    ("address", "events --tracker NOBODY", 1, r"start one with `meshnet tracker`"),
    ("address", "plan MODEL --on-mesh --tracker NOBODY", 1, r"start one with `meshnet tracker`"),
    ("address", "node MODEL --layers 0 --tracker NOBODY", 1, r"give the address of yours with --tracker"),
    ("address", "gateway --tracker NOBODY --port 0", 1, r"give the address of yours with --tracker"),
    ("address", "tracker --host 192.0.2.1 --port 0 --insecure", 2, r"give an address of this machine"),
    ("address", "join TICKET", 1, r"no tracker took the ticket: .*Connection refused.*meshnet tracker"),
    ("address", "mesh show --mesh /nonexistent", 2, r"meshnet mesh create .*meshnet join TICKET"),
    # -- a wrong token, ticket or key
    ("token", "status --url KEYED --api-key wrong", 1, r"not taken here; bring one .*--api-key KEY.*MESHNET_API_KEY"),
    ("token", "nodes --url KEYED", 1, r"bring one of its keys with --api-key KEY"),
    ("token", "chat --url KEYED -m hi", 1, r"bring one of its keys with --api-key KEY"),
    ("token", "bench --url KEYED", 1, r"bring one of its keys with --api-key KEY"),
    ("token", "join meshnet-abc", 2, r"this ticket is not whole"),
    ("token", "join hello", 2, r"'hello' is no ticket"),
    ("token", "mesh ticket --valid soon --mesh MESH", 2, r"write it like 30m, 1h or 7d"),
    ("token", "mesh ticket --mesh /nonexistent", 2, r"tickets are made where `meshnet mesh create` was run"),
    ("token", "mesh create --mesh MESH", 2, r"there is a mesh in .* already; name another folder with --mesh"),
    ("token", "gateway --tracker TRACKER --api-key short --port 0", 2, r"at least 16 .*openssl rand"),
    # -- no nodes
    ("no nodes", "route m --tracker TRACKER", 1, r"no node has registered; start one with `meshnet node MODEL"),
    ("no nodes", "plan MODEL --on-mesh --tracker TRACKER", 2, r"no node|name the machines|--on"),
    ("no nodes", "chat --url BARE -m hi", 1, r"serves no complete model yet; `meshnet status --url"),
    ("no nodes", "bench --url BARE", 1, r"serves no complete model yet; `meshnet status --url"),
    # -- a gap in the layers
    ("gap", "route m --tracker GAP", 1, r"layers 15-29 of m are served by no node.*meshnet node MODEL --layers"),
    ("gap", "up MODEL --splits 0-1,3", 2, r"--splits leave out layers? 2"),
    # -- the model lacks
    ("model", "up NO_MODEL", 2, r"no such model folder or file"),
    ("model", "up smolm2", 2, r"'smolm2' is no model: give .* smollm2"),
    ("model", "node NO_MODEL --layers 0-1 --tracker TRACKER", 2, r"no such model folder or file"),
    ("model", "plan NO_MODEL --on cpu:1GiB", 2, r"no such model folder or file"),
    ("model", "verify NO_MODEL", 2, r"no such model folder or file"),
    ("model", "route other --tracker GAP", 2, r"no node serves 'other'; the mesh serves m"),
    ("model", "chat --url GATEWAY -m hi --model other", 2, r"serves no model 'other'; it serves tiny"),
    ("model", "bench --url GATEWAY --model other", 2, r"serves no model 'other'; it serves tiny"),
    # -- the port is taken
    ("port", "tracker --port TAKEN", 2, r"port \d+ on 127.0.0.1 is taken.*choose another with --port"),
    ("port", "gateway --tracker TRACKER --port TAKEN", 2, r"is taken.*choose another with --port"),
    ("port", "node MODEL --layers 0 --tracker TRACKER --port TAKEN", 2, r"is taken.*choose another with --port"),
    ("port", "node MODEL --layers 0 --tracker TRACKER --api --api-port TAKEN", 2, r"choose another with --api-port"),
    ("port", "up MODEL --port TAKEN", 2, r"is taken.*choose another with --port"),
    # -- out of memory
    ("memory", "node MODEL --layers 0-3 --tracker TRACKER --device cpu", 2, r"memory is free. Give fewer layers"),
    # -- settings
    ("settings", "config --bogus", 2, r"No such option: --bogus"),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What stands for the words in capitals."""
    folder = tmp_path_factory.mktemp("commands")
    model = save_tiny("llama", folder / "tiny", num_hidden_layers=4)
    MeshFolder(folder / "mesh").create("home", "desk")
    gap = Directory(SystemClock(), lease_s=3600)
    gap.announce(node("a", "0-14"))
    with (
        serving_app(create_app(Directory(SystemClock()))) as tracker,
        serving_app(create_app(gap)) as with_gap,
        serving(ScriptedGateway([])) as gateway,
        serving(ScriptedGateway([], key="k" * 16)) as keyed,
        serving(ScriptedGateway([], models=[])) as bare,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        yield {
            "NO_MODEL": NO_MODEL,
            "NOBODY": NOBODY,
            "TICKET": TICKET,
            "MODEL": str(model),
            "MESH": str(folder / "mesh"),
            "TRACKER": tracker,
            "GAP": with_gap,
            "GATEWAY": gateway.url,
            "KEYED": keyed.url,
            "BARE": bare.url,
            "TAKEN": str(taken.getsockname()[1]),
        }


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine in no mesh and with little memory; commands change the process that they run in, here the tests'."""
    monkeypatch.setenv("MESHNET_HOME", str(tmp_path))
    monkeypatch.delenv("MESHNET_API_KEY", raising=False)
    monkeypatch.setattr(node_command, "_start_torch", lambda threads: 1)
    monkeypatch.setattr("meshnet_node.device_memory.free_bytes", lambda device: 1000)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("kind", "line", "code", "told"), MISTAKES, ids=[f"{row[0]}: {row[1]}" for row in MISTAKES])
def test_a_likely_mistake_is_told_with_its_remedy(
    kind: str, line: str, code: int, told: str, words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [re.sub(r"[A-Z_]{3,}", lambda match: words.get(match[0], match[0]), word) for word in line.split()]
    assert complaint.run(typer.main.get_command(app), arguments) == code
    shown = capsys.readouterr()
    assert re.search(told, shown.err), shown.err
    complaints = [one for one in shown.err.splitlines() if not one.startswith(("opening ", "starting ", "loading "))]
    assert 1 <= len(complaints) <= 2, shown.err
    assert "Traceback" not in shown.err
    assert "This is a bug" not in shown.err
    assert threading.main_thread().is_alive()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried 4 TB"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"),
    ],
)
def test_memory_that_runs_out_is_no_bug(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    class Command:
        def main(self, **_: Any) -> int:
            raise error

    assert complaint.run(Command()) == 1
    shown = capsys.readouterr().err
    assert "memory ran out" in shown
    assert "Hold fewer layers" in shown
    assert "bug" not in shown
    assert len(shown.splitlines()) == 2


def test_what_a_person_reads_of_nothing_says_what_to_do(words: dict[str, str]) -> None:
    for command in ("status", "nodes"):
        shown = CliRunner().invoke(app, [command, "--tracker", words["TRACKER"]])
        assert (shown.exit_code, "start one with `meshnet node MODEL" in shown.stdout) == (0, True)
    gap = CliRunner().invoke(app, ["status", "--tracker", words["GAP"]]).stdout
    assert "meshnet node MODEL --layers 15-29" in gap


def test_a_mesh_is_made_and_told_as_json(tmp_path: Path) -> None:
    def document(*arguments: str) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--mesh", str(tmp_path / "m"), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    made = document("mesh", "create", "--name", "attic")
    assert (made["mesh"], made["folder"]) == ("attic", str(tmp_path / "m"))
    ticket = document("mesh", "ticket", "--tracker", "https://10.0.0.5:7400", "--valid", "1h")
    assert JoinTicket.parse(ticket["ticket"]).pin == made["pin"]
    assert (ticket["valid_s"], ticket["uses"], ticket["trackers"]) == (3600, 1, ["https://10.0.0.5:7400"])
    assert document("mesh", "show")["pin"] == made["pin"]


def test_joining_is_told_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def enroll(*_: object) -> str:
        return "https://10.0.0.5:7400"

    monkeypatch.setattr(join, "enroll", enroll)
    result = CliRunner().invoke(app, ["join", TICKET, "--mesh", str(tmp_path / "m"), "--json"])
    told = {"tracker": "https://10.0.0.5:7400", "pin": "0" * 64, "folder": str(tmp_path / "m")}
    assert json.loads(result.stdout) == told


# Where each command's good path and its JSON are tested; None where its output is no data: it runs until it is stopped.
COVERED: dict[str, tuple[str, str | None]] = {
    "up": ("e2e/test_up.py::test_it_serves_and_all_its_children_go_with_it", None),
    "chat": ("unit/test_cli_chat.py::test_one_question_gets", "unit/test_cli_chat.py::test_one_question_as_a_json"),
    "status": ("unit/test_cli_status.py::test_both_ask_the_gateway", "unit/test_cli_status.py::test_both_ask_the_gate"),
    "nodes": ("unit/test_cli_status.py::test_both_ask_the_tracker", "unit/test_cli_status.py::test_both_ask_the_track"),
    "tracker": ("e2e/test_cli_node.py::test_a_gateway_serves_what_there_is", None),
    "node": ("e2e/test_cli_node.py::test_a_node_with_an_api_is_a_whole_mesh", None),
    "gateway": ("e2e/test_cli_node.py::test_a_gateway_serves_what_there_is", None),
    "route": (
        "unit/test_route_explanation.py::test_the_command_asks",
        "unit/test_route_explanation.py::test_the_comm",
    ),
    "join": ("e2e/test_join.py::test_a_machine_that_joined", "unit/test_cli_commands.py::test_joining_is_told_as_json"),
    "mesh-create": ("e2e/test_join.py::test_a_machine_that_joined", "unit/test_cli_commands.py::test_a_mesh_is_made"),
    "mesh-ticket": ("e2e/test_join.py::test_a_machine_that_joined", "unit/test_cli_commands.py::test_a_mesh_is_made"),
    "mesh-show": ("e2e/test_join.py::test_a_machine_that_joined", "unit/test_cli_commands.py::test_a_mesh_is_made"),
    "plan": ("unit/test_cli_plan.py::test_", "unit/test_cli_plan.py::test_"),
    "verify": ("unit/test_verification.py::test_the_command_ends", "unit/test_verification.py::test_json_is_one"),
    "bench": ("unit/test_cli_bench.py::test_it_asks_greedily", "unit/test_cli_bench.py::test_it_prints_one_json"),
    "events": ("unit/test_cli_events.py::test_what_happened_is_shown", "unit/test_cli_events.py::test_what_happened"),
    "config": ("unit/test_cli_settings.py::test_config_as_people", "unit/test_cli_settings.py::test_config_shows_each"),
    "doctor": ("unit/test_cli_doctor.py::test_people_get_lines", "unit/test_cli_doctor.py::test_ten_and_more"),
}
MISTAKES_ELSEWHERE = {"doctor": "what it is for", "mesh-show": "above, as `mesh show`"}


def commands(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))
        elif not command.hidden:
            yield "-".join((*above, name)), command


def test_every_command_has_its_tests() -> None:
    there = dict(commands(typer.main.get_command(app)))
    assert set(COVERED) == set(there)
    tests = Path(__file__).parent.parent
    mistaken = {"-".join(line.split()[: name.count("-") + 1]) for _, line, *_ in MISTAKES for name in there}
    for name, command in there.items():
        good, as_json = COVERED[name]
        for test in (good, as_json or good):
            file, _, start = test.partition("::")
            assert f"def {start}" in (tests / file).read_text(), test
        has_json = any("--json" in option.opts for option in command.params)
        assert has_json == (as_json is not None), name
        assert name in mistaken or name in MISTAKES_ELSEWHERE, f"no mistake of {name} is tested"
