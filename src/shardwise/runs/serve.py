"""A server for this computer alone, which shows runs and follows them.

Two addresses are answered: the page, and the data that an open page asks for every two seconds. It
listens on the loopback interface. A page of another site cannot read it either: requests have to
name this very address as their host (else a name that resolves to 127.0.0.1 would do), and answers
allow no other origin. Nothing that is asked for becomes a path.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shardwise.base.html import as_data
from shardwise.runs.metrics import without_nan
from shardwise.runs.page import Updates, page
from shardwise.runs.snapshot import RunReader

ADDRESS = "127.0.0.1"
_CONNECTIONS = 32  # at a time; more are closed at once
_SECONDS = 10.0  # that a client may take for its whole request, or to take an answer
_AT_ONCE = 1 << 24  # bytes of a file that others wait for: it goes on with the next request


class Server(ThreadingHTTPServer):
    """Serves the page of some runs, from the construction until ``server_close()``.

    Args:
        roots: the folders of the runs.
        title: of the page.
        port: to listen on; 0: any that is free.

    Attributes:
        url: where the page is.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, roots: Sequence[Path], title: str, port: int = 0) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self._readers = [RunReader(root, _AT_ONCE) for root in roots]
        self._title = title
        self._reading = threading.Lock()
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self.url = f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """What a request may name as its host."""
        port = "" if self.server_port == 80 else f":{self.server_port}"  # browsers omit that one
        return (f"{ADDRESS}{port}", f"localhost{port}")

    def page(self) -> str:
        """Return the page, by what the runs say now."""
        return page(self._title, self._read(), Updates.FETCH)

    def data(self) -> str:
        """Return what the runs say now, as JSON; without pages within the page, which are large."""
        return as_data(without_nan({"runs": [{**run, "frames": None} for run in self._read()]}))

    def _read(self) -> list[dict[str, Any]]:
        with self._reading:
            return [reader.read() for reader in self._readers]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless too many others are being answered."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "shardwise"
    sys_version = ""
    timeout = _SECONDS  # of a single read, and of a whole answer

    def setup(self) -> None:
        super().setup()
        # A byte now and then would keep a place for hours: the next read finds the end then.
        ending = (socket.SHUT_RD,)
        self._deadline = threading.Timer(_SECONDS, self.connection.shutdown, ending)
        self._deadline.daemon = True
        self._deadline.start()

    def parse_request(self) -> bool:
        try:
            return super().parse_request()
        finally:
            self._deadline.cancel()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        match self.path.partition("?")[0]:
            case "/":
                self._send(self.server.page(), "text/html; charset=utf-8")
            case "/data.json":
                self._send(self.server.data(), "application/json")
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, text: str, kind: str) -> None:
        body = text.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        unchanged = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if unchanged else HTTPStatus.OK)
        self.send_header("ETag", tag)
        if not unchanged:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not unchanged and self.command == "GET":
            self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in (
            ("Cache-Control", "no-store"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
