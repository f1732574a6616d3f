"""One process started as a rank is: whether it starts at all, and which accelerators it sees.

The doctor itself stays without torch until this has worked. A rank is this Python without the
current folder to import from, in a session of its own, and it reports through a file in the
temporary folder. This file is also the program of that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from shardwise.base import plain
from shardwise.base.units import printable

START = 60.0  # seconds; torch may have to come from storage far away
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
    """What a process that was started as a rank has found.

    Attributes:
        error: why none started; empty if it did.
        accelerators: what it sees.
    """

    error: str = ""
    accelerators: Accelerators = field(default_factory=Accelerators)


def probe_rank() -> Probe:
    """Start a process as ranks are started, and wait for what it reports.

    Takes as long as importing torch, and at most :data:`START` seconds.
    """
    try:
        with tempfile.NamedTemporaryFile() as report, tempfile.TemporaryFile() as errors:
            return _run(report, errors)
    except OSError as error:
        return Probe(error.strerror or str(error))


def _run(report: IO[bytes], errors: IO[bytes]) -> Probe:
    command = [sys.executable, "-P", "-m", "shardwise.app.doctor.probe", report.name]
    with _session(command, errors) as process:
        try:
            code = process.wait(START)
        except subprocess.TimeoutExpired:
            return Probe(f"no answer for {START:.0f} s")
    if code:
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
        lines = errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return Probe(printable(f"exit code {code}: {last or 'it printed nothing'}"))
    try:
        return Probe(accelerators=plain.read(Accelerators, report.read(_MOST_BYTES)))
    except ValueError as error:
        return Probe(printable(f"the report of a rank: {error}"))


@contextlib.contextmanager
def _session(command: list[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, as torch's agent does, and leave none behind."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asdict(_find())))
