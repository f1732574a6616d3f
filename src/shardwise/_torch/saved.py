"""Private names of hooks on saved tensors, and what versions of torch do with them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def hooks_saved_tensors() -> bool:
    """Whether hooks get what autograd saves: those of a checkpoint, or of the user."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what ``tensor`` is a view of, for autograd."""
    return tensor._base


#: Options of ``torch.utils.checkpoint.checkpoint``: what it keeps selectively is saved through
#: hooks that are around it, as all else is. Before torch 2.15 no hooks get that.
CHECKPOINT_OPTIONS: dict[str, Any] = {
    name: True
    for name in ("respect_saved_tensors_hooks",)
    if name in inspect.signature(checkpoint).parameters
}
