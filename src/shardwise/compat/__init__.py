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
    """Replace torch's FSDP2 functions with Shardwise's, wherever they have been imported.

    A library that does ``from torch.distributed.fsdp import fully_shard`` then shards with
    Shardwise, whether it was imported before or is imported inside:

        with shardwise.patch_torch():
            model = accelerator.prepare(model)

    These are replaced in every module that has one of them as a global: ``fully_shard``,
    ``register_fsdp_forward_method``, ``share_comm_ctx``, ``get_cls_to_fsdp_cls`` and
    ``disable_fsdp_module_new_init``. Classes stay: policies are shared, and a module that Shardwise
    has sharded is an instance of torch's ``FSDPModule``. When the block ends, everything is as
    before; models that were sharded inside stay so. All threads of the process see the replacement.
    """
    originals = fsdp.fsdp2_functions(_FUNCTIONS)
    ours = {name: _distinct(getattr(fsdp2, name)) for name in originals}
    _replace({id(originals[name]): ours[name] for name in originals})
    try:
        yield
    finally:
        _replace({id(ours[name]): originals[name] for name in originals})


def _distinct(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a distinct object that calls ``function``, to find later what was replaced."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _replace(replacements: dict[int, Callable[..., Any]]) -> None:
    """Replace functions, by identity, in every module that has them as globals."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, name, replacements[id(value)])
