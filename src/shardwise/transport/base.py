"""The seam between sharding and the wire: lists of tensors in, lists of tensors out.

A transport belongs to one dimension of a mesh. It knows tensors and ranks, nothing of modules.
How bytes travel (one launch or many, packed or from where they lie, over a socket or through
memory) is its own business.

All tensors that cross the seam are one-dimensional and contiguous. *Full* tensors are cut into
``world_size`` equal *chunks*; only the tail of the last non-empty chunks may be padding:

    7 elements over 3 ranks, chunk = 3

        full    | 0 1 2 | 3 4 5 | 6 . . |        3 chunks = 9 elements, two of them padding
        shard     rank 0   rank 1  rank 2         3, 3 and 1 elements hold data

Two dtypes may meet at one call: what is stored, and what is asked for. The transport converts
where it is cheapest, so that what travels need not be what is stored.

The two kinds of work that transports hand out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


class Reduce(enum.Enum):
    """How the contributions of the ranks become one value."""

    SUM = "sum"
    AVG = "avg"


@dataclass(frozen=True)
class Label:
    """What the caller of a collective calls it, for messages and to compare ranks by.

    Attributes:
        name: such as ``"model.layers.3"``.
        detail: one line for each tensor, such as ``"model.layers.3.weight: (4, 4) float32"``.
    """

    name: str = ""
    detail: str = ""


NO_LABEL = Label()


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return once the results may be used (on CUDA: by the current stream).

        Until then the caller keeps every tensor of the call alive, unchanged and in its memory
        (a storage that is resized meanwhile is written to where it was). Waiting a second time
        does nothing, or raises the same error again.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
        """


class FullBuffers(Protocol):
    """Memory for the full parameters of one group, allocated and freed many times.

    ``tensors`` are the same objects for life, and views of them stay valid (autograd saves such
    views for backward). Between :meth:`free` and the next :meth:`allocate` they have no memory:
    reading them ends the process, as with any memory that is gone. Their contents are undefined
    after :meth:`allocate`. All ranks allocate and free in the same order, as the memory may be
    shared.
    """

    tensors: list[torch.Tensor]

    def allocate(self) -> None:
        """Give every tensor its memory. Does nothing where it has it already."""

    def free(self) -> None:
        """Give the memory back. Does nothing where it is already given back."""

    def abandon(self) -> None:
        """As :meth:`free`, after a gather that was not waited for: unless it may still write."""


@runtime_checkable
class Transport(Protocol):
    """Moves bytes between the ranks of one mesh dimension.

    Every rank of the dimension makes the same calls in the same order, with lists of the same
    length, equal dtypes, and fulls and chunks of equal sizes. Calls return before the bytes have
    moved. Writing to a tensor bumps its autograd version counter, as any write does.
    """

    name: str
    rank: int
    world_size: int
    #: Whether collectives go on while nobody waits for them, as they do over a network.
    runs_behind: bool

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Make (not yet allocated) memory that :meth:`all_gather` can gather into."""

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Gather ``shards[i]`` of every rank into ``fulls[i]``, with the values of now.

        What is written to a shard after the wait, on any rank, does not reach ``fulls``.

        Args:
            shards: 1-D, at most ``chunk_i`` elements (fewer, or none, where rows ran out); of any
                dtype: values are converted to the dtype of ``fulls[i]``. May be host tensors
                where ``fulls`` are device tensors.
            fulls: 1-D, ``world_size * chunk_i`` elements, allocated. After the wait, the first
                elements of chunk ``r`` are rank ``r``'s shard; padding is undefined.
            label: what the caller calls it; equal on all ranks, or they have diverged.
        """

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Reduce chunk ``r`` of ``fulls[i]`` over all ranks into rank ``r``'s ``shards[i]``.

        Args:
            fulls: 1-D, at most ``world_size * chunk_i`` elements: a missing tail is padding. Read
                only; must stay alive until the wait.
            shards: 1-D, exactly ``chunk_i`` elements. Their dtype is the dtype of the reduction:
                contributions are converted to it before they are added, in the order of ranks.
                Elements past the end of ``fulls[i]`` are undefined.
            op: ``SUM``, or ``AVG`` (the sum divided by ``world_size``).
            label: as in :meth:`all_gather`.
        """

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Reduce every tensor over all ranks, in place, in its own dtype."""


class FinishedWork:
    """A collective that was over when its call returned."""

    def wait(self) -> None:
        """Return at once."""


class PendingWork:
    """A collective that ``finish`` completes in the thread that waits.

    ``finish`` holds every tensor of the call, so that the memory lives as long as messages read
    or write it. It is let go once it has succeeded, and never called again: a work that failed
    stays failed.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._failure: BaseException | None = None
        self._then: Callable[[], object] | None = None

    def then(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called once this has succeeded."""
        self._then = callback

    def wait(self) -> None:
        """Complete the collective, the first time.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
        """
        if self._failure is not None:
            raise self._failure
        if self._finish is not None:
            try:
                self._finish()
            except BaseException as error:
                self._failure = error
                raise
            self._finish = None
            if self._then is not None:
                self._then()
