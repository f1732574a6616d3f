"""A host whose meeting place is another program's."""

from __future__ import annotations

import socket
import threading

import pytest

from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Nodes
from shardwise.launch.network import listening
from shardwise.launch.rendezvous import Attendance


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what came is no message of ours"),
        (b"", "the connection was closed"),
    ],
)
def test_another_program_at_the_port_is_told_from_a_host_that_was_lost(
    answer: bytes, why: str
) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1024):
                pass

    with listening("127.0.0.1") as listener:
        nodes = Nodes(2, 1, "127.0.0.1", listener.getsockname()[1], timeout=10)
        thread = threading.Thread(target=serve)
        thread.start()
        attendance = Attendance(nodes, 1)
        with pytest.raises(UserError, match=r"--rdzv: what listens at 127\.0\.0\.1:") as raised:
            attendance.begin(0, lambda: False)
        attendance.close()
        thread.join()
    assert raised.value.exit_code == 2
    assert why in str(raised.value)
