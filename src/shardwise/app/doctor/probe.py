"""Two processes started as ranks are: whether they start, what they see, and how fast they share.

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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.app.doctor.measure import PairLink
from shardwise.base import plain
from shardwise.base.units import printable

if TYPE_CHECKING:
    from shardwise.transport.base import Transport

START = 60.0  # seconds; torch may have to come from storage far away
MEET = 30.0  # seconds for the second one to start, once the first has
_NUMEL = 2**22  # of what a rank shares at a time, 16 MiB
_TURNS = 30
_MOST_MODELS = 1024  # accelerators of a host
_MOST_VERSIONS = 16
_MOST_BYTES = 2**20  # of a report


@dataclass(frozen=True)
class Accelerators:
    """The accelerators that a rank sees.

    Attributes:
        kind: their type as torch names it; empty if there are none.
        models: name and bytes of memory of each, by index; 0 bytes if torch cannot tell.
        versions: of the driver and of libraries, by name.
        problem: why torch finds none although there is a driver; empty otherwise.
    """

    kind: str = ""
    models: list[tuple[str, int]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    def __post_init__(self) -> None:
        if len(self.versions) > _MOST_VERSIONS or len(self.models) > _MOST_MODELS:
            raise ValueError("found more accelerators or libraries than a host has")
        if any(memory < 0 for _, memory in self.models):
            raise ValueError("found accelerators with less than no memory")


@dataclass(frozen=True)
class Probe:
    """What two processes that were started as ranks have found.

    Attributes:
        error: why the first did not start; empty if it did.
        accelerators: what it sees.
        memory: how they exchange data through shared memory.
    """

    error: str = ""
    accelerators: Accelerators = field(default_factory=Accelerators)
    memory: PairLink = field(default_factory=PairLink)


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
    return Probe(printable(error), memory=PairLink("no rank starts"))


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


def _find() -> Accelerators:
    """Ask torch, in this process, for its accelerators."""
    from shardwise.base import devices

    found = devices.accelerator()
    return Accelerators(
        kind="" if found is None else found.type,
        models=[(model.name, model.memory) for model in devices.models()],
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
    _found = Probe("", _find(), _share(_folder / "store", int(_rank), _seconds_to_meet))
    if _rank == "0":
        (_folder / "report").write_bytes(plain.written(_found))
