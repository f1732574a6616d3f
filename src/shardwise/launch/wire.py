"""Lines of JSON over a socket that does not block: what the hosts of a job tell each other."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

MAX_LINE = 2**20  # bytes; whoever sends more is none of us


_RETRY = 0.3  # seconds between attempts to reach a host, whose command may start later
_ATTEMPT = 3.0  # seconds for one of them


class ClosedError(ConnectionError):
    """The other end is gone, or is none of us."""


class Line:
    """One connection.

    Args:
        connection: connected; closed with this.

    Attributes:
        peer: the address of the other end.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._socket = connection
        self.peer = str(connection.getpeername()[0])
        self._received = b""
        self._waiting: list[dict[str, Any]] = []

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. They are small: the buffer of a socket takes them at once.

        Raises:
            ClosedError: the other end is gone, or has not read for long.
        """
        data = json.dumps(message).encode() + b"\n"
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                _, ready, _ = select.select([], [self._socket], [], 5.0)
                if not ready:
                    raise ClosedError("the other end does not read") from None
            except OSError as error:
                raise ClosedError(str(error)) from None

    def receive(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """The messages that have come, waiting at most so long for the first.

        Raises:
            ClosedError: the other end is gone, or sent what is no message.
        """
        if b"\n" not in self._received and self._socket.fileno() >= 0:
            select.select([self._socket], [], [], max(0.0, seconds))
        self._received += self._read()
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > MAX_LINE:
            raise ClosedError("a message without end")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ClosedError("what came is no message of ours") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ClosedError("what came is no message of ours")
        return messages

    def _read(self) -> bytes:
        try:
            chunk = self._socket.recv(65536)
        except BlockingIOError:
            return b""
        except ConnectionResetError:
            chunk = b""
        except OSError as error:
            raise ClosedError(error.strerror or str(error)) from None
        if not chunk:
            raise ClosedError("the connection was closed")
        return chunk

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None if none comes within so many seconds.

        Raises:
            ClosedError: as :meth:`receive`.
        """
        deadline = time.monotonic() + seconds
        while not self._waiting:
            left = deadline - time.monotonic()
            self._waiting = self.receive(left)
            if left <= 0:
                break
        return self._waiting.pop(0) if self._waiting else None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def reach(host: str, port: int, seconds: float) -> Line:
    """Connect, however often it takes within so many seconds.

    Raises:
        OSError: why the last attempt failed.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Line(socket.create_connection((host, port), timeout=_ATTEMPT))
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY)
