"""Shardwise in place of torch's own FSDP2, in programs written for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shardwise._torch import fsdp
from shardwise.compat import fsdp2

_FUNCTIONS = (
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)


@contextmanager
def patch_torch() -> Iterator[None]:
    """Inside, torch's FSDP2 functions are Shardwise's, wherever they have been imported to.

    A library that says ``from torch.distributed.fsdp import fully_shard`` then shards with
    Shardwise, whether it was imported before or is imported inside:

        with shardwise.patch_torch():
            model = accelerator.prepare(model)

    What is replaced: ``fully_shard``, ``register_fsdp_forward_method``, ``share_comm_ctx``,
    ``get_cls_to_fsdp_cls`` and ``disable_fsdp_module_new_init``, in every module that has one of
    them as a global. Classes stay: policies are shared, and a module that Shardwise sharded is an
    instance of torch's ``FSDPModule``. When the block ends everything is as it was; models that
    were sharded inside stay so. The replacement is seen by all threads of the process.
    """
    torchs = fsdp.fsdp2_functions(_FUNCTIONS)
    lent = {name: _lend(getattr(fsdp2, name)) for name in torchs}
    _swap({id(torchs[name]): lent[name] for name in torchs})
    try:
        yield
    finally:
        _swap({id(lent[name]): torchs[name] for name in torchs})


def _lend(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as another object, by which those that have borrowed it are known."""

    @functools.wraps(function)
    def lent(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return lent


def _swap(replacements: dict[int, Callable[..., Any]]) -> None:
    """Replace functions, by identity, in every module that has them as globals."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, name, replacements[id(value)])
