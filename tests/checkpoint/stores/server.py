"""An S3 server on this machine that can be told to fail: moto's, with faults before it."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ACCESS, SECRET = "AKIAHARMLESSNOT", "a/secret+that/may=not+be/shown"
_BODY = (
    "<Error><Code>{code}</Code><Message>{message}</Message>"
    f"<AWSAccessKeyId>{ACCESS}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign></Error>"
)
_SIGNED = f"AWS4-HMAC-SHA256 Credential={ACCESS}/20260101/us-east-1/s3/aws4_request, Signature=0"
_KEY = re.compile(rb"<Contents>\s*<Key>([^<]*)</Key>.*?</Contents>", re.DOTALL)


@dataclass
class Fault:
    """What happens to some requests, in place of an answer.

    Args:
        method: of the requests.
        key: what the path and query match.
        kind: a status such as 503; or ``reset``, which ends the connection before an answer;
            ``lost``, after the request took effect; ``cut``, in the middle of the answer.
        times: how many requests.
        after: how many requests are let through before.
    """

    method: str
    key: str
    kind: int | str
    times: int = 1
    after: int = 0


@dataclass
class Server:
    """A server with a bucket, ``runs``."""

    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)  # keys that lists lack
    ignored: set[str] = field(default_factory=set)  # headers, as WSGI names them
    seen: list[tuple[str, str]] = field(default_factory=list)
    sent: int = 0  # bytes that clients have written
    got: int = 0  # and read
    signed: str = ""  # how the last request said who it is from
    on_request: Callable[[str, str], None] = lambda method, path: None

    def __post_init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which clients reach it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        self.on_request(method, path)
        self.signed = environ.get("HTTP_AUTHORIZATION", "")
        with self._lock:
            self.seen.append((method, path))
            self.sent += len(body)
            fault = self._fault(method, path)
        if isinstance(fault, int):
            words = {403: ("AccessDenied", "Access Denied"), 503: ("SlowDown", "Please slow down")}
            code, message = words.get(fault, ("InternalError", "We encountered an error"))
            text = _BODY.format(code=code, message=message).encode()
            start_response(f"{fault} {code}", [("Content-Length", str(len(text)))])
            return [text]
        if fault == "reset":
            return _reset(environ)
        environ["wsgi.input"] = io.BytesIO(body)
        if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":  # as Google calls it
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = _SIGNED  # which moto does not verify
        for name in self.ignored:
            environ.pop(name, None)
        with self._lock:  # moto is not made for several requests at a time
            answer = []
            found = b"".join(self._app(environ, lambda *given, **_: answer.append(given)))
        [(status, headers, *_)] = answer
        if fault == "lost":
            return _reset(environ)
        if method == "GET" and "list-type" in path and self.hidden:
            hide = lambda match: b"" if match[1].decode() in self.hidden else match[0]  # noqa: E731
            found = _KEY.sub(hide, found)
            headers = [each for each in headers if each[0].lower() != "content-length"]
            headers.append(("Content-Length", str(len(found))))
        with self._lock:
            self.got += len(found) if method == "GET" else 0
        start_response(status, headers)
        if fault == "cut":
            return _cut(environ, found)
        return [found]

    def _fault(self, method: str, path: str) -> int | str | None:
        for each in self.faults:
            if method == each.method and re.search(each.key, path):
                if each.after:
                    each.after -= 1
                elif each.times:
                    each.times -= 1
                    return each.kind
        return None


def _cut(environ: dict[str, Any], found: bytes) -> Iterator[bytes]:
    yield found[: len(found) // 2]
    _reset(environ)


def _reset(environ: dict[str, Any]) -> Iterable[bytes]:
    connection: socket.socket = environ["werkzeug.socket"]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionError("reset")


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Serve, in a thread, with a bucket ``runs``."""
    server = Server()
    made = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_Quiet)
    server.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        request = urllib.request.Request(f"{server.url}/runs", method="PUT")
        urllib.request.urlopen(request).close()
        yield server
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
