"""What rank 0 records about a run: ``run.json``, metrics, curves elsewhere, and its page."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shardwise.app.recipes.core.checkpointing import Best
from shardwise.app.recipes.core.rundir import RunDir, write_text
from shardwise.base.errors import UserError
from shardwise.base.say import say
from shardwise.base.units import version_of
from shardwise.elastic.world import LOST, job_id
from shardwise.runs.metrics import RanksFile, RankStep
from shardwise.runs.metrics_file import MetricsFile
from shardwise.runs.page import Updates, page
from shardwise.runs.snapshot import RunReader

if TYPE_CHECKING:
    from shardwise.app.recipes.core.sinks import Sink


class Journal:
    """Where the training loop records what happens: every rank but rank 0 records nothing."""

    def step(self, metrics: StepMetrics, ranks: Sequence[RankStep] = ()) -> None:
        """Record a step, and what each rank says of it."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record an evaluation after a step."""

    def saved(self) -> None:
        """Flush the metrics to disk, as a checkpoint is saved."""

    def best(self, best: Best) -> None:
        """Record the best checkpoint so far, which is complete."""

    def failed(self, error: BaseException) -> None:
        """Record at once that the training failed: there may be little time for more."""


class FileJournal(Journal):
    """Writes ``metrics.jsonl`` and ``ranks.jsonl``, and passes metrics to other sinks.

    Args:
        files: of the run.
        record: of the run, which names the best checkpoint.
        unit: what speed counts.
        done: steps done before; records of later steps are dropped.
        sinks: what draws curves; closed with the journal.
    """

    def __init__(
        self,
        files: RunDir,
        record: RunRecord,
        unit: str,
        done: int,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._record = record
        self._unit = unit
        self._metrics = MetricsFile(files.metrics, done)
        self._ranks = RanksFile(files.ranks)
        self._newest: tuple[int, Sequence[RankStep]] = (0, ())
        self._sinks = sinks

    def step(self, metrics: StepMetrics, ranks: Sequence[RankStep] = ()) -> None:
        """Write one step."""
        if ranks:
            self._newest = (metrics.step, ranks)
            self._ranks.step(*self._newest)
        record = metrics.record(self._unit)
        self._metrics.write(record)
        self._draw(metrics.step, {k: v for k, v in record.items() if k not in ("step", "eta_s")})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Write an evaluation."""
        self._metrics.write({"step": step, **values})
        self._draw(step, values)

    def saved(self) -> None:
        """Flush everything to disk."""
        self._metrics.sync()
        for sink in self._sinks:
            sink.flush()

    def best(self, best: Best) -> None:
        """Name the checkpoint in ``run.json``."""
        self._record.best(best)

    def failed(self, error: BaseException) -> None:
        """Record that the training failed, as far as that can be written."""
        with contextlib.suppress(OSError, UserError):
            self._record.failed(error)

    def close(self, failed: BaseException | None = None) -> None:
        """Close the files, and all sinks.

        Args:
            failed: the error that ended the training, if one did.
        """
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close, failed)
            stack.callback(self._ranks.close, *self._newest)
            self._metrics.close()

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)


class RunRecord:
    """``run.json``: configuration, machine and outcome, one session per start or resume.

    Args:
        files: of the run.
        facts: configuration, model, data: what is the same in every session.
        session: what belongs to this session.
    """

    def __init__(self, files: RunDir, facts: Mapping[str, Any], session: Mapping[str, Any]) -> None:
        self._files = files
        known = files.read() if files.run_json.is_file() else {}
        before = known.get("sessions", [])
        #: The same in every session: by it, what draws curves knows the run again.
        self.identity: str = known.get("identity", secrets.token_hex(8))
        begun = {"job": job_id(), "status": "running", "started": _now()}
        if lost := os.environ.get(LOST):
            begun["lost"] = lost[:500]
        self._session = {**session, **surroundings(), **begun}
        self._record = {**facts, "identity": self.identity, "sessions": [*before, self._session]}
        self._files.write(self._record)

    def best(self, best: Best) -> None:
        """Record the checkpoint with the lowest validation loss."""
        self._record["best"] = {"step": best.step, "validation_loss": best.loss}
        self._files.write(self._record)

    def end(self, status: str, **results: Any) -> None:
        """Record the outcome, ``finished``, ``stopped`` or ``failed``, and the results."""
        self._session.update(status=status, ended=_now(), **results)
        self._files.write(self._record)

    def failed(self, error: BaseException) -> None:
        """Record that the session failed, and with which error."""
        self.end("failed", error=f"{type(error).__name__}: {error}"[:2000])


def surroundings() -> dict[str, Any]:
    """Return command, versions and host of this process."""
    names = ("shardwise", "torch", "transformers", "numpy")
    return {
        "command": command_line(sys.argv[1:]),
        "versions": {"python": platform.python_version(), **{n: version_of(n) for n in names}},
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads_per_rank": os.environ.get("OMP_NUM_THREADS"),
        },
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as one would type it."""
    return shlex.join(["shardwise", *arguments])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class StepMetrics:
    """One step, over all ranks.

    Attributes:
        step: 1, 2, ...
        loss: mean over ranks and microbatches.
        grad_norm: of the whole gradient, before clipping.
        lr: learning rate.
        units_per_s: tokens (or images) per second of all ranks together.
        memory_mib: peak memory of any rank so far, in MiB: resident memory on a CPU, allocated
            memory on a GPU.
        eta_s: seconds until the last step.
        epoch: epochs done, with their fraction; None where nothing is counted in epochs.
        mfu: model FLOPs utilization, 0 to 1; None: not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    units_per_s: float
    memory_mib: float
    eta_s: float
    epoch: float | None = None
    mfu: float | None = None

    def line(self, unit: str) -> str:
        """Return ``step=12 loss=3.214 ...``, for grep."""
        epoch = "" if self.epoch is None else f"epoch={self.epoch:.3f} "
        mfu = "" if self.mfu is None else f" mfu={self.mfu:.3g}"
        return (
            f"step={self.step} {epoch}loss={self.loss:.4f} grad_norm={self.grad_norm:.3f} "
            f"lr={self.lr:.2e} {unit}_per_s={self.units_per_s:.0f} "
            f"memory_mib={self.memory_mib:.0f} eta={clock(self.eta_s)}{mfu}"
        )

    def record(self, unit: str) -> dict[str, Any]:
        """Return the record for ``metrics.jsonl``, in full precision to compare runs."""
        values = asdict(self)
        values[f"{unit}_per_s"] = values.pop("units_per_s")
        unknown = [name for name in ("epoch", "mfu") if values[name] is None]
        return {name: value for name, value in values.items() if name not in unknown}


def clock(seconds: float) -> str:
    """Return ``01:05``, or ``2:01:05`` from an hour up."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


#: Seconds between two pages of a run that is under way, at least.
SECONDS = 10.0
#: Share of the time that goes into writing them, at most.
SHARE = 0.005


def write_report(files: RunDir) -> bool:
    """Write ``report.html``, by what the folder says now. Return whether it is written.

    If it cannot be written, a line says so: it is no reason for a training to fail.
    """
    try:
        _write(files, RunReader(files.root), Updates.NEVER)
    except OSError as error:
        say(f"warning    {files.report} cannot be written ({error.strerror})")
        return False
    return True


@contextlib.contextmanager
def report_under_way(files: RunDir) -> Iterator[None]:
    """Write ``report.html`` every few seconds until the block ends, in a thread.

    If it cannot be written, a line says so once, and the training goes on.
    """
    over = threading.Event()
    thread = threading.Thread(target=_keep_writing, args=(files, over), name="shardwise-page")
    try:
        thread.start()
        yield
    finally:
        over.set()
        if thread.ident is not None:  # it has been started
            thread.join()


def _keep_writing(files: RunDir, over: threading.Event) -> None:
    reader, pause = RunReader(files.root), 0.0
    while not over.wait(pause):
        began = time.thread_time()
        try:
            _write(files, reader, Updates.RELOAD, max(SECONDS, pause))
        except OSError as error:
            say(f"warning    --page: {files.report} cannot be written ({error.strerror})")
            return
        # The first page has also read what earlier sessions recorded; the next ones need not.
        pause = max(SECONDS, (time.thread_time() - began) / SHARE) if pause else SECONDS


def write_report_of_lost(files: RunDir) -> None:
    """Write ``report.html`` of a run whose ranks could not say how it ended: they were killed."""
    if files.run_json.exists() and RunReader(files.root).read()["state"] == "lost":
        write_report(files)


def _write(files: RunDir, reader: RunReader, updates: Updates, every: float = 0.0) -> None:
    run = reader.read()
    write_text(files.report, page(run["name"], [run], updates, every))
