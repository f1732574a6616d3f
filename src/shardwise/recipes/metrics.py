"""What a step is known by, and the file that remembers it: one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from shardwise.recipes.rundir import write_text


@dataclass(frozen=True)
class StepMetrics:
    """One step, over all ranks.

    Attributes:
        step: 1, 2, ...
        loss: mean over ranks and microbatches.
        grad_norm: of the whole gradient, before clipping.
        lr: learning rate.
        units_per_s: tokens (or images) per second of all ranks together.
        memory_mib: the most that any rank has held so far, in MiB: resident memory on a CPU,
            allocated memory on a GPU.
        eta_s: seconds until the last step.
        epoch: epochs done, with their fraction; None where nothing is counted in epochs.
        mfu: model FLOPs utilisation, 0 to 1; None where it is not known.
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
        """``step=12 loss=3.214 ...``, for grep."""
        epoch = "" if self.epoch is None else f"epoch={self.epoch:.3f} "
        mfu = "" if self.mfu is None else f" mfu={self.mfu:.3g}"
        return (
            f"step={self.step} {epoch}loss={self.loss:.4f} grad_norm={self.grad_norm:.3f} "
            f"lr={self.lr:.2e} {unit}_per_s={self.units_per_s:.0f} "
            f"memory_mib={self.memory_mib:.0f} eta={clock(self.eta_s)}{mfu}"
        )

    def record(self, unit: str) -> dict[str, Any]:
        """For ``metrics.jsonl``: full precision, so that runs can be compared bit for bit."""
        values = asdict(self)
        values[f"{unit}_per_s"] = values.pop("units_per_s")
        unknown = [name for name in ("epoch", "mfu") if values[name] is None]
        return {name: value for name, value in values.items() if name not in unknown}


def clock(seconds: float) -> str:
    """``01:05``, or ``2:01:05`` from an hour up."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


class MetricsFile:
    """``metrics.jsonl``, open for appending.

    Args:
        path: the file.
        last_step: lines of later steps are cut off first: a run that was killed may have gone on
            after the checkpoint it resumes from.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        if path.exists():
            kept = [r for r in read_metrics(path) if r["step"] <= last_step]
            write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; a reader sees it at once."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring what was written onto the disk, as a checkpoint is."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``. A last line that a killed run left unfinished is skipped.

    Raises:
        ValueError: another line is damaged.
    """
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: no JSON: {line[:60]!r}") from None
    return records
