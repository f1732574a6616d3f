"""Shardwise in place of torch's own FSDP2 and FSDP1, in programs written for them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed.fsdp

from shardwise._torch import fsdp
from shardwise.compat import fsdp2
from shardwise.frontends.fsdp import FullyShardedDataParallel

__all__ = ["patch_torch"]

_FUNCTIONS = [name for name in fsdp2.__all__ if not isinstance(getattr(fsdp2, name), type)]
#: Distinct classes, to find later what was replaced; the same in all blocks, for ``isinstance``.
_CLASSES = {cls.__name__: type(cls.__name__, (cls,), {}) for cls in (FullyShardedDataParallel,)}
#: The modules of torch that programs import FSDP1 from. Its others need their own class: those of
#: its checkpoints take an instance for a model of flat parameters.
_FSDP1_HOMES = ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel")


@contextmanager
def patch_torch() -> Iterator[None]:
    """Replace torch's FSDP2 functions and its FSDP1 with Shardwise's, wherever imported.

    A library that does ``from torch.distributed.fsdp import fully_shard`` then shards with
    Shardwise, whether it was imported before or is imported inside:

        with shardwise.patch_torch():
            model = accelerator.prepare(model)

    These are replaced in every module that has one of them as a global: ``fully_shard``,
    ``register_fsdp_forward_method``, ``share_comm_ctx``, ``get_cls_to_fsdp_cls`` and
    ``disable_fsdp_module_new_init``; and the class ``FullyShardedDataParallel`` of FSDP1, in every
    module that is not torch's own. Other classes stay: policies are shared, and a module that
    Shardwise has sharded is an instance of torch's ``FSDPModule``. When the block ends, everything
    is as before; models that were sharded inside stay so. All threads of the process are affected.

    A program for FSDP1 asks whether a model is an instance of that class whenever it clips, saves
    or loads. So run all of it inside the block, and no model that torch's own FSDP1 has wrapped.
    """
    originals: dict[str, Any] = {name: getattr(torch.distributed.fsdp, name) for name in _CLASSES}
    originals |= fsdp.fsdp2_functions(_FUNCTIONS)
    ours = {name: _CLASSES.get(name) or _distinct(getattr(fsdp2, name)) for name in originals}
    try:
        _replace({id(originals[name]): ours[name] for name in originals})
        yield
    finally:
        _replace({id(ours[name]): originals[name] for name in originals})


def _distinct(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a distinct object that calls ``function``, to find later what was replaced."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _replace(replacements: dict[int, Any]) -> None:
    """Replace functions and classes, by identity, in the modules that have them as globals."""
    for module in [each for each in sys.modules.values() if isinstance(each, ModuleType)]:
        keeps_classes = module.__name__.startswith("torch.") and module.__name__ not in _FSDP1_HOMES
        for name, value in list(vars(module).items()):
            if id(value) in replacements and not (keeps_classes and isinstance(value, type)):
                setattr(module, name, replacements[id(value)])
