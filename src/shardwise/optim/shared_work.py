"""Work that ranks share: what is cut over them is made whole on one of them, and cut again.

    round 1     gather    compute    scatter
    round 2               gather     compute    scatter
    round 3                          gather     compute    scatter

A gather sends all pieces of a unit to its owner, a scatter sends its result to all who hold it.
Messages of a round travel while another round is computed, and at most three rounds are in memory.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.base import observe
from shardwise.optim.deal import ROUND_BYTES, Dealt, Unit, UnitPart, rounds
from shardwise.optim.pool import RankPool
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label, Work

observe.ALLOCATES[__file__] = observe.Memory.TRANSPORT

#: Sets of parameters with gradients whose plans are kept. With a step in backward, each group of
#: parameters is one.
_PLANS = 512

_Pieces = tuple[tuple[Unit, UnitPart], ...]


@dataclass(frozen=True)
class _Round:
    """What one rank sends and receives in a round, by the rank at the other end.

    Attributes:
        own: the units that this rank owns.
        sent_to_owners: the pieces that it sends, to be made whole.
        from_holders: pieces of its own units.
        sent_to_holders: pieces of its results.
        from_owners: pieces of the results of others: one for each that it holds.
    """

    own: tuple[Unit, ...]
    sent_to_owners: tuple[_Pieces, ...]
    from_holders: tuple[_Pieces, ...]
    sent_to_holders: tuple[_Pieces, ...]
    from_owners: tuple[_Pieces, ...]

    @classmethod
    def of(cls, dealt: Dealt, rank: int) -> _Round:
        """Return the part of rank ``rank`` in a round."""

        def pieces(owner: int, holder: int) -> _Pieces:
            return tuple((u, u.pieces[holder]) for u in dealt[owner] if holder in u.pieces)

        def sources(owner: int, holder: int) -> _Pieces:
            return tuple(pair for pair in pieces(owner, holder) if holder in senders[pair[0]])

        senders = {unit: unit.sources(rank) for rank, own in enumerate(dealt) for unit in own}
        ranks = range(len(dealt))
        return cls(
            dealt[rank],
            tuple(sources(owner, rank) for owner in ranks),
            tuple(sources(rank, holder) for holder in ranks),
            tuple(pieces(rank, holder) for holder in ranks),
            tuple(pieces(owner, rank) for owner in ranks),
        )


@dataclass(frozen=True)
class WorkPlan:
    """Who does what for one set of parameters, planned once and done in every step.

    Attributes:
        params: the parameters, which live as long as the plan: no others get their ids.
        alone: the units, if this rank does everything.
        rounds: what this rank does in each round, if several ranks share the work.
        all_to_all: moves pieces between these ranks.
        detail: what tells this plan from others, for messages; equal on all ranks.
    """

    params: Sequence[torch.Tensor]
    alone: Sequence[Unit] = ()
    rounds: Sequence[_Round] = ()
    all_to_all: AllToAll | None = None
    detail: str = ""

    @classmethod
    def shared(
        cls,
        named: Sequence[tuple[str, torch.Tensor]],
        dealt: Dealt,
        pool: RankPool,
        nbytes: Callable[[Unit], int],
        limit: int = ROUND_BYTES,
    ) -> WorkPlan:
        """Plan what the ranks of a pool do; the arguments are those of :func:`rounds`."""
        planned = [_Round.of(each, pool.rank) for each in rounds(dealt, nbytes, limit)]
        detail = ", ".join(f"{name}: {tuple(param.shape)}" for name, param in named)
        params = [param for _, param in named]
        return cls(params, rounds=planned, all_to_all=pool.all_to_all, detail=detail)


class WorkPlans:
    """The plans of earlier steps, by what they depend on."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], WorkPlan] = {}

    def get(self, key: tuple[object, ...], make: Callable[[], WorkPlan]) -> WorkPlan:
        """Return a plan, the same as in earlier steps with the same ``key``."""
        plan = self._made.pop(key, None)
        if plan is None:
            plan = make()
            if len(self._made) >= _PLANS:
                del self._made[next(iter(self._made))]
        self._made[key] = plan  # the last one used is the last to be forgotten
        return plan


class SharedWork(abc.ABC):
    """The work on the units of a pool in a step.

    Args:
        plan: who does what.
        name: whose work it is, for reports and errors.
        dtype: of what travels.
        device: of what travels.
        layers: how many tensors of a unit travel to its owner; one comes back.

    Attributes:
        plan: who does what.
    """

    def __init__(
        self, plan: WorkPlan, name: str, dtype: torch.dtype, device: torch.device, layers: int = 1
    ) -> None:
        self.plan = plan
        self._name = name
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._layers = layers

    @abc.abstractmethod
    def _prepare(self, unit: Unit, piece: UnitPart) -> Sequence[torch.Tensor]:
        """Return this rank's piece of each of the tensors that the owner needs."""

    @abc.abstractmethod
    def _compute(self, wholes: dict[Unit, list[torch.Tensor]]) -> dict[Unit, torch.Tensor]:
        """Return the results of a round from the layers of each unit."""

    @abc.abstractmethod
    def _apply(self, unit: Unit, piece: UnitPart, result: torch.Tensor) -> None:
        """Use this rank's piece of a result."""

    def run(self) -> None:
        """Do the work. All ranks of the pool call it.

        If it fails on this rank, the others do not wait for it.

        Raises:
            PeerLostError: a peer is lost. Some units may have been updated, and others not.
        """
        assert self.plan.all_to_all is not None
        try:
            rounds = [self._steps(n, each) for n, each in enumerate(self.plan.rounds)]
            for newest in range(len(rounds) + 2):
                for steps in reversed(rounds[max(0, newest - 2) : newest + 1]):
                    next(steps, None)
        except BaseException:
            self.plan.all_to_all.abandon()
            raise

    def _steps(self, number: int, each: _Round) -> Iterator[None]:
        """Do a round in three steps, between which its messages travel."""
        layers = self._layers
        sent = self._prepared(each)
        to_owners = each.sent_to_owners, each.from_holders
        received, work = self._send("gather", number, sent, *to_owners, layers)
        del sent
        yield
        work.wait()
        wholes = _joined(each, received, layers)
        del received
        results = self._compute(wholes)
        sent = self._cut(each, results)
        to_holders = each.sent_to_holders, each.from_owners
        received, work = self._send("scatter", number, sent, *to_holders, 1)
        del wholes, results, sent
        yield
        work.wait()
        for unit, piece, (values,) in _split(received, each.from_owners, 1):
            self._apply(unit, piece, values)

    def _send(
        self,
        what: str,
        number: int,
        sent: torch.Tensor,
        to: Sequence[_Pieces],
        from_: Sequence[_Pieces],
        layers: int,
    ) -> tuple[torch.Tensor, Work]:
        """Start to send pieces, and return the memory for those that arrive."""
        assert self.plan.all_to_all is not None
        sizes = _sizes(to, layers), _sizes(from_, layers)
        received = sent.new_empty(sum(sizes[1]))
        name = f"{self._name}, {what} {number + 1} of {len(self.plan.rounds)}"
        label = Label(name, self.plan.detail)
        return received, self.plan.all_to_all.start(sent, received, label, sizes=sizes)

    def _prepared(self, each: _Round) -> torch.Tensor:
        """Prepare all pieces that this rank holds, and return those that it sends to owners."""
        sent = self._like.new_empty(sum(_sizes(each.sent_to_owners, self._layers)))
        # In the order of what is sent, which the rest does not depend on.
        split = _split(sent, each.sent_to_owners, self._layers)
        parts = {unit: part for unit, _, part in split}
        for unit, piece in itertools.chain(*each.from_owners):
            prepared = self._prepare(unit, piece)
            if unit in parts:
                for mine, its in zip(parts[unit], prepared, strict=True):
                    mine.copy_(its)
        return sent

    def _cut(self, each: _Round, results: Mapping[Unit, torch.Tensor]) -> torch.Tensor:
        """Cut this rank's results into the pieces that it sends to their holders."""
        sent = self._like.new_empty(sum(_sizes(each.sent_to_holders, 1)))
        for unit, piece, out in _split(sent, each.sent_to_holders, 1):
            for mine, its in _blocks(results[unit], piece, out[0]):
                its.copy_(mine)
        return sent


def _joined(each: _Round, received: torch.Tensor, layers: int) -> dict[Unit, list[torch.Tensor]]:
    """Make this rank's units whole, layer by layer."""
    wholes = {unit: [received.new_empty(unit.shape) for _ in range(layers)] for unit in each.own}
    for unit, piece, values in _split(received, each.from_holders, layers):
        for whole, part in zip(wholes[unit], values, strict=True):
            for mine, its in _blocks(whole, piece, part):
                mine.copy_(its)
    return wholes


def _sizes(by_rank: Sequence[_Pieces], layers: int) -> list[int]:
    return [layers * sum(piece.numel for _, piece in pieces) for pieces in by_rank]


def _split(
    flat: torch.Tensor, by_rank: Sequence[_Pieces], layers: int
) -> list[tuple[Unit, UnitPart, torch.Tensor]]:
    """Return the pieces that lie in a flat tensor, in the order of ranks, and their elements."""
    pairs = list(itertools.chain(*by_rank))
    parts = torch.split(flat, [layers * piece.numel for _, piece in pairs])
    return [
        (unit, piece, part.view(layers, *piece.shape))
        for (unit, piece), part in zip(pairs, parts, strict=True)
    ]


def _blocks(
    whole: torch.Tensor, piece: UnitPart, part: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what a whole and a piece of it have in common, block by block: views of both."""
    ends = [itertools.accumulate(length for _, length in spans) for spans in piece.spans]
    for block in itertools.product(*map(zip, piece.spans, ends)):
        yield (
            whole[tuple(slice(first, first + length) for (first, length), _ in block)],
            part[tuple(slice(end - length, end) for (_, length), end in block)],
        )
