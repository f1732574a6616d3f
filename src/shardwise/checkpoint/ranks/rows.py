"""Parts of tensors that travel from rank to rank, many of them in one all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.base.boxes import Box, narrow
from shardwise.base.errors import CheckpointError, PeerLostError
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.transport.base import Label

_ALIGNED = 16  # bytes, so that elements of any dtype can be viewed where they are packed


@dataclass(frozen=True)
class RoutedRows:
    """A part of a tensor, and the ranks that it goes from and to.

    Attributes:
        name: of the tensor.
        dtype: in which it travels.
        box: which part of the tensor it is.
        source: the rank that has it.
        target: the rank that needs it.
        held: the part of the tensor that the source has.
        needed: the part of the tensor that the target gathers.
    """

    name: str
    dtype: torch.dtype
    box: Box
    source: int
    target: int
    held: Box
    needed: Box

    @property
    def travels(self) -> bool:
        """Whether it is sent, and not just copied."""
        return self.source != self.target

    @property
    def nbytes(self) -> int:
        """The bytes that it takes on its way."""
        return -(-self.box.numel * self.dtype.itemsize // _ALIGNED) * _ALIGNED


class RowExchange:
    """What moves rows from the ranks that have them to those that need them.

    A rank that cannot read or write its rows goes on until the next time that all ranks agree: the
    others wait for its messages.

    Args:
        ranks: who takes part.
        doing: what the ranks do, for error messages.
        at_source: returns the tensor ``held`` of rows on the rank that has it.
        at_target: returns the tensor ``needed`` of rows on the rank that needs it.
        room: bytes that a rank sends or receives at once, at most.
    """

    def __init__(
        self,
        ranks: Ranks,
        doing: str,
        at_source: Callable[[RoutedRows], Tensor],
        at_target: Callable[[RoutedRows], Tensor],
        room: int,
    ) -> None:
        self._ranks = ranks
        self._doing = doing
        self._at_source, self._at_target = at_source, at_target
        self._failed: Exception | None = None
        # Memory is taken from the system page by page, when it is written to.
        self._memory = torch.empty(2, room, dtype=torch.uint8, device="cpu")

    def check(self) -> None:
        """Raise what has failed on this rank."""
        if self._failed is not None:
            raise self._failed

    def attempt(self, part: Callable[[], object]) -> None:
        """Do something on this rank, and remember if that fails."""
        try:
            part()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Remember that something has failed on this rank, unless something has before."""
        self._failed = self._failed or error

    def send(self, rows: Sequence[RoutedRows]) -> None:
        """Bring rows to their targets. All ranks call this, with the same rows.

        Raises:
            CheckpointError: a rank was lost.
        """
        me, sizes = self._ranks.rank, range(self._ranks.size)
        kept = [each for each in rows if each.source == each.target == me]
        self.attempt(lambda: [self._into(each).copy_(self._out_of(each)) for each in kept])
        rows = [each for each in rows if each.travels]
        if not rows:
            return
        leaving = sorted((each for each in rows if each.source == me), key=lambda r: r.target)
        landing = sorted((each for each in rows if each.target == me), key=lambda r: r.source)
        counts = (
            [sum(each.nbytes for each in leaving if each.target == rank) for rank in sizes],
            [sum(each.nbytes for each in landing if each.source == rank) for rank in sizes],
        )
        sent, received = (
            memory[: sum(its)] for memory, its in zip(self._memory, counts, strict=True)
        )
        self.attempt(lambda: [p.copy_(self._out_of(each)) for each, p in _packed(leaving, sent)])
        label = Label(f"{self._doing}, {rows[0].name} to {rows[-1].name}", str(len(rows)))
        try:
            self._ranks.all_to_all().start(sent, received, label, sizes=counts).wait()
        except PeerLostError as error:
            raise CheckpointError(f"{self._doing}: {error}") from error
        self.attempt(lambda: [self._into(each).copy_(p) for each, p in _packed(landing, received)])

    def _out_of(self, rows: RoutedRows) -> Tensor:
        return narrow(self._at_source(rows), rows.box.relative_to(rows.held.offsets))

    def _into(self, rows: RoutedRows) -> Tensor:
        return narrow(self._at_target(rows), rows.box.relative_to(rows.needed.offsets))


def _packed(rows: list[RoutedRows], memory: Tensor) -> Iterator[tuple[RoutedRows, Tensor]]:
    at = 0
    for each in rows:
        flat = memory[at : at + each.box.numel * each.dtype.itemsize]
        yield each, flat.view(each.dtype).view(each.box.sizes)
        at += each.nbytes
