"""A process group of ranks that are threads, on which all collectives of torch work.

In every collective, each rank makes a :class:`Contribution`: what it has for each of the others,
and where it puts what they have for it, or their sum. The collective happens when the last rank of
the group calls it, all at once, in the thread of that rank. Sums are made in the order of ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardwise.base import devices
from shardwise.base.errors import RanksDivergedError
from shardwise.insight.simulated.turns import RankTurns

Tensors = Sequence[torch.Tensor]
#: The number of elements and the dtype of each tensor.
Sizes = tuple[tuple[int, torch.dtype], ...]


def _average(parts: Tensors) -> torch.Tensor:
    return functools.reduce(torch.add, parts) / len(parts)


#: By the name of ``ReduceOp``, what makes one tensor of those of all ranks.
_REDUCTIONS: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "AVG": _average,
    "SUM": functools.partial(functools.reduce, torch.add),
    "PRODUCT": functools.partial(functools.reduce, torch.mul),
    "MIN": functools.partial(functools.reduce, torch.minimum),
    "MAX": functools.partial(functools.reduce, torch.maximum),
    "BAND": functools.partial(functools.reduce, torch.bitwise_and),
    "BOR": functools.partial(functools.reduce, torch.bitwise_or),
    "BXOR": functools.partial(functools.reduce, torch.bitwise_xor),
}


@dataclass(eq=False)
class Contribution:
    """One rank's part in a collective.

    Attributes:
        name: of the collective, with its reduction.
        alike: the sizes that have to be equal on all ranks.
        detail: what else has to be, such as the names and shapes of parameters.
        parts: by rank, what this one has for it. Shards and fulls may have different dtypes.
        into: by rank, where this one puts what that one has for it.
        sums: where it puts the sums of what all ranks have for it, in the dtype of these.
        is_over: whether it has happened, or failed.
        failure: what it raises.
    """

    name: str
    alike: Sizes = ()
    detail: str = ""
    parts: Mapping[int, Tensors] = field(default_factory=dict)
    into: Mapping[int, Tensors] = field(default_factory=dict)
    sums: Tensors = ()
    is_over: bool = False
    failure: BaseException | None = None

    def in_words(self) -> str:
        """Say what it is about."""
        sizes = (f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in self.alike)
        return self.detail.replace("\n", ", ") or ", ".join(sizes)


class Channel:
    """The collectives and messages of the ranks of one group, in the order of their calls.

    Args:
        name: of the group, for messages.
        members: the ranks of the group, as ranks of the world.
        turns: of the world.
    """

    def __init__(self, name: str, members: Sequence[int], turns: RankTurns) -> None:
        self.name = name
        self.members = list(members)
        self.turns = turns
        self._counts = [0] * len(members)
        self._open: dict[int, dict[int, Contribution]] = {}
        self._sent: dict[tuple[int, int, int], list[Contribution]] = {}
        self._awaited: dict[tuple[int, int, int], list[Contribution]] = {}

    def post(self, rank: int, mine: Contribution) -> SimulatedWork:
        """Take part in the next collective of the group; the last rank makes it happen."""
        self.turns.pause()
        number = self._counts[rank]
        self._counts[rank] += 1
        here = self._open.setdefault(number, {})
        first = next(iter(here.values()), mine)
        here[rank] = mine
        failure: BaseException | None = None
        if (first.name, first.alike, first.detail) != (mine.name, mine.alike, mine.detail):
            calls = ", ".join(
                f"rank {self.members[place]} calls {theirs.name} of {theirs.in_words()}"
                for place, theirs in sorted(here.items())
            )
            failure = RanksDivergedError(
                f"ranks have diverged at collective number {number} of group {self.name}: {calls}"
            )
        elif len(here) == len(self.members):
            try:
                with torch.no_grad():
                    _exchange([here[each] for each in range(len(here))])
            except Exception as error:
                failure = error
        if failure is not None or len(here) == len(self.members):
            for each in here.values():
                each.failure, each.is_over = failure, True
            del self._open[number]  # after a failure, those who come later find nobody
        where = f", collective number {number} of group {self.name}"
        return SimulatedWork(self.turns, mine, where)

    def send(self, rank: int, to: int, tag: int, tensors: Tensors) -> SimulatedWork:
        """Send a message; it leaves at once."""
        self.turns.pause()
        sent = Contribution(
            "send", parts={0: [each.detach().clone() for each in tensors]}, is_over=True
        )
        self._sent.setdefault((rank, to, tag), []).append(sent)
        self._deliver((rank, to, tag))
        return SimulatedWork(self.turns, sent)

    def receive(self, rank: int, source: int, tag: int, tensors: Tensors) -> SimulatedWork:
        """Receive the next message of a rank that was not yet asked for."""
        self.turns.pause()
        name = f"the receiving of a message from rank {self.members[source]}"
        awaited = Contribution(name, into={source: tensors})
        self._awaited.setdefault((source, rank, tag), []).append(awaited)
        self._deliver((source, rank, tag))
        return SimulatedWork(self.turns, awaited)

    def source(self, rank: int, tag: int) -> int:
        """Wait for a message from anybody, and return who sent it."""

        def senders() -> list[int]:
            waiting = [key for key, sent in self._sent.items() if sent and key[1:] == (rank, tag)]
            return [key[0] for key in waiting]

        self.turns.wait_for(lambda: bool(senders()), "the receiving of a message from any rank")
        return senders()[0]

    def _deliver(self, key: tuple[int, int, int]) -> None:
        sent, awaited = self._sent.get(key, []), self._awaited.get(key, [])
        while sent and awaited:
            message, arrival = sent.pop(0), awaited.pop(0)
            try:
                _copy(message.parts[0], *arrival.into.values())
            except Exception as error:
                arrival.failure = error
            arrival.is_over = True


def _exchange(ranks: Sequence[Contribution]) -> None:
    """Let all ranks have what they get. What is read and written may be the same tensors."""
    device = devices.accelerator()
    if device is not None:  # where each rank may have streams of its own
        devices.synchronize(device)
    made: dict[tuple[object, ...], list[torch.Tensor]] = {}
    results: list[list[torch.Tensor]] = []
    for rank, mine in enumerate(ranks):
        for source, into in mine.into.items():
            _copy(ranks[source].parts.get(rank, ()), into)
        if not mine.sums:
            results.append([])
            continue
        parts = [each.parts[rank] for each in ranks]
        key = tuple(id(part) for part in parts), tuple(each.dtype for each in mine.sums)
        if key not in made:
            reduction = _REDUCTIONS[mine.name.rpartition(" ")[2]]
            made[key] = [
                reduction([part[i].detach().to(out.dtype) for part in parts])
                for i, out in enumerate(mine.sums)
            ]
        results.append(made[key])
    for mine, sums in zip(ranks, results, strict=True):
        _copy(sums, mine.sums)
    if device is not None:
        devices.synchronize(device)


def _copy(source: Tensors, into: Tensors) -> None:
    for one, other in zip(source, into, strict=True):
        if one.data_ptr() != other.data_ptr() or one.dtype != other.dtype:
            other.detach().copy_(one.detach().view(other.shape))


class SimulatedWork(dist.Work):
    """A collective under way.

    Args:
        turns: of the world.
        mine: this rank's part in it.
        where: which one it is, for messages.
    """

    def __init__(self, turns: RankTurns, mine: Contribution, where: str = "") -> None:
        super().__init__()
        self._turns = turns
        self._mine = mine
        self._where = where

    def wait(self, timeout: object = None) -> bool:
        """Return when it has happened.

        Raises:
            RanksDivergedError: another rank calls something else.
            PeerLostError: a rank never calls.
        """
        mine = self._mine
        self._turns.wait_for(lambda: mine.is_over, f"{mine.name}{self._where}")
        if mine.failure is not None:
            raise copy.copy(mine.failure)  # each rank has a traceback of its own
        return True

    def is_completed(self) -> bool:
        """Whether it has happened; others may come to it while this rank asks."""
        if not self._mine.is_over:
            self._turns.yield_turn()
        return self._mine.is_over

    def is_success(self) -> bool:
        """Whether it has happened without an error."""
        return self._mine.is_over and self._mine.failure is None

    def result(self) -> list[torch.Tensor]:
        """Return what it has written to."""
        return [*(each for into in self._mine.into.values() for each in into)] or [*self._mine.sums]

    def _source_rank(self) -> int:
        """Return who sent the message."""
        return next(iter(self._mine.into))

    def get_future(self) -> Any:
        """Wait, and return a future that is over."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


def _sizes(tensors: Tensors) -> Sizes:
    return tuple((each.numel(), each.dtype) for each in tensors)


#: Its methods have other names for their arguments, which torch does not pass by name.
_ProcessGroup: Any = dist.ProcessGroup


class SimulatedGroup(_ProcessGroup):
    """One rank of a process group: the methods that ``torch.distributed`` calls.

    Args:
        rank: in the group.
        channel: of the group.
    """

    def __init__(self, rank: int, channel: Channel) -> None:
        super().__init__(rank, len(channel.members))
        self._place = rank
        self._everybody = range(len(channel.members))
        self.channel = channel

    @property
    def group_name(self) -> str:
        """The name of the group, by which compiled programs find it."""
        return self.channel.name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return "simulated"

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        """Return what to call it in logs."""
        return "simulated"

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch asks of a backend: what it can do, and its timeout."""
        return SimpleNamespace(
            supports_coalescing=False,
            supports_tensor_alloc=lambda _: False,
            options=SimpleNamespace(_timeout=default_pg_timeout),
        )

    def _post(self, name: str, alike: Sizes, **given: Any) -> SimulatedWork:
        return self.channel.post(self._place, Contribution(name, alike, **given))

    def _reduce(
        self, name: str, opts: Any, parts: Sequence[Tensors], sums: Tensors
    ) -> SimulatedWork:
        """Reduce ``parts``, of which each rank has one."""
        op = opts.reduceOp
        kind = getattr(op, "op", op).name
        if kind not in _REDUCTIONS:
            raise NotImplementedError(f"{name} with ReduceOp.{kind} is not simulated")
        by_rank = dict(enumerate(parts))
        return self._post(f"{name} {kind}", _sizes(parts[0]), parts=by_rank, sums=sums)

    def _gather(self, name: str, inputs: Tensors, outputs: Sequence[Tensors]) -> SimulatedWork:
        """Give ``inputs`` to all; ``outputs`` has a list for each rank."""
        everybody = dict.fromkeys(self._everybody, inputs)
        into = dict(enumerate(outputs))
        return self._post(name, _sizes(inputs), parts=everybody, into=into)

    # -- one for all, all for one ---------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Reduce tensors in place."""
        opts = opts or SimpleNamespace(reduceOp=dist.ReduceOp.SUM)
        return self._reduce("all-reduce", opts, [tensors] * len(self._everybody), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Reduce tensors on one rank."""
        sums = tensors if opts.rootRank == self._place else ()
        return self._reduce("reduce", opts, [tensors] * len(self._everybody), sums)

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Give tensors of one rank to all."""
        is_root = opts.rootRank == self._place
        parts = dict.fromkeys(self._everybody, tensors) if is_root else {}
        into = {} if is_root else {opts.rootRank: tensors}
        name = f"broadcast from {opts.rootRank}"
        return self._post(name, _sizes(tensors), parts=parts, into=into)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait for all."""
        return self._post("barrier", ())

    # -- gather ---------------------------------------------------------------------------------

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        """Gather tensors on all ranks."""
        return self._gather("all-gather", inputs, list(zip(*outputs, strict=True)))

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        """Gather a tensor on all ranks, into one."""
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        """Gather tensors on all ranks, each into one."""
        rows = [each.detach().view(len(self._everybody), -1) for each in outputs]
        into = [[row[rank] for row in rows] for rank in self._everybody]
        flat = [each.detach().contiguous().view(-1) for each in inputs]
        return self._gather("all-gather", flat, into)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> SimulatedWork:
        """Gather tensors on one rank."""
        into = dict(enumerate(zip(*outputs, strict=True))) if opts.rootRank == self._place else {}
        name = f"gather on {opts.rootRank}"
        return self._post(name, _sizes(inputs), parts={opts.rootRank: inputs}, into=into)

    # -- scatter --------------------------------------------------------------------------------

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> SimulatedWork:
        """Scatter tensors of one rank."""
        is_root = opts.rootRank == self._place
        parts = dict(enumerate(zip(*inputs, strict=True))) if is_root else {}
        name = f"scatter from {opts.rootRank}"
        return self._post(name, _sizes(outputs), parts=parts, into={opts.rootRank: outputs})

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any
    ) -> SimulatedWork:
        """Reduce tensors, of which each rank gets one."""
        parts = list(zip(*inputs, strict=True))
        return self._reduce("reduce-scatter", opts, parts, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any
    ) -> SimulatedWork:
        """Reduce a tensor, of which each rank gets a part."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> SimulatedWork:
        """Reduce tensors, of each of which each rank gets a part."""
        count = len(self._everybody)
        rows = [each.detach().contiguous().view(count, -1) for each in inputs]
        parts = [[row[rank] for row in rows] for rank in self._everybody]
        flat = [each.detach().view(-1) for each in outputs]
        return self._reduce("reduce-scatter", opts, parts, flat)

    # -- each for each --------------------------------------------------------------------------

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Give each rank one tensor."""
        parts = {rank: [each] for rank, each in enumerate(inputs)}
        into = {rank: [each] for rank, each in enumerate(outputs)}
        return self._post("all-to-all", (), parts=parts, into=into)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> SimulatedWork:
        """Give each rank some rows of one tensor."""

        def rows(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
            even = [len(tensor) // len(self._everybody)] * len(self._everybody)
            return list(torch.split(tensor.detach(), list(sizes) or even))

        return self.alltoall(rows(output, output_sizes), rows(given, input_sizes))

    def send(self, tensors: Tensors, to: int, tag: int) -> SimulatedWork:
        """Send tensors to a rank of the group."""
        return self.channel.send(self._place, to, tag, tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> SimulatedWork:
        """Receive tensors from a rank of the group."""
        return self.channel.receive(self._place, source, tag, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        """Receive tensors from any rank of the group."""
        return self.recv(tensors, self.channel.source(self._place, tag), tag)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
