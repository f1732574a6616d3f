"""Measurements of the connections between two hosts."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass

from shardwise.elastic.network import format_endpoint, listening_everywhere

CONNECT = 3.0  # seconds for a connection
STREAM = 0.5  # seconds of sending, for bandwidth
DRAIN = 5.0  # seconds for sent data to arrive
_ROUND_TRIPS = 50
_CHUNK = bytes(2**18)
_MOST_CLIENTS = 16  # connections served at a time; hosts connect one after another
_CLOCK, _SINK = b"c", b"s"  # answer each message by the time; answer the end of data only
_TIME = struct.Struct("!d")  # seconds since 1970


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
