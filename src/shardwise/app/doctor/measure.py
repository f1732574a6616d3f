"""Measurements: shared memory between two processes of a host, connections between two hosts.

Shared memory is measured as ranks use it on CPUs: an anonymous file that both processes map, and a
futex on which they sleep. One process writes 16 MiB and the other reads them, in turns; then they
take turns without data. This file is also the program of the second process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwise.base.scratch import libc
from shardwise.elastic.network import format_endpoint, listening_everywhere

CONNECT = 3.0  # seconds for a connection
STREAM = 0.5  # seconds of sending, for bandwidth
DRAIN = 5.0  # seconds for sent data to arrive
_ROUND_TRIPS = 50
_CHUNK = bytes(2**18)
_MOST_CLIENTS = 16  # connections served at a time; hosts connect one after another
_CLOCK, _SINK = b"c", b"s"  # answer each message by the time; answer the end of data only
_TIME = struct.Struct("!d")  # seconds since 1970
COPYING = 0.3  # seconds of copying, for bandwidth
START = 60.0  # seconds for the second process to start, and for a turn of it, on a busy host
_NBYTES = 16 * 2**20
_HEADER = mmap.PAGESIZE  # holds the counters of both processes
_TURNS = 100
_COPY, _NOTHING, _END = 0, 1, 2


@dataclass(frozen=True)
class PairLink:
    """What was measured between two processes.

    Attributes:
        error: why nothing could be measured; empty if it could.
        gbit: bandwidth in Gbit/s (10^9 bits per second).
        ms: round trip of a small message, in milliseconds: of the fastest between two hosts, which
            the link decides and not what else they do; the median between two processes.
        ahead: seconds by which the clock of the other end is ahead; 0 if it may be right.
    """

    error: str = ""
    gbit: float = 0.0
    ms: float = 0.0
    ahead: float = 0.0

    def __post_init__(self) -> None:
        if self.gbit < 0 or self.ms < 0:
            raise ValueError(f"found {self.gbit} Gbit/s and {self.ms} ms, expected 0 or more")

    def __str__(self) -> str:
        return f"{self.gbit:.2f} Gbit/s, {self.ms:.2f} ms"


def measure_connection(address: str, port: int) -> PairLink:
    """Connect to the :class:`EchoServer` of another host, and time small messages and a stream.

    Takes at most ``CONNECT + STREAM + 2 * DRAIN`` seconds.
    """
    try:
        gbit = _stream(address, port)
        took, ahead = _ping(address, port)
        return PairLink(gbit=gbit, ms=1e3 * took, ahead=ahead)
    except OSError as error:
        return PairLink(error=f"{format_endpoint(address, port)}: {error.strerror or error}")


def _ping(address: str, port: int) -> tuple[float, float]:
    """Return the seconds of the fastest round trip, and how far the clock of the other is ahead."""
    found: list[tuple[float, float]] = []
    connection = socket.create_connection((address, port), timeout=CONNECT)
    with connection, connection.makefile("rb") as answers:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_CLOCK)
        deadline = time.perf_counter() + DRAIN
        while len(found) < _ROUND_TRIPS and time.perf_counter() < deadline:
            asked, began = time.time(), time.perf_counter()
            connection.sendall(bytes(_TIME.size))
            connection.settimeout(max(0.01, deadline - time.perf_counter()))
            answer = answers.read(_TIME.size)
            took = time.perf_counter() - began
            if len(answer) < _TIME.size:
                raise ConnectionResetError(None, "the connection was closed")
            (shown,) = _TIME.unpack(answer)
            found.append((took, _ahead(shown, asked, took)))
    return min(found)


def _ahead(answer: float, asked: float, took: float) -> float:
    """Return how far a clock is ahead of this host's; 0 if it may have been right.

    Args:
        answer: the time that it showed.
        asked: the time here, before the question.
        took: seconds until the answer was here.
    """
    ahead = answer - (asked + took / 2)
    return ahead if abs(ahead) > took / 2 else 0.0


def _stream(address: str, port: int) -> float:
    with socket.create_connection((address, port), timeout=CONNECT) as connection:
        connection.settimeout(DRAIN)
        connection.sendall(_SINK)
        sent, began = 0, time.perf_counter()
        while time.perf_counter() - began < STREAM:
            sent += connection.send(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # arrives once all data has
        return 8e-9 * sent / (time.perf_counter() - began)


class EchoServer:
    """Answers :func:`measure_connection` of other hosts, at a port that the kernel chose."""

    def __init__(self) -> None:
        self._listener = listening_everywhere()
        self._listener.settimeout(0.2)
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._free = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # no client, or one that is gone already
                connection, _ = self._listener.accept()
                if self._free.acquire(blocking=False):
                    threading.Thread(
                        target=self._answer_client, args=(connection,), daemon=True
                    ).start()
                else:
                    connection.close()

    def _answer_client(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as received, contextlib.suppress(OSError):
                connection.settimeout(STREAM + DRAIN)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                kind = received.read(1)
                while kind == _CLOCK and len(received.read(_TIME.size)) == _TIME.size:
                    connection.sendall(_TIME.pack(time.time()))
                while kind == _SINK and received.read1(2**18):
                    pass
                if kind == _SINK:
                    connection.sendall(b"!")
        finally:
            self._free.release()


def measure_shared_memory() -> PairLink:
    """Try shared memory between two processes, and measure it.

    Takes half a second, and longer on a busy host.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < 2**40:
        return PairLink(
            f"files, and so shared memory, are limited to {limit / 2**20:,.0f} MiB (ulimit -f)"
        )
    if not libc.has_futex():
        return PairLink("needs Linux on x86-64")
    try:
        with _shared() as handle:
            return _measure(handle)
    except OSError as error:
        return PairLink(error.strerror or str(error))


@contextlib.contextmanager
def _shared() -> Iterator[int]:
    handle = os.memfd_create("shardwise-doctor")
    try:
        os.ftruncate(handle, _HEADER + _NBYTES)
        # Write it once as a file: if memory is missing, that raises instead of ending the process.
        for at in range(0, _HEADER + _NBYTES, 2**20):
            os.pwrite(handle, bytes(min(2**20, _HEADER + _NBYTES - at)), at)
        yield handle
    finally:
        os.close(handle)


class _Side:
    """One of the two processes, which takes turns with the other.

    Args:
        handle: the memory of both.
        place: 0 or 1.
    """

    def __init__(self, handle: int, place: int) -> None:
        shared = mmap.mmap(handle, _HEADER + _NBYTES)
        self._own = ctypes.c_uint32.from_buffer(shared, 64 * place)
        self._other = ctypes.c_uint32.from_buffer(shared, 64 * (1 - place))
        self.asked = ctypes.c_uint32.from_buffer(shared, 128)
        self.data = (ctypes.c_char * _NBYTES).from_buffer(shared, _HEADER)
        self.own_data = ctypes.create_string_buffer(_NBYTES)

    def give(self) -> None:
        """Announce that this process has finished its turn."""
        self._own.value += 1
        libc.wake(ctypes.addressof(self._own))

    def take(self, turn: int, has_ended: Callable[[], object] = lambda: None) -> bool:
        """Sleep until the other process has finished its turn; return whether it has in time.

        Args:
            turn: the number of the turn.
            has_ended: returns None while the other process runs.
        """
        deadline = time.monotonic() + START
        while (seen := self._other.value) < turn:
            if time.monotonic() > deadline or has_ended() is not None:
                return False
            libc.wait_on(ctypes.addressof(self._other), seen, 0.1)
        return True


def _measure(handle: int) -> PairLink:
    command = [sys.executable, "-m", "shardwise.app.doctor.measure", str(handle)]
    side = _Side(handle, 0)
    turns = 0

    def turn(what: int) -> float:
        nonlocal turns
        turns += 1
        began = time.perf_counter()
        if what == _COPY:
            ctypes.memmove(side.data, side.own_data, _NBYTES)
        side.asked.value = what
        side.give()
        if not side.take(turns, other.poll):
            raise OSError(None, "a second process did not answer")
        return time.perf_counter() - began

    with subprocess.Popen(command, pass_fds=[handle], stdin=subprocess.DEVNULL) as other:
        try:
            turn(_COPY)
            began, handed = time.perf_counter(), 0
            while time.perf_counter() - began < COPYING:
                turn(_COPY)
                handed += _NBYTES
            gbit = 8e-9 * handed / (time.perf_counter() - began)
            took = statistics.median(turn(_NOTHING) for _ in range(_TURNS))
            turn(_END)
            return PairLink(gbit=gbit, ms=1e3 * took)
        finally:
            other.kill()


def _answer(handle: int) -> None:
    """Run the second process."""
    side = _Side(handle, 1)
    turn, asked = 0, _NOTHING
    while asked != _END and side.take(turn := turn + 1):
        asked = side.asked.value
        if asked == _COPY:
            ctypes.memmove(side.own_data, side.data, _NBYTES)
        side.give()


if __name__ == "__main__":
    _answer(int(sys.argv[1]))
