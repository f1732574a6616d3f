"""The transport of a dimension of one rank: it copies and converts. The simplest of all."""

from __future__ import annotations

from shardwise.transport.base import Call, FinishedWork, Transport, Work


class LocalTransport(Transport):
    """Collectives over one rank. They need no process group and work on any device."""

    name = "local"
    rank = 0
    world_size = 1

    def overlaps_compute(self) -> bool:
        """Return False: the call itself does the work."""
        return False

    def _all_gather(self, call: Call) -> Work:
        """Copy every shard into its full, in the dtype of the full."""
        for shard, full in zip(call.inputs, call.outputs, strict=True):
            full[: shard.numel()].copy_(shard)
        return FinishedWork()

    def _reduce_scatter(self, call: Call) -> Work:
        """Copy every full into its shard, in the dtype of the shard."""
        for full, shard in zip(call.inputs, call.outputs, strict=True):
            shard[: full.numel()].copy_(full)
        return FinishedWork()

    def _all_reduce(self, call: Call) -> Work:
        """Do nothing: the reduction over one rank is the tensor itself."""
        return FinishedWork()
