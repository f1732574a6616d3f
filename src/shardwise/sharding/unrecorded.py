"""Work on parameters' memory that autograd must not see."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch


def unrecorded() -> AbstractContextManager[object]:
    """A context without gradients, in which no tensor becomes one of inference mode."""
    if not torch.is_inference_mode_enabled():
        return torch.no_grad()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))  # which enables gradients
    stack.enter_context(torch.no_grad())
    return stack
