"""Measurements between processes and hosts, on this host."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shardwise.app.doctor import probe as measure
from shardwise.app.doctor.probe import (
    EchoServer,
    measure_connection,
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STREAM", 0.05)
    monkeypatch.setattr(measure, "DRAIN", 5.0)


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with contextlib.closing(EchoServer()) as server:
        yield server


def test_a_connection_has_a_bandwidth_and_a_round_trip(server: EchoServer) -> None:
    link = measure_connection("127.0.0.1", server.port)
    assert link.error == ""
    assert link.gbit > 0
    assert 0 < link.ms < 1000
    assert abs(link.ahead) < 0.5, "it is the same clock"


def test_the_clock_of_the_other_end_is_compared(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, right = threading.current_thread(), time.time
    monkeypatch.setattr(
        time, "time", lambda: right() + 90 * (threading.current_thread() is not client)
    )
    assert 89 < measure_connection("127.0.0.1", server.port).ahead < 91


@pytest.mark.parametrize(
    ("answer", "ahead"), [(100.0, 0.0), (102.0, 0.0), (104.0, 0.0), (105.0, 3.0), (99.0, -3.0)]
)
def test_a_clock_is_wrong_if_no_moment_of_the_answer_fits(answer: float, ahead: float) -> None:
    assert measure._ahead(answer, asked=100.0, took=4.0) == ahead


def test_a_server_serves_again_and_again(server: EchoServer) -> None:
    links = [measure_connection("127.0.0.1", server.port) for _ in range(3)]
    assert [link.error for link in links] == [""] * 3


def test_clients_that_say_nothing_keep_nobody_else_from_being_served(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            silent = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            stack.enter_context(silent)
        assert measure_connection("127.0.0.1", server.port).error == ""


def test_more_clients_than_a_server_serves_are_turned_away(server: EchoServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(measure._MOST_CLIENTS):
            one = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            stack.enter_context(one)
            one.sendall(measure._CLOCK)
        last = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        stack.enter_context(last)
        assert last.recv(1) == b"", "it was closed"


def test_a_closed_server_answers_nobody() -> None:
    with contextlib.closing(EchoServer()) as server:
        port = server.port
    link = measure_connection("127.0.0.1", port)
    assert link.error == f"127.0.0.1:{port}: Connection refused"
    assert (link.gbit, link.ms) == (0, 0)


def test_a_peer_that_hangs_up_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(2):
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        assert measure_connection("127.0.0.1", port).error.startswith(f"127.0.0.1:{port}: ")
    thread.join(0.1)
