"""Activation checkpointing of a module in place."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar

from torch import nn
from torch.utils.checkpoint import checkpoint

_Module = TypeVar("_Module", bound=nn.Module)
_MARK = "_shardwise_checkpointed"


def checkpoint_module(module: _Module, *, preserve_rng_state: bool = True) -> _Module:
    """Let ``module`` keep its inputs only, and compute the rest again in backward.

    The module stays the object it is, of its class, with its names and hooks: only its ``forward``
    is another. So it combines with sharding in either order, and with a policy so:

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
            run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )

    # Bound, so that a deep copy runs the forward of the copy.
    module.__dict__["forward"] = types.MethodType(forward, module)
    module.__dict__[_MARK] = True
    return module
