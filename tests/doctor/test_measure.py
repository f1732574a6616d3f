"""Measurements between processes and hosts, on this host."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.app.doctor import measure
from shardwise.app.doctor.measure import (
    EchoServer,
    PairLink,
    measure_connection,
    measure_shared_memory,
)
from shardwise.base.scratch import libc

needs_futex = pytest.mark.skipif(not libc.has_futex(), reason="needs a futex")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STREAM", 0.05)
    monkeypatch.setattr(measure, "DRAIN", 5.0)
    monkeypatch.setattr(measure, "COPYING", 0.05)


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


# -- shared memory ---------------------------------------------------------------------------------


@needs_futex
def test_shared_memory_has_a_bandwidth_and_a_round_trip() -> None:
    link = measure_shared_memory()
    assert link.error == ""
    assert link.gbit > 0
    assert 0 < link.ms < 1000


@needs_futex
@pytest.mark.parametrize(
    ("program", "start"), [("/bin/true", measure.START), ("/usr/bin/yes", 0.1)]
)
def test_a_second_process_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, program: str, start: float, tmp_path: Path
) -> None:
    script = tmp_path / "program"
    script.write_text(f"#!/bin/sh\nexec {program} >/dev/null\n")
    script.chmod(0o755)
    monkeypatch.setattr(measure, "START", start)
    monkeypatch.setattr(sys, "executable", str(script))
    assert measure_shared_memory() == PairLink("a second process did not answer")


@needs_futex
def test_memory_that_is_missing_is_an_error_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwrite", full)
    assert measure_shared_memory() == PairLink("No space left on device")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_limit_on_files_is_one_on_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**20, 2**20))
    assert "are limited to 1 MiB (ulimit -f)" in measure_shared_memory().error


def test_a_machine_without_futex_has_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "has_futex", lambda: False)
    assert measure_shared_memory() == PairLink("needs Linux on x86-64")
