"""Ports, addresses and the readiness line."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from meshnet_cli import serving
from meshnet_cli.node import out_of_reach
from meshnet_core.errors import InvalidInputError


def test_a_taken_port_is_refused_with_the_option_to_change() -> None:
    with serving.listen("127.0.0.1", 0) as first:
        port = serving.port_of(first)
        with pytest.raises(InvalidInputError, match=rf"port {port} on 127.0.0.1 is taken.*--api-port"):
            serving.listen("127.0.0.1", port, option="--api-port")


async def test_small_writes_are_not_held_back() -> None:
    """As on all sockets that asyncio knows to be TCP: else each token of a stream waits for the client's last word."""
    held_back: list[int] = []

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        held_back.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0)
        writer.close()

    with serving.listen("127.0.0.1", 0) as sock:
        async with await asyncio.start_server(note, sock=sock):
            reader, writer = await asyncio.open_connection("127.0.0.1", serving.port_of(sock))
            await reader.read()
            writer.close()
    assert held_back == [False]


def test_the_next_free_port_is_found() -> None:
    with serving.listen("127.0.0.1", 0) as first:
        taken = serving.port_of(first)
        with serving.listen_from("127.0.0.1", taken) as second:
            assert serving.port_of(second) > taken
        with pytest.raises(InvalidInputError, match="is taken"):
            serving.listen_from("127.0.0.1", taken, count=1)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(InvalidInputError, match="address of this machine"):
        serving.listen(host, 0)
    with pytest.raises(InvalidInputError, match="address of this machine"):
        serving.listen_from(host, 7410)


@pytest.mark.parametrize(
    ("host", "towards", "url"),
    [
        ("10.0.0.7", "http://10.0.0.5:7400", "http://10.0.0.7:7410"),
        ("::1", "http://[::1]:7400", "http://[::1]:7410"),
        ("0.0.0.0", "http://127.0.0.1:7400", "http://127.0.0.1:7410"),  # noqa: S104
    ],
)
def test_the_url_that_others_dial(host: str, towards: str, url: str) -> None:
    assert serving.reachable_url(host, 7410, towards=towards) == url


def test_logging_knows_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_LOG", "loud")
    with pytest.raises(InvalidInputError, match="MESHNET_LOG=LOUD is no level"):
        serving.set_up_logging()
    monkeypatch.setenv("MESHNET_LOG", "debug")
    serving.set_up_logging()
    assert logging.getLogger("meshnet_node").level == logging.DEBUG


def test_the_ready_line(capsys: pytest.CaptureFixture[str]) -> None:
    serving.say_ready("http://127.0.0.1:8000/v1")
    assert capsys.readouterr().out == "ready http://127.0.0.1:8000/v1\n"


@pytest.mark.parametrize(
    ("host", "advertise", "tracker", "wrong"),
    [
        ("127.0.0.1", None, "https://10.0.0.5:7400", True),
        ("127.0.0.1", None, "http://127.0.0.1:7400", False),
        ("127.0.0.1", "https://10.0.0.7:7410", "https://10.0.0.5:7400", False),  # a tunnel ends here
        ("0.0.0.0", None, "https://10.0.0.5:7400", False),  # noqa: S104 - looked at, not listened on
    ],
)
def test_a_node_that_its_mesh_cannot_reach_is_told(host: str, advertise: str | None, tracker: str, wrong: bool) -> None:
    said = out_of_reach(host, advertise, tracker)
    assert (said is not None) == wrong
    assert said is None or "--host 0.0.0.0" in said
