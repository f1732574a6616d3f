"""Pairs of hosts connect, and measure the way between them."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time

from shardwise.doctor.links import Link
from shardwise.launch.addresses import join, listening_everywhere

CONNECT = 3.0  # seconds for a connection
STREAM = 0.5  # seconds of sending, for bandwidth
DRAIN = 5.0  # seconds for what was sent to arrive
_ECHOES = 50
_CHUNK = bytes(2**18)
_ANSWERS = 16  # connections that are answered at a time; hosts come one after another
_BACK, _COUNTED = b"p", b"s"  # what is sent comes back; only its end is answered


class Echo:
    """Answers other hosts at a port that the kernel chose, until it is closed."""

    def __init__(self) -> None:
        self._listener = listening_everywhere()
        self._listener.settimeout(0.2)
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._free = threading.BoundedSemaphore(_ANSWERS)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # none came, or one that has left already
                connection, _ = self._listener.accept()
                if self._free.acquire(blocking=False):
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            _answer(connection)
        finally:
            self._free.release()


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(STREAM + DRAIN)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = connection.recv(1)
        while chunk := connection.recv(2**18):
            if kind == _BACK:
                connection.sendall(chunk)
        if kind == _COUNTED:
            connection.sendall(b"!")


def measure(address: str, port: int) -> Link:
    """Connect to another host's :class:`Echo`, and time small messages and a stream.

    Takes at most ``CONNECT + STREAM + 2 * DRAIN`` seconds.
    """
    try:
        return Link(gbit=_stream(address, port), ms=_ping(address, port))
    except OSError as error:
        return Link(error=f"{join(address, port)}: {error.strerror or error}")


def _ping(address: str, port: int) -> float:
    with socket.create_connection((address, port), timeout=CONNECT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_BACK)
        took: list[float] = []
        deadline = time.perf_counter() + DRAIN
        while len(took) < _ECHOES and time.perf_counter() < deadline:
            began = time.perf_counter()
            connection.sendall(b"x" * 8)
            received = 0
            while received < 8:
                connection.settimeout(max(0.01, deadline - time.perf_counter()))
                part = connection.recv(8 - received)
                if not part:
                    raise ConnectionResetError(None, "the connection was closed")
                received += len(part)
            took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took)


def _stream(address: str, port: int) -> float:
    with socket.create_connection((address, port), timeout=CONNECT) as connection:
        connection.settimeout(DRAIN)
        connection.sendall(_COUNTED)
        sent, began = 0, time.perf_counter()
        while time.perf_counter() - began < STREAM:
            sent += connection.send(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # once all has arrived
        return 8e-9 * sent / (time.perf_counter() - began)
