"""Metrics of a program that is no recipe, where ``shardwise watch`` looks for them."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import dtensor
from shardwise.base.arguments import check_arguments
from shardwise.runs.files import RunFiles
from shardwise.runs.metrics_file import MetricsFile
from shardwise.timeline.recorder import check_step

_open: dict[Path, MetricsFile] = {}


def log(folder: str | os.PathLike[str] | None = None, *, step: int, **values: Any) -> None:
    """Add the metrics of a step to a file that ``shardwise watch`` and ``compare`` show.

    ::

        shardwise.log(step=step, loss=loss, lr=scheduler.get_last_lr()[0])

    The first rank appends one line of JSON to ``metrics.jsonl`` in the folder; other ranks do
    nothing, so each may call this or not. The first call of a process cuts off what the file has
    of this step and later ones, so a program that resumes goes on where it was. Reading the value
    of a tensor waits for the device that computes it.

    Args:
        folder: the folder of the run; by default ``runs/NAME``, after the program.
        step: the number of the step, 0 or more.
        values: numbers, or tensors of one element, by name. What is not finite becomes ``null``. Of
            a ``DTensor`` that is still to be reduced, such as ``p.norm()``, all ranks take the
            ``full_tensor()`` first: a rank alone has only its own part of it.

    Raises:
        TypeError: a value is no number.
        ValueError: the step is no number of a step, or a value is a ``DTensor`` of which this rank
            has a part.
        OSError: the file cannot be written.
        UserError: the file has a damaged line before this step.
    """
    check_arguments(log, locals())
    check_step(step)
    record: dict[str, Any] = {"step": step}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and dtensor.is_part(value):
            raise ValueError(
                f"{name}: found a DTensor of which each rank has a part, expected a number that "
                f"ranks share: pass {name}.full_tensor(), which all ranks call"
            )
        try:
            number = value.item() if isinstance(value, torch.Tensor) else value
            record[name] = number if isinstance(number, int) else float(number)
        except (TypeError, ValueError, RuntimeError):
            expected = "a number, or a tensor of one element"
            raise TypeError(f"{name}: found {type(value).__name__}, expected {expected}") from None
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) != 0:
        return
    root = Path("runs", Path(sys.argv[0]).stem or "python") if folder is None else Path(folder)
    path = RunFiles(root.absolute()).metrics
    if path not in _open:
        path.parent.mkdir(parents=True, exist_ok=True)
        _open[path] = MetricsFile(path, step - 1)
        atexit.register(_open[path].close)
    _open[path].write(record)
