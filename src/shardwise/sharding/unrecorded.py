"""Work on parameters' memory that neither autograd nor ``torch.func`` must see."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch

from shardwise._torch import autograd


def unrecorded() -> AbstractContextManager[object]:
    """A context without gradients or transforms, in which no tensor is one of inference mode."""
    stack = ExitStack()
    stack.enter_context(autograd.outside_transforms())
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))  # which enables gradients
    stack.enter_context(torch.no_grad())
    return stack
