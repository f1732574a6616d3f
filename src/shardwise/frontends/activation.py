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
    """Let ``module`` keep its inputs only, and compute the rest again in backward.

    The module stays the object it is, of its class, with its names and hooks: only its ``forward``
    is another. Batch norms in it see everything twice, and count it once. It combines with sharding
    in either order, and with a policy so:

        def wrapper(module, *args, **kwargs):
            return FullyShardedDataParallel(checkpoint_module(module), *args, **kwargs)

        model = FullyShardedDataParallel(model, auto_wrap_policy=p, auto_wrapper_callable=wrapper)

    Args:
        module: the module; a second call changes nothing.
        preserve_rng_state: draw the same random numbers again (dropout), at the price of saving the
            state of the generators.

    Returns:
        ``module``.
    """
    if _MARK in module.__dict__:
        return module
    inner = module.__dict__.get("forward")  # of an earlier patch, else that of the class

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

    # Bound, so that a deep copy runs the forward of the copy.
    module.__dict__["forward"] = types.MethodType(forward, module)
    module.__dict__[_MARK] = True
    return module


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around forward, and around the same again in backward."""
    return contextlib.nullcontext(), _counted_already(module)


@contextlib.contextmanager
def _counted_already(module: nn.Module) -> Iterator[None]:
    """Leave the running statistics of batch norms as they are."""
    norms = [
        (m, m.momentum, m.num_batches_tracked)
        for m in module.modules()
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
        if m.track_running_stats
    ]
    # Moved by nothing, and not by switching them off: autograd saves them, as it did in forward.
    for norm, _, _ in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, batches in norms:
            norm.momentum, norm.num_batches_tracked = momentum, batches
