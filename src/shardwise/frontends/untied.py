"""Parameters that were tied until the model went to the meta device.

``model.to("meta")`` makes a new parameter for each name, so what was tied is sharded twice, gets
the same values twice, and then trains apart; an optimizer made before has only one of the two.
``transformers`` ties its models again. Accelerate moves others, too, with its
``cpu_ram_efficient_loading``.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from shardwise._torch import dtensor
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.state import groups_of

_SAMPLE = 1024  # elements that are compared first


def warn_of_untied(module: nn.Module, _: object) -> None:
    """Warn of parameters with equal values that came from the meta device; a hook.

    Vectors, and tensors whose elements are all equal, may have equal values by chance.

    Args:
        module: what ``fully_shard`` was applied to; a state dict has just been loaded into it.
    """
    forms = dict.fromkeys(param.form for group in groups_of(module) for param in group.params)
    names = {param: name for name, param in module.named_parameters()}
    found: dict[Hashable, ShardedParam] = {}
    for form in [form for form in forms if form.is_new]:
        key = _sample(form.local)
        other = None if key is None else found.setdefault(key, form)
        if other not in (None, form) and torch.equal(form.local, other.local):
            form.is_new = False  # an outer module has the hook, too
            one, two = sorted(names.get(each.parameter, each.fqn) for each in (other, form))
            warnings.warn(
                f"{one} and {two} got equal values as they left the meta device, and "
                "are two parameters. If they were tied before, tie them again between "
                'model.to("meta") and fully_shard, in a method tie_weights() if Accelerate does '
                "both: else they train apart, and an optimizer made before has one of them",
                stacklevel=2,
            )


def _sample(local: torch.Tensor) -> Hashable | None:
    """What two shards with equal values have in common; ``None`` if values say nothing."""
    if local.ndim < 2 or not local.numel() or not dtensor.has_memory(local):
        return None
    flat = local.detach().reshape(-1)
    some = flat[:: -(-flat.numel() // _SAMPLE)].cpu()
    values: Any = some.contiguous().view(torch.uint8).numpy().tobytes()
    return None if bool((some == some[0]).all()) else (local.shape, local.dtype, values)
