"""The transport of a dimension of one rank: it copies and converts. The simplest of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.transport.base import NO_LABEL, FinishedWork, Label, Reduce, Work
from shardwise.transport.memory import OwnMemory


class LocalTransport(OwnMemory):
    """Collectives over one rank. They need no process group and work on any device."""

    name = "local"
    rank = 0
    world_size = 1

    def overlaps_compute(self) -> bool:
        """Return False: the call itself does the work."""
        return False

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Copy every shard into its full, in the dtype of the full."""
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
        """Copy every full into its shard, in the dtype of the shard."""
        for full, shard in zip(fulls, shards, strict=True):
            shard[: full.numel()].copy_(full)
        return FinishedWork()

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Do nothing: the reduction over one rank is the tensor itself."""
        return FinishedWork()
