"""A step of Muon on parameters that the same ranks share: who does what, and what is done.

Matrices that are cut over ranks are each made whole on one rank, worked on there, and cut again.

    round 1     gather    compute    scatter
    round 2               gather     compute    scatter
    round 3                          gather     compute    scatter

A gather sends all pieces of a matrix to its owner, a scatter sends its result to all who hold it.
Messages of a round travel while another round is computed, and at most three rounds are in memory.

The Newton-Schulz iteration that orthogonalizes an update is that of Keller Jordan's Muon
(https://kellerjordan.github.io/posts/muon/), as ``torch.optim.Muon`` computes it. The scales of
learning rates are his, and that of "Muon is Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.optim.checked import gradient, shard_of_state
from shardwise.optim.deal import Dealt, DealtRows, Matrix, deal, matrices_of, rounds
from shardwise.optim.part import full_part
from shardwise.optim.pool import RankPool
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label, Work

_MOMENTUM = "momentum_buffer"
#: The dtype of the iteration, and of updates on their way to it and back.
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class MatrixParam:
    """A parameter for Muon in one step.

    Attributes:
        name: its name, for messages.
        param: the parameter.
        shard: this rank's part of it.
        grad: the same part of its gradient.
        momentum: the same part of its momentum.
        settings: of its group.
    """

    name: str
    param: torch.Tensor
    shard: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, name: str, param: torch.Tensor, state: dict[str, Any], settings: Mapping[str, Any]
    ) -> MatrixParam:
        """Take what a step needs of a parameter, and make its momentum before the first step.

        Raises:
            RuntimeError: as in ``torch.optim.Muon``: it is complex, or its gradient is sparse.
            ValueError: the momentum that was loaded does not lie as the parameter does.
        """
        grad = gradient(name, param)
        return cls(
            name=name,
            param=param,
            shard=dtensor.plain(param),
            grad=dtensor.plain(grad),
            momentum=shard_of_state(name, param, _MOMENTUM, state),
            settings=settings,
        )

    @property
    def ns_steps(self) -> int:
        """Iterations of each of its matrices."""
        return int(self.settings["ns_steps"])


_Pieces = tuple[tuple[Matrix, DealtRows], ...]


@dataclass(frozen=True)
class _Round:
    """What one rank sends and receives in a round, by the rank at the other end.

    Attributes:
        own: the matrices that this rank owns.
        sent_to_owners: the pieces that it sends, to be made whole.
        from_holders: pieces of its own matrices.
        sent_to_holders: pieces of its results.
        from_owners: pieces of the results of others: one for each that it holds.
    """

    own: tuple[Matrix, ...]
    sent_to_owners: tuple[_Pieces, ...]
    from_holders: tuple[_Pieces, ...]
    sent_to_holders: tuple[_Pieces, ...]
    from_owners: tuple[_Pieces, ...]

    @classmethod
    def of(cls, dealt: Dealt, rank: int) -> _Round:
        """Return the part of rank ``rank`` in a round."""

        def pieces(owner: int, holder: int) -> _Pieces:
            return tuple((m, m.pieces[holder]) for m in dealt[owner] if holder in m.pieces)

        def sources(owner: int, holder: int) -> _Pieces:
            return tuple(pair for pair in pieces(owner, holder) if holder in senders[pair[0]])

        senders = {matrix: matrix.sources(rank) for rank, own in enumerate(dealt) for matrix in own}
        ranks = range(len(dealt))
        return cls(
            dealt[rank],
            tuple(sources(owner, rank) for owner in ranks),
            tuple(sources(rank, holder) for holder in ranks),
            tuple(pieces(rank, holder) for holder in ranks),
            tuple(pieces(owner, rank) for owner in ranks),
        )


@dataclass(frozen=True)
class MatrixPlan:
    """Who does what for one set of parameters, planned once and done in every step.

    Attributes:
        params: the parameters, which live as long as the plan: no others get their ids.
        alone: the matrices, if this rank does everything.
        rounds: what this rank does in each round, if several ranks share the work.
        all_to_all: moves pieces between these ranks.
        detail: what tells this plan from others, for messages; equal on all ranks.
    """

    params: Sequence[torch.Tensor]
    alone: Sequence[Matrix] = ()
    rounds: Sequence[_Round] = ()
    all_to_all: AllToAll | None = None
    detail: str = ""

    @classmethod
    def of(cls, own: Sequence[MatrixParam], pool: RankPool | None) -> MatrixPlan:
        """Deal out the matrices of parameters."""
        params = [each.param for each in own]
        matrices: list[Matrix] = []
        for number, param in enumerate(params):
            if pool is None:
                parts = {0: full_part(param.shape)}
            else:
                assert isinstance(param, DTensor)
                parts = pool.parts(param)
            matrices += matrices_of(number, param.shape, parts)
        if pool is None:
            return cls(params, alone=matrices)

        def cost(matrix: Matrix) -> int:
            return flops(matrix.shape, own[matrix.param].ns_steps)

        dealt = deal(matrices, len(pool.members), cost)
        in_rounds = rounds(dealt, lambda matrix: matrix.numel * DTYPE.itemsize)
        planned = [_Round.of(each, pool.rank) for each in in_rounds]
        detail = ", ".join(f"{each.name}: {tuple(each.param.shape)}" for each in own)
        return cls(params, rounds=planned, all_to_all=pool.all_to_all, detail=detail)


class Orthogonalization:
    """The work on the matrices of a pool in a step.

    Args:
        plan: who does what.
        own: the parameters of the plan, in this step.
    """

    def __init__(self, plan: MatrixPlan, own: Sequence[MatrixParam]) -> None:
        self._plan = plan
        self._own = own

    def run(self) -> None:
        """Update the parameters. All ranks of the pool call it.

        If it fails on this rank, the others do not wait for it.

        Raises:
            PeerLostError: a peer is lost. Some matrices may have been updated, and others not.
        """
        if self._plan.all_to_all is None:
            for matrix in self._plan.alone:
                whole = self._prepare(matrix, matrix.pieces[0]).to(DTYPE, copy=True)
                self._apply(matrix, matrix.pieces[0], self._compute(matrix, whole.contiguous()))
            return
        try:
            rounds = [self._steps(n, each) for n, each in enumerate(self._plan.rounds)]
            for newest in range(len(rounds) + 2):
                for steps in reversed(rounds[max(0, newest - 2) : newest + 1]):
                    next(steps, None)
        except BaseException:
            self._plan.all_to_all.abandon()
            raise

    def _prepare(self, matrix: Matrix, piece: DealtRows) -> torch.Tensor:
        """Move the momentum toward the gradient, and return the update."""
        param = self._own[matrix.param]
        momentum = param.settings["momentum"]
        grad, average = param.grad[piece.at], param.momentum[piece.at]
        average.lerp_(grad, 1 - momentum)
        return grad.lerp(average, momentum) if param.settings["nesterov"] else average

    def _compute(self, matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
        """Orthogonalize the update."""
        settings = self._own[matrix.param].settings
        return orthogonalize(
            whole, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
        )

    def _apply(self, matrix: Matrix, piece: DealtRows, result: torch.Tensor) -> None:
        """Decay the weights, and add the orthogonal update."""
        param = self._own[matrix.param]
        settings = param.settings
        lr = settings["lr"]
        if isinstance(lr, torch.Tensor):
            lr = lr.squeeze()
        shard = param.shard[piece.at]
        shard.mul_(1 - lr * settings["weight_decay"])
        shard.add_(result, alpha=-(lr * scale(settings["adjust_lr_fn"], matrix.shape)))

    def _steps(self, number: int, each: _Round) -> Iterator[None]:
        """Do a round in three steps, between which its messages travel."""
        sent = self._prepared(each)
        received, work = self._send("gather", number, sent, each.sent_to_owners, each.from_holders)
        del sent
        yield
        work.wait()
        wholes = _joined(each, received)
        del received
        results = {matrix: self._compute(matrix, wholes.pop(matrix)) for matrix in each.own}
        sent = self._cut(each, results)
        received, work = self._send("scatter", number, sent, each.sent_to_holders, each.from_owners)
        del results, sent
        yield
        work.wait()
        for matrix, piece, values in _split(received, each.from_owners):
            self._apply(matrix, piece, values)

    def _send(
        self,
        what: str,
        number: int,
        sent: torch.Tensor,
        to: Sequence[_Pieces],
        from_: Sequence[_Pieces],
    ) -> tuple[torch.Tensor, Work]:
        """Start to send pieces, and return the memory for those that arrive."""
        assert self._plan.all_to_all is not None
        received = sent.new_empty(sum(_sizes(from_)))
        name = f"Muon, {what} {number + 1} of {len(self._plan.rounds)}"
        label = Label(name, self._plan.detail)
        sizes = _sizes(to), _sizes(from_)
        return received, self._plan.all_to_all.start(sent, received, label, sizes=sizes)

    def _prepared(self, each: _Round) -> torch.Tensor:
        """Prepare all pieces that this rank holds, and return those that it sends to owners."""
        sent = self._empty(each.sent_to_owners)
        # In the order of what is sent, which the rest does not depend on.
        parts = {matrix: part for matrix, _, part in _split(sent, each.sent_to_owners)}
        for matrix, piece in itertools.chain(*each.from_owners):
            prepared = self._prepare(matrix, piece)
            if matrix in parts:
                parts[matrix].copy_(prepared)
        return sent

    def _cut(self, each: _Round, results: Mapping[Matrix, torch.Tensor]) -> torch.Tensor:
        """Cut this rank's results into the pieces that it sends to their holders."""
        sent = self._empty(each.sent_to_holders)
        for matrix, piece, out in _split(sent, each.sent_to_holders):
            for mine, its in _blocks(results[matrix], piece, out):
                its.copy_(mine)
        return sent

    def _empty(self, by_rank: Sequence[_Pieces]) -> torch.Tensor:
        device = self._own[0].shard.device
        return torch.empty(sum(_sizes(by_rank)), dtype=DTYPE, device=device)


def _joined(each: _Round, received: torch.Tensor) -> dict[Matrix, torch.Tensor]:
    """Make this rank's matrices whole."""
    wholes = {matrix: received.new_empty(matrix.shape) for matrix in each.own}
    for matrix, piece, values in _split(received, each.from_holders):
        for mine, its in _blocks(wholes[matrix], piece, values):
            mine.copy_(its)
    return wholes


def _sizes(by_rank: Sequence[_Pieces]) -> list[int]:
    return [sum(piece.numel for _, piece in pieces) for pieces in by_rank]


def _split(
    flat: torch.Tensor, by_rank: Sequence[_Pieces]
) -> list[tuple[Matrix, DealtRows, torch.Tensor]]:
    """Return the pieces that lie in a flat tensor, in the order of ranks, and their elements."""
    pairs = list(itertools.chain(*by_rank))
    parts = torch.split(flat, [piece.numel for _, piece in pairs])
    return [(m, piece, p.view(piece.shape)) for (m, piece), p in zip(pairs, parts, strict=True)]


def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about the nearest semi-orthogonal matrix: singular values become about 1.

    The operations are those of ``torch.optim.Muon``, in their order, so that the bits are the same.

    Args:
        matrix: bfloat16, ``(m, n)``, contiguous. It is overwritten.
        coefficients: of the polynomial ``a X + b (X X') X + c (X X')^2 X``.
        steps: how often the polynomial is applied.
        eps: the smallest norm to divide by.

    Returns:
        bfloat16, ``(m, n)``; may be transposed in memory.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def flops(shape: tuple[int, int], steps: int) -> int:
    """Return the floating-point operations of :func:`orthogonalize`."""
    short, long = sorted(shape)
    return steps * (4 * short**2 * long + 2 * short**3)


def scale(adjust_lr_fn: str | None, shape: tuple[int, int]) -> float:
    """Return the factor of the learning rate of a matrix.

    Args:
        adjust_lr_fn: ``"original"`` or ``None``: ``sqrt(max(1, m / n))``; ``"match_rms_adamw"``:
            ``0.2 sqrt(max(m, n))``, so that updates are about as large as those of AdamW.
        shape: ``(m, n)``.
    """
    m, n = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))


def _blocks(
    whole: torch.Tensor, piece: DealtRows, part: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what a whole and a piece of it have in common, block by block: views of both."""
    top = 0
    for row, height in piece.rows:
        left = 0
        for column, width in piece.columns:
            yield (
                whole[row : row + height, column : column + width],
                part[top : top + height, left : left + width],
            )
            left += width
        top += height
