"""Call at a store as strangers do, while it serves a job.

    SHARDWISE_RDZV_TOKEN=... python -m tests.hosts.flood 10.77.0.1 29400 10000

One in eight strangers repeats what a client with the token has sent, which was to count up a key.
In the end, the key tells how often that was carried out.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from shardwise.elastic.network import listening
from shardwise.elastic.store import GuardedStore
from tests.elastic.strangers import HERE, LIMIT, knock

COUNTED = "counted by a genuine client"


def record(address: str, port: int, token: bytes) -> bytes:
    """Count up a key in a store, and return all that was sent to do so."""
    sent = bytearray()
    proxy = listening(HERE)

    def pass_on(source: socket.socket, target: socket.socket, noted: bytearray) -> None:
        while data := source.recv(2**16):
            noted += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        client, _ = proxy.accept()
        server = socket.create_connection((address, port), timeout=LIMIT)
        back = threading.Thread(target=pass_on, args=(server, client, bytearray()), daemon=True)
        back.start()
        pass_on(client, server, sent)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    store = GuardedStore(HERE, proxy.getsockname()[1], token, "recorded", LIMIT)
    store.add(COUNTED, 1)
    store.close()
    thread.join(LIMIT)
    return bytes(sent)


def main() -> None:
    """Record a session, call, and count."""
    address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    token = os.environ["SHARDWISE_RDZV_TOKEN"].encode()
    recorded = record(address, port, token)
    knock(address, port, count, replayed=recorded)
    store = GuardedStore(address, port, token, "counting", LIMIT)
    times = {1: "once"}.get(store.add(COUNTED, 0), "more than once")
    print(f"{count} strangers; what was recorded counts {times}")
    store.close()


if __name__ == "__main__":
    main()
