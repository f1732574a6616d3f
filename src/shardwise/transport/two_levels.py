"""Collectives over hosts whose ranks share what crosses the link: once for each host.

    4 ranks on 2 hosts              host 0          host 1
                                 rank 0  rank 1  rank 2  rank 3

    all-gather        across     0 and 2 exchange their shards, and so do 1 and 3
                      inside     0 and 1 give each other what they have now, and so do 2 and 3
    reduce-scatter    inside     0 adds up chunks 0 and 2 over its host, 1 adds up chunks 1 and 3
                      across     0 and 2 exchange these sums, and so do 1 and 3
    all-reduce        inside, across and inside: a reduce-scatter, an all-reduce, an all-gather

Without this, a rank sends its shard to every rank of another host, over one link. What a transport
inside a host does to a full of all ranks, it does here to one part of it for each host: no value is
moved to make the chunks of a host neighbors. Sums inside a host are made in fp32 at least.

The first steps are taken in the call. What follows a wait for another host is left to a runner: the
program waits for its own host at most, and what a rank has called, it also completes, whether or
not it waits. That needs two transports inside the host, each of which is used in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shardwise.transport.base import Call, Transport, Work
from shardwise.transport.buckets import as_rows
from shardwise.transport.codecs import ENCODABLE
from shardwise.transport.memory import Blocks
from shardwise.transport.runner import Runner


class TwoLevelTransport(Transport):
    """A transport between hosts, which may encode, and plain ones inside each of them.

    Rank ``r`` is rank ``r % L`` of the ``L`` ranks of host ``r // L``.

    Args:
        across: between the ranks with this number on all hosts.
        gathers: between the ranks of this host, for what follows a wait.
        reductions: the same, for what a call begins with.
        device: of all tensors.
        runner: takes the steps that follow a wait for another host.

    Attributes:
        across: as given.
        wire: that of ``across``.
    """

    def __init__(
        self,
        across: Transport,
        gathers: Transport,
        reductions: Transport,
        device: torch.device,
        runner: Runner,
    ) -> None:
        self.name = f"{gathers.name}+{across.name}"
        self.rank = across.rank * gathers.world_size + gathers.rank
        self.world_size = across.world_size * gathers.world_size
        self.overlaps_compute = across.overlaps_compute
        self.across = across
        self.wire = across.wire
        self._gathers = gathers
        self._reductions = reductions
        self._hosts = across.world_size
        self._local = gathers.world_size
        self._device = device
        self._runner = runner
        self._blocks = Blocks(device)

    @property
    def overflows(self) -> int:
        """The blocks that this rank has encoded and that decode to no finite numbers."""
        return self.across.overflows

    def as_gathered(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Encode a shard, and decode that; inside a host, decoded values travel."""
        return self.across.as_gathered(shard, dtype)

    def trim(self) -> None:
        """Give back what is kept inside the host."""
        for inside in (self._gathers, self._reductions):
            inside.trim()

    def _all_gather(self, call: Call) -> Work:
        """Gather the shards of this number, then those of all numbers."""
        return self._start(self._gather(call), first=0)

    def _reduce_scatter(self, call: Call) -> Work:
        """Add up inside the host what hosts then exchange: error feedback is for these sums."""
        return self._start(self._scatter(call), first=1)

    def _all_reduce(self, call: Call) -> Work:
        """Add up a part of each tensor inside the host; hosts reduce it; the host shares it."""
        return self._start(self._reduce(call), first=1)

    # The steps of a collective, each of which follows the end of the one before.

    def _gather(self, call: Call) -> Iterator[Work]:
        fulls = call.outputs
        numels = [full.numel() // self._local for full in fulls]
        block, parts = self._blocks.take_for(numels, [full.dtype for full in fulls])
        yield self.across.start(replace(call, outputs=parts))
        yield self._gathers.all_gather(self._by_host(parts), self._by_host(fulls), call.label)
        self._blocks.give_back(block)

    def _scatter(self, call: Call) -> Iterator[Work]:
        fulls, shards = call.inputs, call.outputs
        chunks = [shard.numel() for shard in shards]
        block, sums = self._blocks.take_for(
            [self._hosts * chunk for chunk in chunks],
            [self._dtype_inside(shard) for shard in shards],
        )
        parts: list[torch.Tensor] = []
        lengths: list[int] = []
        disposable: list[int] = []
        for i, (full, chunk) in enumerate(zip(fulls, chunks, strict=True)):
            if i in call.disposable:
                disposable += range(len(parts), len(parts) + self._hosts)
            of_host = [
                full[host * self._local * chunk : (host + 1) * self._local * chunk]
                for host in range(self._hosts)
            ]
            parts += of_host
            # A tail may be missing, so a chunk is complete unless all that follow are missing.
            lengths.append(sum(self._own(part, chunk) for part in of_host))
        inside = replace(
            call, inputs=parts, outputs=self._by_host(sums), of=(), disposable=disposable
        )
        yield self._reductions.start(inside)
        there = [each[:length] for each, length in zip(sums, lengths, strict=True)]
        yield self.across.start(replace(call, inputs=there, disposable=()))
        self._blocks.give_back(block)

    def _reduce(self, call: Call) -> Iterator[Work]:
        tensors = call.outputs
        chunks = [-(-tensor.numel() // self._local) for tensor in tensors]
        block, sums = self._blocks.take_for(
            chunks, [self._dtype_inside(tensor) for tensor in tensors]
        )
        yield self._reductions.reduce_scatter(tensors, sums, call.op, call.label)
        own = [
            each[: self._own(tensor, chunk)]
            for each, tensor, chunk in zip(sums, tensors, chunks, strict=True)
        ]
        yield self.across.start(replace(call, inputs=own, outputs=own))
        # Parts of unequal length are gathered with padding, for which a tensor has no room.
        uneven = [tensor for tensor in tensors if tensor.numel() % self._local]
        padding, padded = self._blocks.take_for(
            [tensor.numel() + self._local - tensor.numel() % self._local for tensor in uneven],
            [tensor.dtype for tensor in uneven],
        )
        landing = iter(padded)
        fulls = [next(landing) if each.numel() % self._local else each for each in tensors]
        yield self._gathers.all_gather(own, fulls, call.label)
        for tensor, full in zip(uneven, padded, strict=True):
            tensor.copy_(full[: tensor.numel()])
        self._blocks.give_back(padding)
        self._blocks.give_back(block)

    def _by_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the part of each host, of one tensor after the other."""
        return [row for tensor in tensors for row in as_rows(tensor, self._hosts)]

    def _own(self, full: torch.Tensor, chunk: int) -> int:
        """Return how many elements of this rank's chunk a full of its host has."""
        return min(max(full.numel() - self._gathers.rank * chunk, 0), chunk)

    def _dtype_inside(self, result: torch.Tensor) -> torch.dtype:
        """Return the dtype of sums inside a host: none that is encoded later is rounded before."""
        is_encoded = self.wire.reduce != "fp32" and result.dtype in ENCODABLE
        return torch.float32 if is_encoded else result.dtype

    def _start(self, steps: Iterator[Work], first: int) -> Work:
        """Start a collective; its first steps wait for this host only."""
        self._runner.catch_up()
        return self._runner.start(steps, self._device, first)
