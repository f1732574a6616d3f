"""A process group of ranks that are threads, on which all collectives of torch work.

In every collective, each rank has a part, a :class:`SimulatedWork`: what it has for the others,
and where it puts what it gets from them, or their sum. The collective happens when the last rank of
the group calls it, all at once, in the thread of that rank. Sums are made in the order of ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.threads import name_group, name_work
from shardwise.base import devices
from shardwise.base.errors import RanksDivergedError
from shardwise.simulated.gloo import Extreme, MemoryFormat, check, is_dense, order_of
from shardwise.simulated.turns import RankTurns
from shardwise.transport.base import NO_LABEL, Label

Tensors = Sequence[torch.Tensor]
#: Makes one tensor of those of all ranks.
Reduction = Callable[[Tensors], torch.Tensor]

#: By the name of ``ReduceOp``.
_REDUCTIONS: dict[str, Reduction] = {
    "AVG": lambda parts: functools.reduce(torch.add, parts) / len(parts),
    "SUM": functools.partial(functools.reduce, torch.add),
    "PRODUCT": functools.partial(functools.reduce, torch.mul),
    "MIN": Extreme(torch.gt),
    "MAX": Extreme(torch.lt),
    "BAND": functools.partial(functools.reduce, torch.bitwise_and),
    "BOR": functools.partial(functools.reduce, torch.bitwise_or),
    "BXOR": functools.partial(functools.reduce, torch.bitwise_xor),
}


class SimulatedWork(dist.Work):
    """One rank's part in a collective.

    Args:
        name: of the collective, with its reduction.
        alike: tensors whose sizes and dtypes have to be equal on all ranks.
        memory: which layouts they may have.
        parts: by rank, what this one has for it.
        into: where this one puts what it gets, from one rank after the other, or the reductions.
        sources: whom it gets that from.
        reduction: of what the sources have, if it is to be reduced.
        label: whose collective it is; that has to be equal, too.

    Attributes:
        is_over: whether it has happened, or failed.
        failure: what it raises.
        turns: of the world, once it has begun.
        doing: what a rank waits in, for messages.
        sender: who sends the message, if it is one.
    """

    turns: RankTurns
    doing: str
    sender = -1

    def __init__(
        self,
        name: str,
        alike: Tensors = (),
        parts: Sequence[Tensors] = (),
        into: Tensors = (),
        sources: Sequence[int] = (),
        reduction: Reduction | None = None,
        label: Label = NO_LABEL,
        memory: MemoryFormat = MemoryFormat.ANY,
    ) -> None:
        super().__init__()
        self.call = f"{name} of {label.name}" if label.name else name
        is_ordered = memory is MemoryFormat.DENSE
        self.sizes = [
            (each.numel(), each.dtype, order_of(each) if is_ordered else ()) for each in alike
        ]
        self.parts = parts
        self.into = into
        self.sources = sources
        self.reduction = reduction
        self.detail = label.detail
        self.is_over = False
        self.failure: BaseException | None = None

    def in_words(self) -> str:
        """Say what it is, and of what."""
        sizes = (
            f"{numel} {str(dtype).removeprefix('torch.')}"
            + (f" of shape {order[0]} with strides {order[1]}" if order else "")
            for numel, dtype, order in self.sizes
        )
        return f"{self.call} of {self.detail.replace(chr(10), ', ') or ', '.join(sizes)}"

    def wait(self, timeout: object = None) -> bool:
        """Return when it has happened.

        Raises:
            RanksDivergedError: another rank calls something else.
            PeerLostError: a rank never calls.
        """
        self.turns.wait_for(lambda: self.is_over, self.doing)
        if self.failure is not None:
            raise copy.copy(self.failure)  # each rank has a traceback of its own
        return True

    def is_completed(self) -> bool:
        """Whether it has happened; others may come to it while this rank asks."""
        if not self.is_over:
            self.turns.yield_turn()
        return self.is_over

    def result(self) -> list[torch.Tensor]:
        """Wait, and return what this rank got."""
        self.wait()
        return [*self.into]

    def get_future(self) -> Any:
        """Wait, and return a future that is over."""
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


name_work(SimulatedWork)


class Channel:
    """The collectives of the ranks of one group, in the order of their calls.

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
        self._open: dict[int, dict[int, SimulatedWork]] = {}
        self._messages: dict[tuple[int, int, int], Channel] = {}

    def post(self, place: int, mine: SimulatedWork) -> SimulatedWork:
        """Take part in the next collective of the group; the last rank makes it happen.

        Args:
            place: of the rank in the group.
            mine: its part, which is returned.
        """
        self.turns.pause()
        number = self._counts[place]
        self._counts[place] += 1
        mine.turns = self.turns
        mine.doing = f"{mine.call}, collective number {number} of group {self.name}"
        here = self._open.setdefault(number, {})
        first = next(iter(here.values()), mine)
        here[place] = mine
        failure: BaseException | None = None
        if (first.call, first.sizes, first.detail) != (mine.call, mine.sizes, mine.detail):
            calls = ", ".join(
                f"rank {self.members[each]} calls {theirs.in_words()}"
                for each, theirs in sorted(here.items())
            )
            failure = RanksDivergedError(
                f"ranks have diverged at collective number {number} of group {self.name}: {calls}"
            )
        elif len(here) == len(self.members):
            try:
                _exchange([here[each] for each in range(len(here))], self.members)
            except Exception as error:
                failure = error
        if failure is not None or len(here) == len(self.members):
            for each in here.values():
                each.failure, each.is_over = failure, True
            del self._open[number]  # after a failure, those who come later find nobody
        return mine

    def messages(self, source: int, to: int, tag: int) -> Channel:
        """Return the messages from a member to another: collectives of these two, in this order."""
        pair = [self.members[source], self.members[to]]
        name = f"{self.name}, from rank {pair[0]} to rank {pair[1]}"
        return self._messages.setdefault((source, to, tag), Channel(name, pair, self.turns))

    def sender(self, to: int, tag: int) -> int:
        """Wait for a message from any member, and return who sent it."""

        def senders() -> list[int]:
            return [
                source
                for (source, *rest), channel in self._messages.items()
                if rest == [to, tag] and any(0 in here for here in channel._open.values())
            ]

        self.turns.wait_for(lambda: bool(senders()), "recv from any rank")
        return senders()[0]


@torch.no_grad()
def _exchange(ranks: Sequence[SimulatedWork], members: Sequence[int]) -> None:
    """Let all ranks have what they get. What is read and written may be the same tensors.

    Args:
        ranks: what each has and gets.
        members: their ranks in the world.

    Raises:
        ValueError: a rank expects other dtypes or sizes than it gets.
    """
    device = devices.accelerator()
    if device is not None:  # where each rank may have streams of its own
        devices.synchronize(device)
    reduced: dict[tuple[int, ...], Tensors] = {}  # of several ranks that get the same
    results: list[Tensors] = []
    for rank, mine in enumerate(ranks):
        parts = [ranks[source].parts[rank] for source in mine.sources]
        _check_fit(mine, parts, rank, members)
        if mine.reduction is None:
            results.append([*chain.from_iterable(parts)])
            continue
        key = tuple(map(id, parts))
        if key not in reduced:
            reduced[key] = [
                mine.reduction(_shaped_alike(each)) for each in zip(*parts, strict=True)
            ]
        results.append(reduced[key])
    for mine, found in zip(ranks, results, strict=True):
        for one, other in zip(found, mine.into, strict=True):
            if one.data_ptr() != other.data_ptr():
                other.copy_(one if one.shape == other.shape else one.reshape(other.shape))
    if device is not None:
        devices.synchronize(device)


def _shaped_alike(parts: Tensors) -> Tensors:
    """Give the tensors of all ranks the shape of the first: as many elements are alike to gloo."""
    return [each.reshape(parts[0].shape) for each in parts]


def _check_fit(
    mine: SimulatedWork, parts: Sequence[Tensors], rank: int, members: Sequence[int]
) -> None:
    if mine.reduction is None:
        pairs = list(zip(chain.from_iterable(parts), mine.into, strict=True))
        sources = [source for source, part in zip(mine.sources, parts, strict=True) for _ in part]
    else:
        pairs = list(zip(parts[0] if parts else (), mine.into, strict=True))
        sources = [mine.sources[0]] * len(pairs) if pairs else []
    for source, (one, other) in zip(sources, pairs, strict=True):
        if (one.dtype, one.numel()) != (other.dtype, other.numel()):
            raise ValueError(
                f"{mine.call}: rank {members[source]} gives {_size(one)}, for which rank "
                f"{members[rank]} has a tensor of {_size(other)}. gloo moves bytes and converts "
                "nothing: use the same number and dtype on both sides"
            )


def _size(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _by_rank(tensors: Sequence[Tensors]) -> list[Tensors]:
    return list(zip(*tensors, strict=True))


#: Its methods have other names for their arguments, which torch does not pass by name.
_ProcessGroup: Any = dist.ProcessGroup


class SimulatedGroup(_ProcessGroup):
    """One rank of a process group: the methods that ``torch.distributed`` calls.

    Args:
        rank: in the group.
        channel: of the group.

    Attributes:
        channel: of the group.
        group_desc: what the group is for.
        group_name: by which compiled programs find it.
        label: whose collectives follow, for messages; it has to be the same on all ranks.
    """

    group_name = ""
    group_desc = "simulated"

    def __init__(self, rank: int, channel: Channel) -> None:
        super().__init__(rank, len(channel.members))
        self.group_name = channel.name
        self.channel = channel
        self.label: Label = NO_LABEL
        self._place = rank
        self._everybody = range(len(channel.members))

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
        """Return what to call it in logs."""
        return "simulated"

    def _post(
        self,
        name: str,
        alike: Tensors,
        parts: Sequence[Tensors],
        into: Tensors,
        *root: int,
        reduction: Reduction | None = None,
        memory: MemoryFormat = MemoryFormat.ANY,
    ) -> SimulatedWork:
        """Take part, with what one rank gets from the root; or from all, if there is none."""
        self._check_place(name, *root)
        self._check(name, alike, memory)
        sources = root or (self._everybody if into else ())
        work = SimulatedWork(name, alike, parts, into, sources, reduction, self.label, memory)
        return self.channel.post(self._place, work)

    def _check_place(self, name: str, *places: int) -> None:
        for place in places:
            if not 0 <= place < len(self._everybody):
                raise ValueError(
                    f"rank {self.channel.members[self._place]}, {name}: found rank {place} of the "
                    f"group, expected one of its {len(self._everybody)} ranks"
                )

    def _check_another(self, name: str, place: int) -> None:
        if place == self._place:
            raise ValueError(
                f"rank {self.channel.members[place]}, {name}: found itself, expected another rank; "
                "gloo sends no rank its own messages"
            )

    def _check(self, name: str, tensors: Tensors, memory: MemoryFormat) -> None:
        check(self.channel.members[self._place], name, tensors, memory)

    def _reduce(
        self,
        name: str,
        opts: Any,
        alike: Tensors,
        parts: Sequence[Tensors],
        into: Tensors,
        *,
        memory: MemoryFormat = MemoryFormat.DENSE,
        chunks: int = 1,
    ) -> SimulatedWork:
        """Reduce ``parts``, of which each rank has one: one of so many chunks of a message."""
        kind = getattr(opts.reduceOp, "op", opts.reduceOp).name
        if kind not in _REDUCTIONS:
            raise NotImplementedError(f"{name} with ReduceOp.{kind} is not simulated")
        reduction = _REDUCTIONS[kind]
        whole = [
            each.dtype for each in alike if not (each.is_floating_point() or each.is_complex())
        ]
        if kind == "AVG" and whole:
            raise TypeError(
                f"rank {self.channel.members[self._place]}, {name} AVG: found {whole[0]}, expected "
                "floating-point values. gloo averages no others: use SUM, and divide"
            )
        parted = [each.dtype for each in alike if each.is_floating_point() or each.is_complex()]
        if kind in ("BAND", "BOR", "BXOR") and parted:
            raise TypeError(
                f"rank {self.channel.members[self._place]}, {name} {kind}: found {parted[0]}, "
                "expected integers or booleans"
            )
        if isinstance(reduction, Extreme) and chunks > 1:
            reduction = replace(reduction, chunk=self._place, chunks=chunks)
        return self._post(f"{name} {kind}", alike, parts, into, reduction=reduction, memory=memory)

    def _for_all(self, tensors: Tensors) -> list[Tensors]:
        return [tensors] * len(self._everybody)

    def _rows(self, tensors: Tensors) -> list[Tensors]:
        """Cut each tensor into one row for each rank."""
        count = len(self._everybody)
        plain = [tensor.detach() for tensor in tensors]
        return _by_rank(
            [
                list(each.view(count, -1))
                if each.is_contiguous()
                else torch.tensor_split(each, count)
                for each in plain
            ]
        )

    # -- one for all, all for one ---------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Reduce tensors in place."""
        opts = opts or SimpleNamespace(reduceOp=dist.ReduceOp.SUM)
        return self._reduce("all-reduce", opts, tensors, self._for_all(tensors), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Reduce tensors on one rank."""
        self._check_place("reduce", opts.rootRank)
        into = tensors if opts.rootRank == self._place else ()
        return self._reduce("reduce", opts, tensors, self._for_all(tensors), into)

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Give tensors of one rank to all."""
        root = opts.rootRank
        parts = self._for_all(tensors)
        return self._post(
            f"broadcast from {root}", tensors, parts, tensors, root, memory=MemoryFormat.DENSE
        )

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait for all."""
        return self._post("barrier", (), (), ())

    # -- gather ---------------------------------------------------------------------------------

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        """Gather tensors on all ranks."""
        into = [*chain.from_iterable(_by_rank(outputs))]
        return self._post("all-gather", inputs, self._for_all(inputs), into)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        """Gather a tensor on all ranks, into one."""
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        """Gather tensors on all ranks, each into one."""
        return self.allgather(_by_rank(self._rows(outputs)), [each.contiguous() for each in inputs])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> SimulatedWork:
        """Gather tensors on one rank."""
        self._check_place("gather", opts.rootRank)
        into = [*chain.from_iterable(_by_rank(outputs))] if opts.rootRank == self._place else ()
        return self._post(f"gather on {opts.rootRank}", inputs, self._for_all(inputs), into)

    # -- scatter --------------------------------------------------------------------------------

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> SimulatedWork:
        """Scatter tensors of one rank."""
        root, name = opts.rootRank, f"scatter from {opts.rootRank}"
        self._check(name, [*chain.from_iterable(inputs)], MemoryFormat.CONTIGUOUS)
        parts = _by_rank(inputs)
        return self._post(name, outputs, parts, outputs, root, memory=MemoryFormat.CONTIGUOUS)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any
    ) -> SimulatedWork:
        """Reduce tensors, of which each rank gets one; gloo copies inputs that have gaps."""
        name, given = "reduce-scatter", [*chain.from_iterable(inputs)]
        self._check(name, [each for each in given if is_dense(each)], MemoryFormat.CONTIGUOUS)
        self._check(name, outputs, MemoryFormat.CONTIGUOUS)
        parts = _by_rank([[each.contiguous() for each in tensors] for tensors in inputs])
        return self._reduce(name, opts, parts[0], parts, outputs, memory=MemoryFormat.ANY)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any
    ) -> SimulatedWork:
        """Reduce a tensor, of which each rank gets a part."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> SimulatedWork:
        """Reduce tensors, of each of which each rank gets a part; gloo copies those with gaps."""
        if not all(each.ndim for each in outputs):
            raise ValueError(
                f"rank {self.channel.members[self._place]}, reduce-scatter: found an output "
                "without dimensions, expected one of shape (1,): gloo ends the process"
            )
        given = [(each if is_dense(each) else each.contiguous()).resolve_neg() for each in inputs]
        parts, chunks = self._rows([each.contiguous() for each in inputs]), len(self._everybody)
        return self._reduce("reduce-scatter", opts, given, parts, outputs, chunks=chunks)

    # -- each for each --------------------------------------------------------------------------

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Give each rank one tensor."""
        return self._post("all-to-all", (), [[each] for each in inputs], outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> SimulatedWork:
        """Give each rank some rows of one tensor."""
        count = len(self._everybody)
        self._check("all-to-all", [output, given], MemoryFormat.CONTIGUOUS)

        def rows(tensor: torch.Tensor, sizes: Sequence[int]) -> Tensors:
            even = [len(tensor) // count] * count
            return torch.split(tensor.detach(), list(sizes) or even)

        return self.alltoall(rows(output, output_sizes), rows(given, input_sizes))

    def send(self, tensors: Tensors, to: int, tag: int) -> SimulatedWork:
        """Send tensors to a rank of the group; they leave at once."""
        self._check("send", tensors, MemoryFormat.CONTIGUOUS)
        self._check_another("send", to)
        sent = SimulatedWork("message", parts=[(), [each.detach().clone() for each in tensors]])
        sent.is_over = True
        return self.channel.messages(self._place, to, tag).post(0, sent)

    def recv(self, tensors: Tensors, source: int, tag: int) -> SimulatedWork:
        """Receive tensors from a rank of the group."""
        self._check("recv", tensors, MemoryFormat.CONTIGUOUS)
        self._check_another("recv", source)
        awaited = SimulatedWork("message", into=tensors, sources=[0])
        awaited.sender = source
        return self.channel.messages(source, self._place, tag).post(1, awaited)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        """Receive tensors from any rank of the group."""
        if not all(each.numel() for each in tensors):
            raise ValueError(
                f"rank {self.channel.members[self._place]}, recv: found a tensor without elements, "
                "expected a source for it: gloo receives none from any rank"
            )
        return self.recv(tensors, self.channel.sender(self._place, tag), tag)

    # Their names before torch 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


name_group(SimulatedGroup)
