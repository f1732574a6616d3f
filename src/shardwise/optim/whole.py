"""Matrices that are cut over ranks, each made whole on one rank, worked on there, and cut again.

    round 1     gather    compute    scatter
    round 2               gather     compute    scatter
    round 3                          gather     compute    scatter

A gather sends all pieces of a matrix to its owner, a scatter sends its result to all who hold it.
Messages of a round travel while another round is computed, and at most three rounds are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.optim.deal import Dealt, DealtRows, Matrix
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label, Work

_Pieces = tuple[tuple[Matrix, DealtRows], ...]


class MatrixTask(Protocol):
    """What is done with every matrix.

    Attributes:
        dtype: of what is sent, and of whole matrices.
        device: of the same.
    """

    dtype: torch.dtype
    device: torch.device

    def prepare(self, matrix: Matrix, piece: DealtRows) -> torch.Tensor:
        """Return this rank's piece, of its shape and any dtype. Every holder of one is asked."""

    def compute(self, matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
        """Return the result, of the shape of the whole, which may be overwritten."""

    def apply(self, matrix: Matrix, piece: DealtRows, result: torch.Tensor) -> None:
        """Use this rank's piece of the result, of the shape of the piece."""


def compute_alone(matrices: Sequence[Matrix], task: MatrixTask) -> None:
    """Do all the work on this rank, which holds every matrix as a whole."""
    for matrix in matrices:
        piece = matrix.pieces[0]
        whole = task.prepare(matrix, piece).to(task.dtype, copy=True)
        task.apply(matrix, piece, task.compute(matrix, whole.contiguous()))


class Together:
    """The work of all ranks of a process group, planned once and done in every step.

    Args:
        rounds: the matrices of each rank in each round, equal on all ranks.
        all_to_all: moves pieces between the ranks.
        detail: what tells this plan from others, for messages; equal on all ranks.
    """

    def __init__(self, rounds: Sequence[Dealt], all_to_all: AllToAll, detail: str) -> None:
        self._all_to_all = all_to_all
        self._rounds = [_Round.of(dealt, all_to_all.rank) for dealt in rounds]
        self._detail = detail

    def run(self, task: MatrixTask) -> None:
        """Do the work. All ranks call it.

        If it fails on this rank, the others do not wait for it.

        Raises:
            PeerLostError: a peer is lost. Some matrices may have been applied, and others not.
        """
        try:
            self._run(task)
        except BaseException:
            self._all_to_all.abandon()
            raise

    def _run(self, task: MatrixTask) -> None:
        rounds = [self._steps(number, each, task) for number, each in enumerate(self._rounds)]
        for newest in range(len(rounds) + 2):
            for steps in reversed(rounds[max(0, newest - 2) : newest + 1]):
                next(steps, None)

    def _steps(self, number: int, each: _Round, task: MatrixTask) -> Iterator[None]:
        """Do a round in three steps, between which its messages travel."""
        sent = _prepared(each, task)
        received, work = self._send("gather", number, sent, each.sent_to_owners, each.from_holders)
        del sent
        yield
        work.wait()
        wholes = _joined(each, received)
        del received
        results = {matrix: task.compute(matrix, wholes.pop(matrix)) for matrix in each.own}
        sent = _cut(each, results, task)
        received, work = self._send("scatter", number, sent, each.sent_to_holders, each.from_owners)
        del results, sent
        yield
        work.wait()
        arrived = _split(received, each.from_owners)
        for (matrix, piece), values in zip(each.held, arrived, strict=True):
            task.apply(matrix, piece, values)

    def _send(
        self,
        what: str,
        number: int,
        sent: torch.Tensor,
        to: Sequence[_Pieces],
        from_: Sequence[_Pieces],
    ) -> tuple[torch.Tensor, Work]:
        """Start to send pieces, and return the memory for those that arrive."""
        received = sent.new_empty(sum(_sizes(from_)))
        label = Label(f"Muon, {what} {number + 1} of {len(self._rounds)}", self._detail)
        sizes = _sizes(to), _sizes(from_)
        return received, self._all_to_all.start(sent, received, label, sizes=sizes)


@dataclass(frozen=True)
class _Round:
    """What one rank sends and receives in a round, by the rank at the other end.

    Attributes:
        own: the matrices that this rank owns.
        held: the pieces that it holds, by the rank that owns the matrix.
        sent_to_owners: those of them that it sends.
        from_holders: pieces of its own matrices.
        sent_to_holders: pieces of its results.
        from_owners: pieces of the results of others: one for each that it holds.
    """

    own: tuple[Matrix, ...]
    held: _Pieces
    sent_to_owners: tuple[_Pieces, ...]
    from_holders: tuple[_Pieces, ...]
    sent_to_holders: tuple[_Pieces, ...]
    from_owners: tuple[_Pieces, ...]

    @classmethod
    def of(cls, dealt: Dealt, rank: int) -> _Round:
        """Return the part of rank ``rank`` in a round."""
        ranks = range(len(dealt))
        sources = {matrix: matrix.sources(rank) for matrix in dealt[rank]}
        from_owners = tuple(
            tuple((matrix, matrix.pieces[rank]) for matrix in own if rank in matrix.pieces)
            for own in dealt
        )
        return cls(
            own=dealt[rank],
            held=tuple(pair for pieces in from_owners for pair in pieces),
            sent_to_owners=tuple(
                tuple((matrix, piece) for matrix, piece in pieces if rank in matrix.sources(owner))
                for owner, pieces in enumerate(from_owners)
            ),
            from_holders=tuple(
                tuple(
                    (matrix, sources[matrix][peer])
                    for matrix in dealt[rank]
                    if peer in sources[matrix]
                )
                for peer in ranks
            ),
            sent_to_holders=tuple(
                tuple(
                    (matrix, matrix.pieces[peer]) for matrix in dealt[rank] if peer in matrix.pieces
                )
                for peer in ranks
            ),
            from_owners=from_owners,
        )


def _prepared(each: _Round, task: MatrixTask) -> torch.Tensor:
    """Ask for all pieces that this rank holds, and return those that it sends to owners."""
    sent = _empty(each.sent_to_owners, task)
    parts = iter(_split(sent, each.sent_to_owners))
    is_sent = {matrix for pieces in each.sent_to_owners for matrix, _ in pieces}
    # In the order of what is sent, which the rest does not depend on.
    for matrix, piece in each.held:
        prepared = task.prepare(matrix, piece)
        if matrix in is_sent:
            next(parts).copy_(prepared)
    return sent


def _joined(each: _Round, received: torch.Tensor) -> dict[Matrix, torch.Tensor]:
    """Make this rank's matrices whole."""
    wholes = {matrix: received.new_empty(matrix.shape) for matrix in each.own}
    pieces = [pair for from_one in each.from_holders for pair in from_one]
    arrived = _split(received, each.from_holders)
    for (matrix, piece), values in zip(pieces, arrived, strict=True):
        for mine, its in _blocks(wholes[matrix], piece, values):
            mine.copy_(its)
    return wholes


def _cut(each: _Round, results: Mapping[Matrix, torch.Tensor], task: MatrixTask) -> torch.Tensor:
    """Cut this rank's results into the pieces that it sends to their holders."""
    sent = _empty(each.sent_to_holders, task)
    pieces = [pair for to_one in each.sent_to_holders for pair in to_one]
    for (matrix, piece), out in zip(pieces, _split(sent, each.sent_to_holders), strict=True):
        for mine, its in _blocks(results[matrix], piece, out):
            its.copy_(mine)
    return sent


def _sizes(by_rank: Sequence[_Pieces]) -> list[int]:
    return [sum(piece.numel for _, piece in pieces) for pieces in by_rank]


def _empty(by_rank: Sequence[_Pieces], task: MatrixTask) -> torch.Tensor:
    return torch.empty(sum(_sizes(by_rank)), dtype=task.dtype, device=task.device)


def _split(flat: torch.Tensor, by_rank: Sequence[_Pieces]) -> list[torch.Tensor]:
    """Return the pieces that lie in a flat tensor, in the order of ranks."""
    shapes = [piece.shape for pieces in by_rank for _, piece in pieces]
    parts = torch.split(flat, [m * n for m, n in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


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
