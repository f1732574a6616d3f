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
from typing import IO, Any

from shardwise.base.errors import CheckpointError
from shardwise.base.units import printable
from shardwise.checkpoint.disk.strict import Fields, check_number, check_text, parse, refuse

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

    @staticmethod
    def from_json(values: Any) -> Accelerators:
        """Read what another process has sent.

        Raises:
            CheckpointError: it is something else.
        """
        fields = Fields(values, "accelerators")
        versions = Fields(fields.any("versions"), "versions")
        if len(versions.all()) > _MOST_VERSIONS:
            refuse(versions.where, versions.all(), f"at most {_MOST_VERSIONS}")
        return Accelerators(
            kind=fields.text("kind"),
            models=[_model(each) for each in fields.items("models", _MOST_MODELS)],
            versions={check_text(name, "versions"): versions.text(name) for name in versions.all()},
            problem=fields.text("problem"),
        )


def _model(value: Any) -> tuple[str, int]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], str):
        refuse("models", value, "a name and bytes of memory")
    return check_text(value[0], "models"), check_number(value[1], "models")


@dataclass(frozen=True)
class Probe:
    """What a process that was started as a rank has found.

    Attributes:
        error: why none started; empty if it did.
        accelerators: what it sees.
    """

    error: str = ""
    accelerators: Accelerators = field(default_factory=Accelerators)

    @staticmethod
    def from_json(values: Any) -> Probe:
        """Read what another host has sent.

        Raises:
            CheckpointError: it is something else.
        """
        fields = Fields(values, "probe")
        return Probe(fields.text("error"), Accelerators.from_json(fields.any("accelerators")))


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
        found = parse(report.read(_MOST_BYTES), "the report of a rank")
        return Probe(accelerators=Accelerators.from_json(found))
    except CheckpointError as error:
        return Probe(str(error))


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
