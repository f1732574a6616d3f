"""Reductions of small tensors over the ranks that a parameter is cut over."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base import observe
from shardwise.base.observe import Activity
from shardwise.transport.carrier import carrier
from shardwise.transport.peers import Peers


def groups_cutting(
    param: torch.Tensor, dims: Collection[int] | None = None
) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups of the mesh dimensions that cut a parameter, of two or more ranks.

    Args:
        param: the parameter, sharded or not.
        dims: the dimensions of the parameter that count; ``None``: all.
    """
    if not isinstance(param, DTensor):
        return ()
    mesh, cut = param.device_mesh, []
    for n, placement in enumerate(param.placements):
        dim = dtensor.sharded_dim(placement)
        if dim is not None and mesh.size(n) > 1 and (dims is None or dim in dims):
            cut.append(n)
    groups = tuple(mesh.get_group(n) for n in cut)
    if observe.is_observed() and mesh.mesh_dim_names:
        for n, group in zip(cut, groups, strict=True):
            Peers(group).name_dimension(mesh.mesh_dim_names[n])
    return groups


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


_EXTREMES = (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _integers_of(floats: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Return integers in the order of floats, with NaN at the end that ``op`` chooses.

    Backends compare floats, and no number is greater or less than NaN. So gloo keeps a NaN of the
    rank that reduces the element, and hides that of any other.

    Args:
        floats: float32 or float64, contiguous.
        op: ``MAX`` or ``MIN``.
    """
    integer = _INTEGERS[floats.dtype]
    ends = torch.iinfo(integer)
    ordered = _flip_negative(floats.view(integer))
    return ordered.masked_fill_(floats.isnan(), ends.max if op == _EXTREMES[0] else ends.min)


def _flip_negative(integers: Tensor) -> Tensor:
    """Flip all bits but the sign of negative numbers: floats have the other order there."""
    ends = torch.iinfo(integers.dtype)
    return integers ^ ((integers >> (ends.bits - 1)) & ends.max)


class Reductions:
    """Tensors that are reduced over ranks, in one all-reduce for each process group.

    All ranks add the same tensors in the same order.

    Args:
        name: what they are, for reports and errors.
        op: how values are reduced. ``MAX`` and ``MIN`` are NaN where any rank has NaN.
    """

    def __init__(self, name: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        self._name = name
        self._op = op
        self._terms: dict[tuple[dist.ProcessGroup, torch.device, torch.dtype], list[Tensor]] = {}

    def add(self, term: Tensor, groups: Collection[dist.ProcessGroup]) -> Tensor:
        """Add a tensor, which :meth:`run` changes in place.

        Args:
            term: this rank's part; contiguous.
            groups: over which ranks to reduce it; none: it is the result already.

        Returns:
            ``term``.
        """
        for group in groups:
            self._terms.setdefault((group, term.device, term.dtype), []).append(term)
        return term

    def run(self) -> None:
        """Reduce all tensors. All ranks call it.

        Raises:
            PeerLostError: a rank is gone.
        """
        for (group, _, _), terms in self._terms.items():
            flat = torch.cat([term.view(-1) for term in terms])
            if not flat.numel():  # the same on all of these ranks
                continue
            peers, number = Peers(group), 0
            if observe.is_observed():
                wire = peers.wire(carrier().backend(peers, flat.device).name)
                number = observe.collective(Activity.ALL_REDUCE, self._name, wire, flat.nbytes, 1)
            with (
                peers.collective(f"the all-reduce of {self._name}"),
                observe.during(Activity.WAIT, self._name, peers.dimension),
            ):
                sent = _integers_of(flat, self._op) if self._op in _EXTREMES else flat
                dist.all_reduce(sent, op=self._op, group=group)
                flat = flat if sent is flat else _flip_negative(sent).view(flat.dtype)
            observe.end(number)
            parts = torch.split(flat, [term.numel() for term in terms])
            for term, part in zip(terms, parts, strict=True):
                term.view(-1).copy_(part)
        self._terms = {}
