"""Private names of ``torch.optim``."""

from __future__ import annotations

import torch


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let learning rate schedulers know that ``optimizer`` has stepped, without a call of its step.

    Otherwise they warn that it has to step before they do.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
