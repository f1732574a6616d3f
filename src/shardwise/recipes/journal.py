"""What rank 0 writes down about a run: metrics, event files, the picture, ``run.json``."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Protocol

from shardwise.launch.world import job_id
from shardwise.recipes.metrics import MetricsFile, StepMetrics, read_metrics
from shardwise.recipes.rundir import RunDir


class Journal(Protocol):
    """Where the training loop writes what happens."""

    def step(self, metrics: StepMetrics) -> None:
        """A step was made."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """The model was judged after a step."""

    def saved(self) -> None:
        """A checkpoint is complete: bring the metrics onto the disk too."""


class NoJournal:
    """The journal of every rank but the first."""

    def step(self, metrics: StepMetrics) -> None:
        """Nothing."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def saved(self) -> None:
        """Nothing."""


class FileJournal:
    """Writes ``metrics.jsonl`` and, if asked, TensorBoard's event files.

    Args:
        files: of the run.
        unit: what speed counts.
        done: steps made before; what the files say of later ones is dropped.
        tensorboard: write event files.
    """

    def __init__(self, files: RunDir, unit: str, done: int, *, tensorboard: bool) -> None:
        self._unit = unit
        self._metrics = MetricsFile(files.metrics, done)
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(files.tensorboard), purge_step=done + 1)

    def step(self, metrics: StepMetrics) -> None:
        """Write one step."""
        record = metrics.record(self._unit)
        self._metrics.write(record)
        self._draw(metrics.step, {k: v for k, v in record.items() if k not in ("step", "eta_s")})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Write what judging gave."""
        self._metrics.write({"step": step, **values})
        self._draw(step, values)

    def saved(self) -> None:
        """Bring everything onto the disk."""
        self._metrics.sync()
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)


class RunRecord:
    """``run.json``: what was asked, on what it ran, how it went. One session per start or resume.

    Args:
        files: of the run.
        facts: configuration, model, data: what is the same for every session.
        session: what is this session's own.
    """

    def __init__(self, files: RunDir, facts: Mapping[str, Any], session: Mapping[str, Any]) -> None:
        self._files = files
        before = files.read().get("sessions", []) if files.run_json.is_file() else []
        begun = {"job": job_id(), "status": "running", "started": _now()}
        self._session = {**session, **surroundings(), **begun}
        self._record = {**facts, "sessions": [*before, self._session]}
        self._files.write(self._record)

    def end(self, status: str, **results: Any) -> None:
        """Note how the session ended: ``finished``, ``stopped`` or ``failed``, and its results."""
        self._session.update(status=status, ended=_now(), **results)
        self._files.write(self._record)


def surroundings() -> dict[str, Any]:
    """Command, versions and host of this process."""
    names = ("shardwise", "torch", "transformers", "numpy")
    return {
        "command": command_line(sys.argv[1:]),
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in names}},
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads_per_rank": os.environ.get("OMP_NUM_THREADS"),
        },
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command as one would type it."""
    return shlex.join(["shardwise", *arguments])


def draw(files: RunDir, title: str, unit: str) -> None:
    """Draw the loss curve of everything that ``metrics.jsonl`` has."""
    from shardwise.recipes.plot import plot_loss

    plot_loss(read_metrics(files.metrics), title, unit, files.picture)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
