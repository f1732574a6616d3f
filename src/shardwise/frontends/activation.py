"""Activation checkpointing of a module in place."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn
from torch.utils.checkpoint import checkpoint

_Module = TypeVar("_Module", bound=nn.Module)
_MARK = "_shardwise_checkpointed"


def checkpoint_module(module: _Module, *, preserve_rng_state: bool = True) -> _Module:
    """Keep only the inputs of ``module`` for backward, and recompute its activations there.

    Replaces ``module.forward``. The module keeps its identity, class, names and hooks, and batch
    norms inside it update their statistics once. It can be combined with sharding in either order.
    With an ``auto_wrap_policy``:

        def wrapper(module, *args, **kwargs):
            return FullyShardedDataParallel(checkpoint_module(module), *args, **kwargs)

        model = FullyShardedDataParallel(model, auto_wrap_policy=p, auto_wrapper_callable=wrapper)

    Source: ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``.

    Args:
        module: the module. A second call has no effect.
        preserve_rng_state: draw the same random numbers again, for dropout. This saves the state of
            the random number generators in each forward.

    Returns:
        ``module``.
    """
    if _MARK in module.__dict__:
        return module
    inner = module.__dict__.get("forward")  # that of an earlier patch, if there is one

    @functools.wraps(module.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = types.MethodType(type(self).forward, self) if inner is None else inner
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            context_fn=functools.partial(_contexts, self),
            **kwargs,
        )

    # A bound method, so that a deep copy runs the forward of the copy.
    module.__dict__["forward"] = types.MethodType(forward, module)
    module.__dict__[_MARK] = True
    return module


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts around forward and around its recomputation in backward."""
    return contextlib.nullcontext(), _counted_already(module)


@contextlib.contextmanager
def _counted_already(module: nn.Module) -> Iterator[None]:
    """Leave the running statistics of batch norms unchanged."""
    norms = [
        (m, m.momentum, m.num_batches_tracked)
        for m in module.modules()
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
        if m.track_running_stats
    ]
    # A momentum of zero, and not eval(): autograd has to save the same tensors as in forward.
    for norm, _, _ in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, batches in norms:
            norm.momentum, norm.num_batches_tracked = momentum, batches
