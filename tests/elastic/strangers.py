"""Connections of programs that do not belong to a job: port scans, probes, enemies."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator

HERE = "127.0.0.1"
HELLO = b"shardwise-store1" + bytes(32)  # as a client of the store begins
LIMIT = 30.0  # seconds for one connection to be made
OPEN = 400  # connections that are kept open at once, more than a store bears


def _garbage(connection: socket.socket, chance: random.Random) -> None:
    connection.sendall(chance.randbytes(chance.randrange(1, 2000)))


def _browser(connection: socket.socket, chance: random.Random) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")


def _half_open(connection: socket.socket, chance: random.Random) -> None:
    pass


def _slow(connection: socket.socket, chance: random.Random) -> None:
    connection.sendall(HELLO[: chance.randrange(1, len(HELLO))])


def _impostor(connection: socket.socket, chance: random.Random) -> None:
    """Begin as a client does, guess the proof, and go on as if it were right."""
    key_set = b"".join(len(part).to_bytes(4) + part for part in (bytes(8), b"set", b"key", b"evil"))
    message = len(key_set).to_bytes(4) + bytes(32) + key_set
    connection.sendall(HELLO + chance.randbytes(32) + message)


def _talkative(connection: socket.socket, chance: random.Random) -> None:
    connection.settimeout(0.2)  # nobody reads so much
    connection.sendall(HELLO + b"\xff" * 2**20)


def _reset(connection: socket.socket, chance: random.Random) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextlib.contextmanager
def server_of(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """Be another program, which talks to the first that connects; yield its port."""

    def serve() -> None:
        with listener.accept()[0] as connection, contextlib.suppress(ConnectionResetError):
            talk(connection)

    with socket.create_server((HERE, 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


KINDS: dict[str, Callable[[socket.socket, random.Random], None]] = {
    "garbage": _garbage,
    "browser": _browser,
    "half-open": _half_open,
    "slow": _slow,
    "impostor": _impostor,
    "talkative": _talkative,
    "reset": _reset,
}


def knock(address: str, port: int, count: int, *, replayed: bytes = b"", seed: int = 0) -> None:
    """Connect so many times, a few hundred at once, and say what strangers say.

    Args:
        address: of the store.
        port: of the store.
        count: connections of all kinds together.
        replayed: what a genuine client once sent; one stranger in eight says it again.
        seed: of what is said.
    """
    chance = random.Random(seed)
    kinds = [*KINDS.values()]
    if replayed:
        kinds.append(lambda connection, _: connection.sendall(replayed))
    kept: collections.deque[socket.socket] = collections.deque()
    for kind in itertools.islice(itertools.cycle(kinds), count):
        connection = socket.create_connection((address, port), timeout=LIMIT)
        with contextlib.suppress(OSError):  # it has been closed already
            kind(connection, chance)
        kept.append(connection)
        if len(kept) > OPEN:
            kept.popleft().close()
        with contextlib.suppress(OSError):  # the slow ones: one byte each time
            kept[chance.randrange(len(kept))].sendall(b"s")
    for connection in kept:
        connection.close()
