"""The server of the page: what it answers, and what it refuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.runs import serve
from shardwise.runs.serve import Server
from tests.runs import folders


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    opened = Server([folders.make(tmp_path / "lm", steps=5)], "lm")
    thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield opened
    opened.shutdown()
    thread.join()
    opened.server_close()


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def test_the_page_and_its_data_follow_the_run(server: Server, tmp_path: Path) -> None:
    status, body, headers = ask(server, "/")
    assert status == 200
    assert b'data-updates="fetch"' in body
    assert headers["X-Frame-Options"] == "DENY"
    status, body, headers = ask(server, "/data.json")
    assert json.loads(body)["runs"][0]["latest"]["step"] == 5
    tag = headers["ETag"]
    assert ask(server, "/data.json", **{"If-None-Match": tag})[:2] == (304, b"")
    with (tmp_path / "lm" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(folders.line(6)) + "\n")
    status, body, _ = ask(server, "/data.json", **{"If-None-Match": tag})
    assert json.loads(body)["runs"][0]["latest"]["step"] == 6


def test_it_listens_on_the_loopback_interface_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "evil.example:80", ""])
def test_a_name_that_only_resolves_to_this_computer_is_refused(server: Server, host: str) -> None:
    status, body, _ = ask(server, "/data.json", Host=host)
    assert status == 421
    assert b"loss" not in body


@pytest.mark.parametrize(
    "path", ["/run.json", "/../lm/run.json", "/%2e%2e/etc/passwd", "//etc/passwd", "/data.json/"]
)
def test_no_path_leads_to_a_file(server: Server, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert ask(server, "/", method)[0] == 501


def test_head_has_no_body(server: Server) -> None:
    status, body, headers = ask(server, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 10_000


@pytest.mark.parametrize("noise", [b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n" * 9])
def test_noise_is_refused_and_the_next_request_is_answered(server: Server, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(noise)
        received = connection.recv(1 << 16)
    assert b"loss" not in received
    assert ask(server, "/")[0] == 200


def test_clients_that_say_nothing_do_not_take_all_places(server: Server) -> None:
    address = ("127.0.0.1", server.server_port)
    silent = [socket.create_connection(address, timeout=20) for _ in range(40)]
    closed: list[socket.socket] = []
    while len(closed) < 8:
        closed, _, _ = select.select(silent, [], [], 20)
        assert closed, "more than 32 at a time are closed at once"
    for connection in silent:
        connection.close()
    for _ in range(50):
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            assert ask(server, "/")[0] == 200
            return
    raise AssertionError("no answer any more")


def test_clients_that_send_a_byte_now_and_then_do_not_keep_their_places(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_SECONDS", 0.5)
    address = ("127.0.0.1", server.server_port)
    slow = [socket.create_connection(address, timeout=20) for _ in range(32)]
    for _ in range(400):
        for connection in list(slow):
            try:
                connection.send(b"G")
                ended = bool(select.select([connection], [], [], 0)[0])
            except ConnectionError:
                ended = True
            if ended:
                slow.remove(connection)
                connection.close()
        if not slow:
            break
        time.sleep(0.05)
    assert not slow, "a byte gives no more time"
    assert ask(server, "/")[0] == 200


def test_a_long_run_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_AT_ONCE", 1000)
    opened = Server([folders.make(tmp_path / "lm", steps=50)], "lm")
    try:
        [run] = json.loads(opened.data())["runs"]
        assert 0 < run["latest"]["step"] < 50
        assert "still to be read" in run["problems"][0]
        while run["problems"]:
            [run] = json.loads(opened.data())["runs"]
        assert run["latest"]["step"] == 50
    finally:
        opened.server_close()


def test_a_port_that_is_taken_is_an_error(server: Server) -> None:
    with pytest.raises(OSError, match="in use"):
        Server([], "lm", server.server_port)


def test_browsers_omit_the_port_of_http(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(server, "/", Host=f"LOCALHOST:{server.server_port}")[0] == 200
    monkeypatch.setattr(server, "server_port", 80)
    assert server.hosts == ("127.0.0.1", "localhost")
