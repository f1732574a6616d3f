"""A server that speaks as much of the Hugging Face hub's protocol as reading from it takes.

    with Hub() as hub:
        hub.push("datasets/local/tiny", folder)     a commit; pushing again makes a newer one
        run(env=hub.environment(home))

What it was asked for is in ``hub.requests``; :meth:`Hub.cut` breaks connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

#: What those hear who may not read a repository: whether a private one exists is not told.
UNKNOWN, GATED = (401, "RepoNotFound"), (403, "GatedRepo")

REACHED = 8 * 2**20  # bytes of a file that connections break behind


# The address is read when this is imported, which has been where a program is forked from.
READ_AGAIN = """
import importlib, sys
if "huggingface_hub.constants" in sys.modules:
    importlib.reload(sys.modules["huggingface_hub.constants"])
"""


class Hub:
    """Serves repositories on a port that the kernel chooses.

    Attributes:
        gated: repositories whose terms nobody has accepted: ``datasets/OWNER/NAME``.
        requests: method, path and requested bytes of all requests.
    """

    def __init__(self) -> None:
        self.gated: set[str] = set()
        self._commits: dict[str, list[Path]] = {}
        self.requests: list[tuple[str, str, str]] = []
        self._cuts: dict[str, int] = {}
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            served_by = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._open: set[socket.socket] = set()

    def __enter__(self) -> Hub:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away for good: nobody listens at the port any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """What makes a process take this for the hub, with a cache of its own."""
        names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
        home.mkdir(exist_ok=True)
        (home / "sitecustomize.py").write_text(READ_AGAIN)
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "PYTHONPATH": str(home),
            "NO_PROXY": "127.0.0.1",
            **dict.fromkeys(names, "0"),
        }

    def push(self, repository: str, folder: Path) -> None:
        """A new commit: the repository is what lies in the folder."""
        self._commits.setdefault(repository, []).append(folder)

    def at(self, repository: str, revision: str) -> tuple[Path, str] | None:
        """Where a repository lies as it is at a revision, and which commit that is."""
        commits = self._commits.get(repository, [])
        named = {str(i) * 40: folder for i, folder in enumerate(commits)}
        commit = list(named)[-1] if named and revision == "main" else revision
        return (named[commit], commit) if commit in named else None

    def cut(self, suffix: str, times: int) -> None:
        """Break off the next answers with what lies behind the first MiBs of such a file."""
        with self._lock:
            self._cuts[suffix] = times

    def note(self, method: str, path: str, asked: str) -> None:
        """A request has come."""
        with self._lock:
            self.requests.append((method, path, asked))

    def cuts(self, path: str) -> bool:
        """Whether the answer with this file is one to be broken off."""
        with self._lock:
            for suffix, times in self._cuts.items():
                if times and path.endswith(suffix):
                    self._cuts[suffix] -= 1
                    return True
        return False

    def opened(self, connection: socket.socket) -> None:
        """A client has connected."""
        with self._lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        """A client has gone."""
        with self._lock:
            self._open.discard(connection)


class _Handler(BaseHTTPRequestHandler):
    served_by: Hub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        self.served_by.opened(self.request)
        super().setup()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        self.served_by.closed(self.request)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self._asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.served_by.note(self.command, path, self.headers.get("Range", ""))
        match path.strip("/").split("/"):
            case ["api", ("datasets" | "models") as kind, owner, name, *rest]:
                self._about(f"{kind}/{owner}/{name}", rest)
            case ["datasets", owner, name, "resolve", revision, *file]:
                self._send(f"datasets/{owner}/{name}", revision, "/".join(file))
            case [owner, name, "resolve", revision, *file]:
                self._send(f"models/{owner}/{name}", revision, "/".join(file))
            case _:
                self._error(404, "EntryNotFound")

    def _found(self, repository: str, revision: str) -> tuple[Path, str] | None:
        found = self.served_by.at(repository, revision)
        if repository in self.served_by.gated:
            self._error(*GATED)
        elif found is None:
            self._error(*UNKNOWN)
        else:
            return found
        return None

    def _about(self, repository: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        found = self._found(repository, revision)
        if found is None:
            return
        folder, commit = found
        match rest:
            case [] | ["revision", _]:
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                names = [{"rfilename": str(path.relative_to(folder))} for path in files]
                name = repository.partition("/")[2]
                self._json({"id": name, "sha": commit, "private": False, "siblings": names})
            case ["tree", _, *inside] if (folder / "/".join(inside)).is_dir():
                below = folder / "/".join(inside)
                recursive = "recursive=true" in self.path.lower()
                inner = sorted(below.rglob("*") if recursive else below.iterdir())
                self._json([_entry(path, folder) for path in inner])
            case ["paths-info", _]:
                asked = [folder / path for path in json.loads(self._asked)["paths"]]
                self._json([_entry(path, folder) for path in asked if path.exists()])
            case _:
                self._error(404, "EntryNotFound")

    def _send(self, repository: str, revision: str, name: str) -> None:
        found = self._found(repository, revision)
        if found is not None:
            self._file(*found, name)

    def _file(self, folder: Path, commit: str, name: str) -> None:
        path = folder / name
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        data = path.read_bytes()
        status, start, stop = 200, 0, len(data)
        asked = self.headers.get("Range")
        if asked is not None:
            low, _, high = asked.removeprefix("bytes=").partition("-")
            status, start = 206, int(low)
            stop = min(stop, int(high) + 1) if high else stop
        self.send_response(status)
        self.send_header("ETag", f'"{_digest(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        if start >= REACHED and self.served_by.cuts(f"{folder.name}/{name}"):
            self.wfile.write(data[start : (start + stop) // 2])
            self.wfile.flush()
            self.close_connection = True  # in the middle
            return
        self.wfile.write(data[start:stop])

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": _digest(name.encode()), "size": 0}
    data = path.read_bytes()
    return {"type": "file", "path": name, "oid": _digest(data), "size": len(data)}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
