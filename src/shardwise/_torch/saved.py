"""Private names of hooks on saved tensors, and what versions of torch do with them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import checkpoint

_SELECTIVE = checkpoints._CachingTorchDispatchMode, checkpoints._CachedTorchDispatchMode


def hooks_saved_tensors() -> bool:
    """Whether hooks get what autograd saves: those of a checkpoint, or of the user."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def innermost_checkpoint() -> object:
    """Return what identifies the checkpoint whose hooks get what autograd saves, if one's do."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top[0] if top is not None and top[0].__module__ == checkpoints.__name__ else None


@contextlib.contextmanager
def unseen_by_selective_checkpoints() -> Iterator[None]:
    """Run what is inside as a whole: no selective checkpoint keeps results of single operators."""
    stack = _get_current_dispatch_mode_stack()
    first = next((i for i, mode in enumerate(stack) if isinstance(mode, _SELECTIVE)), len(stack))
    above = stack[first:]
    others = [mode for mode in above if not isinstance(mode, _SELECTIVE)]
    for _ in above:
        _pop_mode()
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in above:
            _push_mode(mode)


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
