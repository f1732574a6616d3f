"""Reductions of many small tensors over the ranks that a parameter is cut over."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.optim.norms import all_reduce
from shardwise.transport.peers import Peers


def abandon(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Let others notice that this rank will not make the reductions that they wait for.

    On gloo their waits end with ``PeerLostError`` at once, and the groups are of no more use. On
    other backends they end with the timeout.

    Args:
        groups: the process groups.
        device: of what is reduced.
    """
    for peers in map(Peers, groups):
        if peers.backend(device).sends_messages:
            peers.hang_up()


class Sums:
    """Tensors that are added up over ranks, in one all-reduce for each process group.

    All ranks add the same tensors in the same order.

    Args:
        name: what they are, for reports.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._terms: dict[tuple[dist.ProcessGroup, torch.device, torch.dtype], list[Tensor]] = {}

    def add(self, term: Tensor, groups: Collection[dist.ProcessGroup]) -> Tensor:
        """Add a tensor, which :meth:`run` changes in place.

        Args:
            term: this rank's part; contiguous.
            groups: over which ranks to add up; none: the tensor is the sum already.

        Returns:
            ``term``.
        """
        for group in groups:
            self._terms.setdefault((group, term.device, term.dtype), []).append(term)
        return term

    def run(self) -> None:
        """Add up. All ranks call it.

        Raises:
            PeerLostError: a rank is gone.
        """
        for (group, _, _), terms in self._terms.items():
            flat = torch.cat([term.view(-1) for term in terms])
            if not flat.numel():  # the same on all of these ranks
                continue
            all_reduce(flat, dist.ReduceOp.SUM, Peers(group), self._name)
            parts = torch.split(flat, [term.numel() for term in terms])
            for term, part in zip(terms, parts, strict=True):
                term.view(-1).copy_(part)
        self._terms = {}
