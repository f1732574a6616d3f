"""Gradients of a group that are on no way yet: full ones, and those that are reduced in part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.sharding.options import GroupOptions
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.precision import Precision


class Partial:
    """Gradients that are reduced over the shard dimension only, waiting for the all-reduce."""

    def __init__(self) -> None:
        self._shards: dict[ShardedParam, torch.Tensor] = {}

    def add(self, param: ShardedParam, shard: torch.Tensor) -> None:
        """Add ``shard`` to what ``param`` has."""
        if param in self._shards:
            self._shards[param] += shard
        else:
            self._shards[param] = shard

    def __contains__(self, param: ShardedParam) -> bool:
        return param in self._shards

    def take(self, param: ShardedParam) -> torch.Tensor | None:
        """What ``param`` has, once."""
        return self._shards.pop(param, None)

    def clear(self) -> None:
        """Forget everything."""
        self._shards.clear()


class Unreduced:
    """What backwards have left of gradients, until a reduction takes them.

    Args:
        params: the parameters of the group.
        precision: in which dtypes gradients add up.

    Attributes:
        partial: those that have been reduced over the shard dimension only.
    """

    def __init__(self, params: Sequence[ShardedParam], precision: Precision) -> None:
        self.partial = Partial()
        self._params = params
        self._precision = precision

    def take(self, options: GroupOptions) -> tuple[list[ShardedParam], list[torch.Tensor]]:
        """Take the full gradients, once; with synchronisation off, none: they add up here.

        Returns:
            The parameters that have one, or are to have zeros, and those gradients.
        """
        params: list[ShardedParam] = []
        grads: list[torch.Tensor] = []
        if not options.requires_gradient_sync:
            for param in self._params:
                param.hold_grad(self._precision.reduce_dtype(param.dtype))
            return params, grads
        for param in self._params:
            grad = param.take_grad()
            # What earlier backwards reduce-scattered only is completed also where this one adds
            # none.
            completes = options.requires_all_reduce and param in self.partial
            if grad is None and (completes or options.reduce_scatter_unused_params):
                grad = param.zero_grad(of_frozen=completes)  # frozen since, maybe
            if grad is not None:
                params.append(param)
                grads.append(grad)
        return params, grads

    def drop(self) -> None:
        """Forget them all."""
        self.partial.clear()
        for param in self._params:
            param.held_grad = None
            if param.full is not None:
                param.full.grad = None
