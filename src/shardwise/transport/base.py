"""The contract between sharding and the wire: lists of tensors in, lists of tensors out.

A transport serves one dimension of a device mesh. It knows tensors and ranks, and nothing about
modules. How the bytes travel (in one launch or many, packed or in place, through a socket or
through memory) is its own business.

All tensors that cross this seam are one-dimensional and contiguous. A *full* tensor consists of
``world_size`` *chunks* of equal size, one per rank. Only the tail may be padding:

    7 elements over 3 ranks, chunk = 3

        full    | 0 1 2 | 3 4 5 | 6 . . |        3 chunks = 9 elements, 2 of them padding
        shard     rank 0   rank 1  rank 2         3, 3, and 1 elements of data

A call may involve two dtypes: the one that is stored and the one that is asked for. The transport
converts where that is cheapest, so the dtype on the wire need not be the stored one.
"""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from shardwise.transport.memory import HeapBuffers
from shardwise.transport.wire import Wire


class Reduce(enum.Enum):
    """How the contributions of all ranks become one value."""

    SUM = "sum"
    AVG = "avg"

    # Members are singletons. The hash that enums have costs a call of a Python function.
    __hash__ = object.__hash__


#: The name of a group whose module has none.
ROOT_GROUP = "the root group"


@dataclass(frozen=True)
class Label:
    """The caller's name for a collective, for error messages and for comparing ranks.

    Attributes:
        name: the name of the parameter group, such as ``"model.layers.3"``.
        detail: one line per tensor, such as ``"model.layers.3.weight: (4, 4) float32"``.
        wire: what is sent in place of the tensors; ``""``: they are sent as they are.
    """

    name: str = ""
    detail: str = ""
    wire: str = ""

    @classmethod
    def of_group(cls, fqn: str, params: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> Label:
        """Label a parameter group.

        Args:
            fqn: the name of its module; ``""``: that of the root.
            params: name, shape and dtype of each parameter.
        """
        lines = (f"{name}: {tuple(shape)} {dtype}" for name, shape, dtype in params)
        return cls(fqn or ROOT_GROUP, "\n".join(lines).replace("torch.", ""))


NO_LABEL = Label()


class Kind(enum.Enum):
    """The collectives, with what a :class:`Call` of each has.

    *All-gather*: ``inputs[i]`` of every rank, a shard, goes into ``outputs[i]``, a full, as it is
    when it is called. A write to a shard after the wait, on any rank, does not reach the full. A
    shard has at most ``chunk_i`` elements (fewer, or none, on the last ranks), of any dtype: values
    are converted to the dtype of the full. It may be a host tensor even if the full is a device
    tensor. The full has ``world_size * chunk_i`` elements, allocated. After the wait, chunk ``r``
    begins with rank ``r``'s shard; its padding is undefined.

    *Reduce-scatter*: chunk ``r`` of ``inputs[i]``, a full, is reduced over all ranks into rank
    ``r``'s ``outputs[i]``, a shard. A full has at most ``world_size * chunk_i`` elements: a missing
    tail is padding, and other padding is zero. It is only read, and must stay alive until the wait.
    A shard has exactly ``chunk_i`` elements. Its dtype is the dtype of the reduction: contributions
    are converted to it before they are added, in rank order; over several hosts, those of each host
    first. Elements past the end of the full are undefined.

    *All-reduce*: every one of ``outputs`` is reduced over all ranks, in place and in its own dtype.
    """

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of this rank.

    Attributes:
        kind: which one.
        inputs: 1-D, what is read; the ``outputs`` themselves in an all-reduce.
        outputs: 1-D, what is written.
        op: ``SUM``, or ``AVG`` (the sum divided by ``world_size``); an all-gather has none.
        label: the caller's name for the call. If it differs between ranks, they have diverged.
        of: of each tensor, what it is the gradient of: the same object every time. A transport with
            error feedback keeps what was lost as long as that lives. If there are none, it is
            dropped.
        disposable: the indices of the ``inputs`` that are not read any more, in memory that nothing
            else has: they may be overwritten.
    """

    kind: Kind
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    op: Reduce = Reduce.SUM
    label: Label = NO_LABEL
    of: Sequence[object] = ()
    disposable: Container[int] = ()

    def only(self, indices: Sequence[int]) -> Call:
        """Return the call of some of the tensors."""
        return replace(
            self,
            inputs=[self.inputs[i] for i in indices],
            outputs=[self.outputs[i] for i in indices],
            of=[self.of[i] for i in indices] if self.of else (),
            disposable=[at for at, i in enumerate(indices) if i in self.disposable],
        )


class Transport(ABC):
    """Collectives between the ranks of one mesh dimension.

    Every rank makes the same calls in the same order, with lists of equal length, tensors of equal
    dtypes, and fulls and chunks of equal sizes. A call returns before its bytes have moved. Writing
    to a tensor increments its autograd version counter, as any write does.

    Attributes:
        name: the name of the transport, for reports.
        rank: this process's rank in the mesh dimension.
        world_size: the number of ranks in the mesh dimension.
        overlaps_compute: whether bytes move without a wait (asynchronous progress, as over a
            network): a collective that is under way then costs nothing but its memory, so issue it
            early and wait for it late. If not, the thread that waits does the work: waiting later
            hides nothing, so wait as soon as the call allows.
        leaves_host: whether bytes may leave the host, where a wire encodes them.
        sends_to_each: whether a rank sends to each other one itself, whatever lies between.
        wire: the formats of what leaves the host.
        replaced: the collectives that the user provides.
    """

    name: str
    rank: int
    world_size: int
    overlaps_compute: bool
    leaves_host = True
    sends_to_each = False
    wire: Wire = Wire()
    replaced: frozenset[Kind] = frozenset()

    @property
    def overflows(self) -> int:
        """The blocks that this rank has encoded and that decode to no finite numbers."""
        return 0

    def start(self, call: Call) -> Work:
        """Start a collective; see :class:`Kind` for what each does."""
        if call.kind is Kind.ALL_GATHER:
            return self._all_gather(call)
        if call.kind is Kind.REDUCE_SCATTER:
            return self._reduce_scatter(call)
        return self._all_reduce(call)

    @abstractmethod
    def _all_gather(self, call: Call) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, call: Call) -> Work: ...

    @abstractmethod
    def _all_reduce(self, call: Call) -> Work: ...

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Reserve memory that an all-gather can gather into: by default, memory of this rank's own.

        It is not yet allocated.

        Args:
            numels: the number of elements of each tensor, padding included.
            dtypes: the dtype of each tensor.
            device: the device of all tensors.
        """
        return HeapBuffers(numels, dtypes, device)

    def as_gathered(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what every rank gets of a shard: encoded and decoded, if the wire encodes.

        Args:
            shard: 1-D, as it is gathered.
            dtype: of the full tensor.

        Returns:
            As many values, in ``dtype``.
        """
        return shard.to(dtype)

    def trim(self) -> None:  # noqa: B027 - most keep nothing
        """Give back what is kept for the next reductions, once no rank reads it any more."""

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Start an all-gather of ``shards`` into ``fulls``."""
        return self.start(Call(Kind.ALL_GATHER, shards, fulls, label=label))

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Start a reduce-scatter of ``fulls`` into ``shards``."""
        return self.start(Call(Kind.REDUCE_SCATTER, fulls, shards, op, label))

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Start an all-reduce of ``tensors``, in place."""
        return self.start(Call(Kind.ALL_REDUCE, tensors, tensors, op, label))


class FullBuffers(Protocol):
    """Memory for the full parameters of one group, allocated and freed many times.

    Every rank gathers into the same buffers in the same order. Each may free them when it likes.

    Attributes:
        tensors: the same objects for life. Views of them stay valid (autograd saves such views for
            backward). Between :meth:`free` and the next :meth:`allocate` they have no memory, and
            reading them ends the process. Their contents are undefined after :meth:`allocate`.
        nbytes: the bytes of memory that they have now. 0 if the transport itself reports it, as for
            memory that ranks share.
    """

    tensors: list[torch.Tensor]
    nbytes: int

    def allocate(self) -> None:
        """Give every tensor its memory. Does nothing if it has memory already."""

    def free(self) -> None:
        """Release the memory. Does nothing if it is already released."""

    def retain(self) -> None:
        """End the use of the memory, but keep its addresses for the next gather.

        What they hold is undefined until then.
        """

    def abandon(self) -> None:
        """Release the memory after a gather that was not waited for.

        The gather may still write to it, so a transport may release it later, or never.
        """


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return once the results may be used (on CUDA: by the current stream).

        Until then the caller keeps every tensor of the call alive, unchanged, and in its memory (if
        a storage is resized meanwhile, the write still goes to its old memory). A second wait does
        nothing, or raises the same error again.

        Raises:
            PeerLostError: a peer died, left, or did not answer in time.
            RanksDivergedError: a peer made another call.
        """


class FinishedWork:
    """A collective that was complete when its call returned."""

    def wait(self) -> None:
        """Return at once."""


class PendingWork:
    """A collective that the waiting thread completes by calling ``finish``.

    ``finish`` holds every tensor of the call, so their memory lives as long as messages read or
    write it. It is released once it has succeeded, and never called again: a work that failed stays
    failed.

    Args:
        finish: completes the collective.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._failure: BaseException | None = None

    def wait(self) -> None:
        """Complete the collective, the first time.

        Raises:
            PeerLostError: a peer died, left, or did not answer in time.
            RanksDivergedError: a peer made another call.
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


class UnderWay:
    """The works of a transport, of which some are dropped without a wait: after an exception, say.

    Their messages still read and write the memory of the call, and what follows on a connection may
    have to wait for them. So the next call begins when they have arrived.
    """

    def __init__(self) -> None:
        self._arrive: dict[weakref.ref[PendingWork], Callable[[], object]] = {}

    def settle(self) -> None:
        """Wait for the messages of works that were dropped.

        Raises:
            PeerLostError: a peer died, left, or did not answer in time.
            RanksDivergedError: a peer made another call.
        """
        for work, arrive in list(self._arrive.items()):  # another thread may wait meanwhile
            if work() is None:
                del self._arrive[work]
                arrive()

    def add(self, arrive: Callable[[], object], finish: Callable[[], None]) -> PendingWork:
        """Make a work.

        Args:
            arrive: waits for its messages; holds their memory.
            finish: completes the collective; see :class:`PendingWork`.
        """

        def finish_and_forget() -> None:
            finish()
            del self._arrive[reference]

        work = PendingWork(finish_and_forget)
        reference = weakref.ref(work)
        self._arrive[reference] = arrive
        return work


class LocalTransport(Transport):
    """Collectives over one rank. They need no process group and work on any device."""

    name = "local"
    rank = 0
    world_size = 1
    overlaps_compute = False

    def _all_gather(self, call: Call) -> Work:
        for shard, full in zip(call.inputs, call.outputs, strict=True):
            full[: shard.numel()].copy_(shard)
        return FinishedWork()

    def _reduce_scatter(self, call: Call) -> Work:
        for full, shard in zip(call.inputs, call.outputs, strict=True):
            shard[: full.numel()].copy_(full)
        return FinishedWork()

    def _all_reduce(self, call: Call) -> Work:
        """Do nothing: the reduction over one rank is the tensor itself."""
        return FinishedWork()
