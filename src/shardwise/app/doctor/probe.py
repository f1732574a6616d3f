"""Two processes started as ranks are: whether they start, what they see, and how fast they share.

And how fast two hosts exchange data.

The doctor itself stays without torch until this has worked. A rank is this Python without the
current folder to import from, in a session of its own, and it reports through a file in the
temporary folder. This file is also the program of these processes. They meet at a file, so that
they start even where the loopback device is down.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import socketserver
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import plain
from shardwise.base.units import printable
from shardwise.elastic.network import format_endpoint, listening_everywhere

if TYPE_CHECKING:
    from shardwise.transport.base import Transport


CONNECT = 3.0  # seconds for a connection
STREAM = 0.5  # seconds of sending, for bandwidth
DRAIN = 5.0  # seconds for sent data to arrive
_ROUND_TRIPS = 50
_CHUNK = bytes(2**18)
_MOST_CLIENTS = 16  # connections served at a time; hosts connect one after another
_CLOCK, _SINK = b"c", b"s"  # answer each message by the time; answer the end of data only
_TIME = struct.Struct("!d")  # seconds since 1970


@dataclass(frozen=True)
class PairLink:
    """What was measured between two processes.

    Attributes:
        error: why nothing could be measured; empty if it could.
        gbit: bandwidth in Gbit/s (10^9 bits per second).
        ms: round trip of a small message, in milliseconds: of the fastest between two hosts, which
            the link decides and not what else they do; the median between two processes.
        ahead: seconds by which the clock of the other end is ahead; 0 if it may be right.
    """

    error: str = ""
    gbit: float = 0.0
    ms: float = 0.0
    ahead: float = 0.0

    def __post_init__(self) -> None:
        if self.gbit < 0 or self.ms < 0:
            raise ValueError(f"found {self.gbit} Gbit/s and {self.ms} ms, expected 0 or more")

    def __str__(self) -> str:
        return f"{self.gbit:.2f} Gbit/s, {self.ms:.2f} ms"


def measure_connection(address: str, port: int) -> PairLink:
    """Connect to the :class:`EchoServer` of another host, and time small messages and a stream.

    Takes at most ``CONNECT + STREAM + 2 * DRAIN`` seconds.
    """
    try:
        gbit = _stream(address, port)
        took, ahead = _ping(address, port)
        return PairLink(gbit=gbit, ms=1e3 * took, ahead=ahead)
    except OSError as error:
        return PairLink(error=f"{format_endpoint(address, port)}: {error.strerror or error}")


def _ping(address: str, port: int) -> tuple[float, float]:
    """Return the seconds of the fastest round trip, and how far the clock of the other is ahead."""
    found: list[tuple[float, float]] = []
    connection = socket.create_connection((address, port), timeout=CONNECT)
    with connection, connection.makefile("rb") as answers:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_CLOCK)
        deadline = time.perf_counter() + DRAIN
        while len(found) < _ROUND_TRIPS and time.perf_counter() < deadline:
            asked, began = time.time(), time.perf_counter()
            connection.sendall(bytes(_TIME.size))
            connection.settimeout(max(0.01, deadline - time.perf_counter()))
            answer = answers.read(_TIME.size)
            took = time.perf_counter() - began
            if len(answer) < _TIME.size:
                raise ConnectionResetError(None, "the connection was closed")
            (shown,) = _TIME.unpack(answer)
            found.append((took, _ahead(shown, asked, took)))
    return min(found)


def _ahead(answer: float, asked: float, took: float) -> float:
    """Return how far a clock is ahead of this host's; 0 if it may have been right.

    Args:
        answer: the time that it showed.
        asked: the time here, before the question.
        took: seconds until the answer was here.
    """
    ahead = answer - (asked + took / 2)
    return ahead if abs(ahead) > took / 2 else 0.0


def _stream(address: str, port: int) -> float:
    with socket.create_connection((address, port), timeout=CONNECT) as connection:
        connection.settimeout(DRAIN)
        connection.sendall(_SINK)
        sent, began = 0, time.perf_counter()
        while time.perf_counter() - began < STREAM:
            sent += connection.send(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # arrives once all data has
        return 8e-9 * sent / (time.perf_counter() - began)


class EchoServer(socketserver.ThreadingTCPServer):
    """Answers :func:`measure_connection` of other hosts, at a port that the kernel chose."""

    daemon_threads = True
    block_on_close = False  # nor wait for clients that send nothing

    def __init__(self) -> None:
        super().__init__(("", 0), _Answers, bind_and_activate=False)
        self.socket.close()
        self.socket = listening_everywhere()
        self.port: int = self.socket.getsockname()[1]
        self._free = threading.BoundedSemaphore(_MOST_CLIENTS)
        threading.Thread(target=self.serve_forever, args=(0.2,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.server_close()

    def verify_request(self, request: object, client_address: object) -> bool:
        """Turn away more clients than can be served."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client; one that is gone already is no error."""
        try:
            with request, contextlib.suppress(OSError):
                self.finish_request(request, client_address)
        finally:
            self._free.release()


class _Answers(socketserver.StreamRequestHandler):
    timeout = STREAM + DRAIN
    disable_nagle_algorithm = True

    def handle(self) -> None:
        kind = self.rfile.read(1)
        while kind == _CLOCK and len(self.rfile.read(_TIME.size)) == _TIME.size:
            self.wfile.write(_TIME.pack(time.time()))
        while kind == _SINK and self.rfile.read1(2**18):
            pass
        if kind == _SINK:
            self.wfile.write(b"!")


START = 60.0  # seconds; torch may have to come from storage far away
MEET = 30.0  # seconds for the second one to start, once the first has
_NUMEL = 2**22  # of what a rank shares at a time, 16 MiB
_TURNS = 30
_MOST_MODELS = 1024  # accelerators of a host
_MOST_VERSIONS = 16
_MOST_BYTES = 2**20  # of a report


@dataclass(frozen=True)
class Probe:
    """What two processes that were started as ranks have found.

    Attributes:
        error: why the first did not start; empty if it did.
        memory: how they exchange data through shared memory.
        kind: the type of the accelerators that the first sees, as torch names it; empty if there
            are none.
        models: name and bytes of memory of each, by index; 0 bytes if torch cannot tell.
        versions: of the driver and of libraries, by name.
        problem: why torch finds none although there is a driver; empty otherwise.
    """

    error: str = ""
    memory: PairLink = field(default_factory=PairLink)
    kind: str = ""
    models: list[tuple[str, int]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    def __post_init__(self) -> None:
        if len(self.versions) > _MOST_VERSIONS or len(self.models) > _MOST_MODELS:
            raise ValueError("found more accelerators or libraries than a host has")
        if any(memory < 0 for _, memory in self.models):
            raise ValueError("found accelerators with less than no memory")


def probe_ranks() -> Probe:
    """Start two processes as ranks are started, and wait for what the first reports.

    Takes as long as importing torch and a second, and at most :data:`START` seconds.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _run(Path(folder))
    except OSError as error:
        return _failed(error.strerror or str(error))


def _failed(error: str) -> Probe:
    return Probe(printable(error), PairLink("no rank starts"))


def _run(folder: Path) -> Probe:
    report, errors = folder / "report", folder / "errors"
    with _started(folder, "1"), _started(folder, "0", errors) as process:
        try:
            code = process.wait(START)
        except subprocess.TimeoutExpired:
            return _failed(f"no answer for {START:.0f} s")
    if code:
        lines = errors.read_bytes()[-4096:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return _failed(f"exit code {code}: {last or 'it printed nothing'}")
    try:
        return plain.read(Probe, report.read_bytes()[:_MOST_BYTES] if report.exists() else b"")
    except ValueError as error:
        return _failed(f"the report of a rank: {error}")


@contextlib.contextmanager
def _started(
    folder: Path, rank: str, errors: Path = Path(os.devnull)
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, as torch's agent does, and leave none behind."""
    command = [sys.executable, "-P", "-m", "shardwise.app.doctor.probe", str(folder), rank]
    command += [str(MEET)]
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- in these processes ----------------------------------------------------------------------------


def _find(memory: PairLink) -> Probe:
    """Ask torch, in this process, for its accelerators."""
    from shardwise.base import devices

    found = devices.accelerator()
    return Probe(
        memory=memory,
        kind="" if found is None else found.type,
        models=devices.models(),
        versions=devices.versions(),
        problem=devices.why_none(),
    )


def _share(store: Path, rank: int, seconds: float) -> PairLink:
    """Measure the transport that ranks of a host use on CPUs, together with the other process."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < 2**40:
        return PairLink(
            f"files, and so shared memory, are limited to {most / 2**20:,.0f} MiB (ulimit -f)"
        )
    import torch.distributed as dist

    from shardwise.base import devices
    from shardwise.transport.select import select_transport

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        meeting = dist.FileStore(str(store), 2)  # type: ignore[attr-defined]
        limit = timedelta(seconds=seconds)
        dist.init_process_group(
            devices.GLOO.name, store=meeting, rank=rank, world_size=2, timeout=limit
        )
        transport = select_transport(dist.group.WORLD, devices.CPU, "shm")
        large, small = (_seconds(transport, numel) for numel in (_NUMEL, 1))
    except (RuntimeError, ValueError, OSError) as error:
        return PairLink(printable(f"between two ranks: {error}"))
    return PairLink(gbit=8e-9 * 4 * _NUMEL / large, ms=1e3 * small)


def _seconds(transport: Transport, numel: int) -> float:
    """Return the seconds in which each of the two ranks gets so many elements from the other."""
    import torch

    from shardwise.base import devices

    shard = torch.ones(numel)
    buffers = transport.full_buffers([2 * numel], [shard.dtype], devices.CPU)
    found = []
    for _ in range(_TURNS):
        buffers.allocate()
        began = time.perf_counter()
        transport.all_gather([shard], buffers.tensors).wait()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


if __name__ == "__main__":
    _folder, _rank, _seconds_to_meet = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    _found = _find(_share(_folder / "store", int(_rank), _seconds_to_meet))
    if _rank == "0":
        (_folder / "report").write_bytes(plain.written(_found))
