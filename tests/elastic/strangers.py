"""Connections of programs that do not belong to a job: port scans, probes, enemies.

    python -m tests.elastic.strangers --count 10000

shows what they cost a client of the store that they call at. Traffic stays on this machine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import multiprocessing
import random
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator

from shardwise.elastic.network import listening
from shardwise.elastic.store import GuardedStore, StoreServer

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


def _latencies(store: GuardedStore, is_over: Callable[[], bool]) -> list[float]:
    """Return how many milliseconds requests take, 200 in a second, until something is over."""
    found = []
    while not is_over():
        start = time.perf_counter()
        store.get("key")
        found.append(1e3 * (time.perf_counter() - start))
        time.sleep(0.005)
    return sorted(found)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    count = parser.parse_args().count
    token = b"a token that strangers do not have"
    server = StoreServer(listener := listening(HERE), token)
    port = listener.getsockname()[1]
    store = GuardedStore(HERE, port, token, "client", LIMIT)
    store.set("key", "value")
    over = time.monotonic() + 10
    quiet = _latencies(store, lambda: time.monotonic() > over)
    strangers = multiprocessing.get_context("spawn").Process(target=knock, args=(HERE, port, count))
    strangers.start()
    over = time.monotonic() + 3  # while that process starts
    _latencies(store, lambda: time.monotonic() > over)
    used, start = time.process_time(), time.monotonic()
    flooded = _latencies(store, lambda: not strangers.is_alive())
    seconds, used = time.monotonic() - start, time.process_time() - used
    joined = time.monotonic()
    GuardedStore(HERE, port, token, "another", LIMIT).close()
    joined = time.monotonic() - joined
    for name, found in (("quiet", quiet), (f"{count} strangers", flooded)):
        tenths = statistics.quantiles(found, n=100)
        print(
            f"{name}: {len(found)} requests, median {statistics.median(found):.2f} ms, "
            f"99 of 100 within {tenths[98]:.2f} ms, slowest {found[-1]:.1f} ms"
        )
    print(
        f"ratio of medians {statistics.median(flooded) / statistics.median(quiet):.2f}; strangers "
        f"for {seconds:.1f} s; this process, with client, used {used:.2f} s of a core; a host that "
        f"joins behind them waits {joined:.2f} s"
    )
    store.close()
    server.close()


if __name__ == "__main__":
    _main()
