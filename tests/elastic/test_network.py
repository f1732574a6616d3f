"""How hosts reach each other: addresses and listening sockets."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from shardwise.elastic.network import (
    address_towards,
    addresses,
    format_endpoint,
    interface_of,
    interface_towards,
    is_address,
    listening,
    listening_everywhere,
    parse_endpoint,
    scope_of,
)

WAIT = 30.0  # seconds that anything may take on a busy machine


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("host-a:29400", ("host-a", 29400)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[2001:DB8:0::1]:29400", ("2001:db8::1", 29400)),
        ("2001:db8::1:29400", None),  # nobody can tell where the address ends
        ("[host]:1", None),
        ("host", None),
        ("host:0", None),
        ("host:65536", None),
        ("host:+1", None),
        (":1", None),
        ("ho st:1", None),
        ("a..b:1", None),
    ],
)
def test_an_endpoint_is_read_and_written(text: str, endpoint: tuple[str, int] | None) -> None:
    assert parse_endpoint(text) == endpoint
    if endpoint is not None:
        assert parse_endpoint(format_endpoint(*endpoint)) == endpoint


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("127.0.0.1", "host"),
        ("::1", "host"),
        ("::ffff:127.0.0.1", "host"),
        ("0.0.0.0", "host"),
        ("fe80::1%eth0", "link"),
        ("169.254.0.1", "link"),
        ("224.0.0.1", "group"),
        ("10.0.0.1", "all"),
        ("2001:db8::1", "all"),
    ],
)
def test_an_address_has_a_scope(address: str, scope: str) -> None:
    assert scope_of(address) == scope
    assert is_address(address)


def test_names_are_no_addresses() -> None:
    assert not is_address("host-a")
    assert is_address("10.0.0.1") and is_address("::1")


def test_this_host_has_a_loopback_interface() -> None:
    assert addresses()["lo"][0] == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("fe80::1%eth7") == "eth7", "such an address names its link"


def test_addresses_of_one_link_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: int, text: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    v6 = (address(socket.AF_INET6, text) for text in ("fe80::1%eth9", "2001:db8::1"))
    hardware = address(socket.AF_PACKET, "02:fc:00:00:00:01")
    own = {"eth9": [hardware, *v6, address(socket.AF_INET, "192.0.2.1")], "ifb0": [hardware]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    assert addresses() == {"eth9": ["192.0.2.1", "2001:db8::1"]}


def test_a_host_that_has_no_address_is_an_error() -> None:
    with pytest.raises(OSError, match=r"\[Errno"):
        address_towards("nowhere.invalid")
    assert interface_towards("nowhere.invalid") is None
    with pytest.raises(OSError, match=r"\[Errno"):
        listening("192.0.2.1")  # of no interface


def test_a_port_is_taken_once() -> None:
    with listening("127.0.0.1") as first, pytest.raises(OSError, match="in use"):
        listening("127.0.0.1", first.getsockname()[1])


def test_listening_everywhere_is_reached_at_any_address() -> None:
    with listening_everywhere() as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=WAIT).close()
