"""The transport of a world of one rank: nothing travels, values are copied and converted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.transport.base import NO_LABEL, FinishedWork, Label, Reduce, Work
from shardwise.transport.memory import OwnMemory


class LocalTransport(OwnMemory):
    """World size 1. Needs no process group; works on any device."""

    name = "local"
    rank = 0
    world_size = 1

    def overlaps_compute(self) -> bool:
        """Return False: the call itself does the work."""
        return False

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Copy every shard into its full, converting to the full's dtype."""
        for shard, full in zip(shards, fulls, strict=True):
            full[: shard.numel()].copy_(shard)
        return FinishedWork()

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Copy every full into its shard, converting to the shard's dtype."""
        for full, shard in zip(fulls, shards, strict=True):
            shard[: full.numel()].copy_(full)
        return FinishedWork()

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Do nothing: the reduction over one rank is the tensor itself."""
        return FinishedWork()
