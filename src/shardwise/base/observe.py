"""The seam to what watches the runtime: a timeline that records, a plan that rehearses.

The runtime says here what it begins, ends, allocates and frees. One observer at a time listens. If
none does, a call costs one comparison.

``sharding/`` reports what groups do, and the memory of parameters and of gradients. ``transport/``
reports collectives, waits for them and for single peers, and memory of its own.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from shardwise._torch import dtensor


class Activity(enum.Enum):
    """What a rank does."""

    FORWARD = "forward"  # a group computes its forward
    BACKWARD = "backward"  # a group computes its backward
    UNSHARD = "unshard"  # an all-gather is issued: memory, conversions, the call itself
    SUPPLY = "supply"  # other ranks gather a group that this one does not need
    REDUCE = "reduce"  # gradients are prepared, and their reduction is issued
    ALL_GATHER = "all-gather"  # a collective is under way, from its issue to the end of its wait
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    WAIT = "wait"  # the thread waits for a collective
    PEER = "wait for a peer"  # within WAIT, the thread waits for one other rank
    COPY = "copy"  # between host and device, or between buffers
    OPTIMIZER = "optimizer"


class Memory(enum.StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"  # the shards
    GRADIENTS = "gradients"  # sharded, and full ones until they are reduced
    OPTIMIZER = "optimizer"
    FULL_PARAMETERS = "full_parameters"
    TRANSPORT = "transport"  # staging, buckets, scratch
    ACTIVATIONS = "activations"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Route:
    """What a collective travels over.

    Attributes:
        transport: such as ``"shm"``, ``"gloo"``, ``"nccl"`` or ``"collectives"``.
        dimension: the mesh dimension, such as ``"dp_shard"``.
        ranks: how many ranks take part.
        members: those, as ranks of the default group, in the order of their process group.
    """

    transport: str
    dimension: str
    ranks: int
    members: tuple[int, ...] = ()


class Observer(Protocol):
    """Someone who watches this process. Calls come from any thread, and must not raise."""

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        """Note that an activity begins.

        Args:
            activity: what begins.
            name: of the group, such as ``"model.layers.3"`` or ``"the root group"``; for ``PEER``,
                the global rank.
            dimension: the mesh dimension that a wait is for, such as ``"dp_shard"``.
            nbytes: what is moved.

        Returns:
            A number for :meth:`end`, not 0. Activities overlap, and end in any order. One that an
            exception interrupts may never end.
        """

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        """Note that a collective is issued. Its :meth:`end` is the end of the wait for it.

        A collective that is not waited for, after an exception, say, has no end.

        Args:
            activity: ``ALL_GATHER``, ``REDUCE_SCATTER``, ``ALL_REDUCE`` or ``ALL_TO_ALL``.
            name: of the group, such as ``"model.layers.3"``.
            wire: what it travels over.
            nbytes: of the full tensors in the dtype that is sent, padding included; for
                ``ALL_TO_ALL``, what this rank sends to others.
            launches: how many calls of the wire it takes: messages to peers, or collectives.

        Returns:
            A number for :meth:`end`, not 0.
        """

    def end(self, number: int) -> None:
        """Note that an activity has ended."""

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        """Note that a group has ``nbytes`` more memory, or less if they are negative."""


_observer: Observer | None = None
#: Who watches while nobody else does.
_bystander: Observer | None = None
#: The storages whose memory has been reported to an observer and not been freed, by their ids.
_known: dict[int, _ReportedStorage] = {}


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer watch this process until the end of the block.

    Raises:
        RuntimeError: another one watches it.
    """
    global _observer
    check_unobserved()
    try:
        try:
            _observer = observer
            yield
        finally:
            _observer = _bystander
            _forget(observer)
    finally:
        if _observer is observer:  # Ctrl-C has ended the first attempt
            _observer = _bystander


@contextlib.contextmanager
def standing_by(observer: Observer) -> Iterator[None]:
    """Let an observer watch this process until the end of the block, while no other one does."""
    global _bystander, _observer
    if _observer is not None:
        yield
        return
    try:
        try:
            _bystander = _observer = observer
            yield
        finally:
            _bystander = _observer = None
            _forget(observer)
    finally:
        if _bystander is observer:  # Ctrl-C has ended the first attempt
            _bystander = _observer = None


def watchers() -> tuple[Observer | None, Observer | None]:
    """Return who watches this process, and who does while nobody else does."""
    return _observer, _bystander


def set_watchers(found: tuple[Observer | None, Observer | None]) -> None:
    """Let others watch: each of the ranks that take turns in one process has its own."""
    global _observer, _bystander
    _observer, _bystander = found


def check_unobserved() -> None:
    """Check that nothing watches this process.

    Raises:
        RuntimeError: someone does.
    """
    if _observer is not _bystander:
        raise RuntimeError(
            f"a {type(_observer).__name__} watches this process already; one observer at a time"
        )


def is_observed() -> bool:
    """Whether anybody watches: then it is worth computing what to report."""
    return _observer is not None


def begin(activity: Activity, name: str, dimension: str = "", nbytes: int = 0) -> int:
    """Report that an activity begins; return its number for :func:`end`, or 0: nobody watches."""
    observer = _observer  # read once: another thread may end the observation
    return 0 if observer is None else observer.begin(activity, name, dimension, nbytes)


def collective(activity: Activity, name: str, wire: Route, nbytes: int, launches: int) -> int:
    """Report that a collective is issued; return its number for :func:`end`, or 0, as above."""
    observer = _observer
    return 0 if observer is None else observer.collective(activity, name, wire, nbytes, launches)


def end(number: int) -> None:
    """Report that an activity has ended. 0 means one that was not watched."""
    if number and (observer := _observer) is not None:
        observer.end(number)


def memory(kind: Memory, name: str, nbytes: int) -> None:
    """Report that a group's memory has grown or shrunk; see :meth:`Observer.memory`."""
    if (observer := _observer) is not None:
        observer.memory(kind, name, nbytes)


def memory_of(kind: Memory, name: str, *tensors: torch.Tensor) -> None:
    """Report the memory of tensors as allocated now, and as freed when their storage is.

    Does nothing for a storage that has been reported before, and is still alive. The memory of a
    tensor that keeps its values in others, such as a ``DTensor``, is theirs.
    """
    observer = _observer
    if observer is None:
        return
    found = (dtensor.storages_of(tensor) for tensor in tensors if not tensor.is_meta)
    for storage in itertools.chain.from_iterable(found):
        key = id(storage)  # torch keeps the object as long as the memory
        known = _known.get(key)
        if (known is None or known.observer is not observer) and (nbytes := storage.nbytes()):
            held = _ReportedStorage(storage, _free)
            held.key, held.kind, held.name, held.nbytes = key, kind, name, nbytes
            held.observer = observer
            _known[key] = held
            observer.memory(kind, name, nbytes)


# ``weakref.finalize`` would do, and takes twice as long: there is one for each gradient.
class _ReportedStorage(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "kind", "name", "nbytes", "observer")
    key: int
    kind: Memory
    name: str
    nbytes: int
    observer: Observer


def _free(held: weakref.ref[torch.UntypedStorage]) -> None:
    assert isinstance(held, _ReportedStorage)
    if _known.get(held.key) is held:
        del _known[held.key]
        held.observer.memory(held.kind, held.name, -held.nbytes)


def _forget(observer: Observer) -> None:
    for key in [key for key, held in list(_known.items()) if held.observer is observer]:
        _known.pop(key, None)


_Function = TypeVar("_Function", bound=Callable[..., Any])
#: What code allocates memory for, by files and by the first lines of functions in them: most
#: tensors are never reported, but whoever sees an operation finds the code that calls it.
ALLOCATES: dict[str | tuple[str, int], Memory] = {}


def allocates(kind: Memory) -> Callable[[_Function], _Function]:
    """Say what a function allocates memory for, in ``ALLOCATES``; it runs as it did."""

    def mark(function: _Function) -> _Function:
        code = function.__code__
        ALLOCATES[code.co_filename, code.co_firstlineno] = kind
        return function

    return mark


def during(
    activity: Activity, name: str, dimension: str = "", nbytes: int = 0
) -> AbstractContextManager[None]:
    """Report an activity that lasts as long as a block, whether or not the block raises."""
    if activity is Activity.WAIT:
        return _Waiting(begin(activity, name, dimension, nbytes))
    return _NOTHING if _observer is None else _During(begin(activity, name, dimension, nbytes))


class _During:
    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        end(self._number)


class _Waiting(_During):  # whose time counts even if nothing watches
    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        count_wait(time.perf_counter() - self._began)
        end(self._number)


_waited = 0.0


def count_wait(seconds: float) -> None:
    """Count the time of a wait for other ranks."""
    global _waited
    _waited += seconds


def waited() -> float:
    """Return how many seconds this process has waited for other ranks since it began.

    Where collectives run on a device beside the host, the host does not wait for them.
    """
    return _waited


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
