"""How hosts reach each other: addresses, listening sockets, lines of JSON."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.launch import network
from shardwise.launch.network import (
    ClosedError,
    Connection,
    address_towards,
    addresses,
    connect,
    format_endpoint,
    interface_of,
    interface_towards,
    is_address,
    is_ipv6,
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
    assert not is_ipv6("10.0.0.1")
    assert is_ipv6("::1")


def test_this_host_has_a_loopback_interface() -> None:
    assert addresses()["lo"][0] == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("fe80::1%eth7") == "eth7", "such an address names its link"


def test_addresses_of_one_link_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "20010db8000000000000000000000001 02 40 00 80     eth9\n"
        "fe800000000000000000000000000001 02 40 20 80     eth9\n"
    )
    monkeypatch.setattr(network, "_IF_INET6", table)
    assert addresses()["eth9"] == ["2001:db8::1"]
    monkeypatch.setattr(network, "_IF_INET6", tmp_path / "none")
    assert "eth9" not in addresses(), "a kernel without IPv6 has no such table"


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


# -- messages --------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the plain socket at its other end."""
    with listening("127.0.0.1") as listener:
        connection = connect("127.0.0.1", listener.getsockname()[1], WAIT)
        other, _ = listener.accept()
    with other:
        yield connection, other
    connection.close()


Pair = tuple[Connection, socket.socket]


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    connection, other = pair
    assert connection.peer == "127.0.0.1"
    assert connection.receive() == []
    other.sendall(b'{"a": 1}\n{"b"')
    assert connection.receive(WAIT) == [{"a": 1}]
    other.sendall(b": 2}\n")
    assert connection.next(WAIT) == {"b": 2}
    assert connection.next(0.01) is None
    connection.send({"c": [3]})
    assert other.recv(100) == b'{"c": [3]}\n'


def test_messages_that_came_together_are_taken_one_by_one(pair: Pair) -> None:
    connection, other = pair
    other.sendall(b'{"a": 1}\n{"b": 2}\n')
    assert [connection.next(WAIT), connection.next(0)] == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\n", b"[1]\n", b"\xff\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_message_ends_the_connection(pair: Pair, data: bytes) -> None:
    connection, other = pair
    sender = threading.Thread(target=other.sendall, args=(data,))
    sender.start()
    with pytest.raises(ClosedError, match="is not a message of this protocol"):
        connection.next(WAIT)
    sender.join()


def test_a_line_without_end_is_cut_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MAX_LINE", 100)
    connection, other = pair
    other.sendall(b"x" * 101)
    with pytest.raises(ClosedError, match="does not end"):
        connection.receive(WAIT)


def test_the_end_of_the_other_side_is_noticed(pair: Pair) -> None:
    connection, other = pair
    other.close()
    with pytest.raises(ClosedError, match="the connection was closed"):
        connection.receive(WAIT)


def test_a_host_is_waited_for_until_it_listens() -> None:
    with listening("127.0.0.1") as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port, 0.5)
    assert time.monotonic() - began >= 0.5
    listeners: list[socket.socket] = []
    later = threading.Timer(0.4, lambda: listeners.append(listening("127.0.0.1", port)))
    later.start()
    connect("127.0.0.1", port, WAIT).close()
    later.join()
    listeners[0].close()
