"""What announcements on the local network mean. That they travel, tests/e2e/test_namespaces.py shows."""

from __future__ import annotations

import socket

import pytest
from zeroconf.asyncio import AsyncServiceInfo

from meshnet_cli import mdns

PIN = "0123456789abcdef" * 4
FULL = {"scheme": "https", "mesh": PIN[: mdns.PIN_LENGTH]}


def info(properties: dict[str, str | None], port: int | None = 7400, *addresses: str) -> AsyncServiceInfo:
    packed = [socket.inet_aton(address) for address in addresses or ("10.0.0.5",)]
    return AsyncServiceInfo(mdns.TRACKER, f"a.{mdns.TRACKER}", port=port, addresses=packed, properties=properties)


def test_an_announcement_of_this_mesh_gives_its_addresses() -> None:
    assert mdns.urls_of(info(FULL, 7400, "10.0.0.5", "192.168.1.5"), PIN) == [
        "https://10.0.0.5:7400",
        "https://192.168.1.5:7400",
    ]
    assert mdns.urls_of(info({"scheme": "http", "mesh": ""}), None) == ["http://10.0.0.5:7400"]
    assert mdns.urls_of(info({"scheme": "http"}), None) == ["http://10.0.0.5:7400"]


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"scheme": "https"},
        {"scheme": "http", "mesh": PIN[: mdns.PIN_LENGTH]},
        {"scheme": "https", "mesh": "f" * mdns.PIN_LENGTH},
        {"scheme": "gopher", "mesh": PIN[: mdns.PIN_LENGTH]},
        {"scheme": None, "mesh": None},
    ],
)
def test_an_announcement_of_anything_else_gives_none(properties: dict[str, str | None]) -> None:
    assert mdns.urls_of(info(properties), PIN) == []
    assert mdns.urls_of(info(FULL, None), PIN) == []


def test_the_type_names_are_such_that_others_pass_them_on() -> None:
    for service in (mdns.TRACKER, mdns.API):
        name = service.removesuffix("._tcp.local.").removeprefix("_")
        assert len(name) <= 15  # RFC 6763, 7.2
