"""Several ranks in one process, for notebooks, debuggers and tests."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor, operations
from shardwise.base import observe
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import ShardwiseError
from shardwise.schedules import Exhaustive, FixedOrder, Schedule
from shardwise.simulated.world import SimulatedWorld

if TYPE_CHECKING:
    from shardwise.timeline.recorder import Recorder
    from shardwise.timeline.steps import Timeline

T = TypeVar("T")

#: Spans, and changes of memory, that are kept of a rank.
_SPANS = 20_000
#: Nanoseconds by which a clock goes on with everything that happens.
_TICK = 1_000_000


@dataclass(frozen=True)
class SimulatedRank:
    """What came of a function on one rank.

    Attributes:
        value: what it returned: the rank's own object, such as a model with its shards.
        output: what it printed.
    """

    value: Any
    output: str


class SimulatedRanks(list[SimulatedRank]):
    """What came of a function on all ranks, by rank.

    Their world stays alive with this object, so that :func:`shardwise.inspect` can look into it.

    Args:
        world: of the ranks.
        ranks: what came of the function, by rank.
        recorders: what each rank did, by rank.

    Attributes:
        orders: how many orders of the ranks' turns were tried.
        world: of the ranks.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        ranks: Sequence[SimulatedRank],
        recorders: Sequence[Recorder],
    ) -> None:
        super().__init__(ranks)
        self.orders = 1
        self.world = world
        self._recorders = recorders

    def timeline(self) -> Timeline:
        """Return what the ranks did, in order.

        What is reported of gathers, reductions, computation and memory is there, unless the
        function recorded a timeline of its own.

        Returns:
            The timeline of all ranks. A millisecond of it is one thing that happened.
        """
        from shardwise.timeline.steps import SIMULATED, Timeline

        size = len(self)
        return Timeline(
            tuple(
                each.timeline(rank, size, SIMULATED, shared=lambda time: time / 1e9)
                for rank, each in enumerate(self._recorders)
            )
        )

    def on_every_rank(self, function: Callable[[Any], T]) -> list[T]:
        """Call ``function(value)`` on every rank, with what the rank has returned.

        Args:
            function: takes the :class:`SimulatedRank`'s value.

        Returns:
            What it returned, by rank.
        """
        return self.world.run(lambda rank: function(self[rank].value), Schedule())

    def __repr__(self) -> str:
        values = ", ".join(type(each.value).__name__ for each in self)
        return f"<{len(self)} simulated ranks: {values}>"


class Simulation:
    """Ranks that stay for several functions.

        with shardwise.simulation(4) as world:
            world.run(build)
            world.run(train)
            world[1].value  # what came of the last function on rank 1

    Args:
        world_size: as for :func:`simulate`.
        hosts: as there.
        schedule: as there; not ``Exhaustive``.

    Raises:
        ValueError: as there.
    """

    def __init__(
        self, world_size: int, *, hosts: Sequence[str] = (), schedule: Schedule | None = None
    ) -> None:
        check_arguments(Simulation.__init__, locals())
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size: found {world_size!r}, expected 1 rank or more")
        if hosts and len(hosts) != world_size:
            raise ValueError(
                f"hosts: found {len(hosts)} names, expected one for each of {world_size}"
            )
        self._world = SimulatedWorld(world_size, hosts)
        self._schedule = schedule or Schedule()
        self._ranks: SimulatedRanks | None = None

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self._world.end()

    def run(self, function: Callable[..., Any], *args: Any) -> SimulatedRanks:
        """Call ``function(*args)`` on every rank.

        Args:
            function: any function.
            args: given to every rank: the same objects.

        Returns:
            What it returned and printed, by rank.

        Raises:
            Exception: what a rank raised first. It ends the ranks.
            RuntimeError: they have ended, or this process simulates others now.
        """
        _check(function)
        ticks = itertools.count(0, _TICK)
        from shardwise.timeline.recorder import Recorder

        recorders = [Recorder(_SPANS, now=lambda: next(ticks)) for _ in range(len(self))]

        def be(rank: int) -> SimulatedRank:
            printed: Any = _Printed(sys.stdout)
            recording = recorders[rank].recording(observe.standing_by)
            with contextlib.redirect_stdout(printed), recording:
                value = function(*args)
            return SimulatedRank(value, "".join(printed.texts))

        try:
            ranks = self._world.run(be, self._schedule)
        except BaseException:
            self._world.end()
            raise
        self._ranks = SimulatedRanks(self._world, ranks, recorders)
        return self._ranks

    def __getitem__(self, rank: int) -> SimulatedRank:
        """Return what came of the last function on a rank."""
        if self._ranks is None:
            raise RuntimeError("nothing has run in this simulation: call run(function)")
        return self._ranks[rank]

    def __len__(self) -> int:
        return self._world.turns.world_size


class _Printed:
    """What a rank prints, which is shown, too."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        """Write text."""
        self.texts.append(text)
        self._shown.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


#: What a program calls it.
simulation = Simulation


def simulate(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    hosts: Sequence[str] = (),
    schedule: Schedule | Exhaustive | None = None,
) -> SimulatedRanks:
    """Call ``function(*args)`` on several ranks in this process.

        def train(steps):
            model = nn.Linear(4, 4)
            shardwise.fully_shard(model)
            ...
            return model

        ranks = shardwise.simulate(train, 4, 10)
        ranks[2].value  # rank 2's model

    Each rank is a thread that sees an ordinary world: ``torch.distributed`` is initialized, and
    ``dist.get_rank()`` is the thread's rank. One rank runs at a time, until it has to wait in a
    collective. So the program does the same every time, and a breakpoint stops all ranks.

    Every rank has its own random numbers (of torch, Python and NumPy; they begin in the state that
    they have here), default dtype, environment variables (with ``RANK``, ``LOCAL_RANK`` and
    ``WORLD_SIZE``) and current folder. What Python keeps for all threads is shared: modules, their
    globals, warnings, the process's number.

    Args:
        function: any function, without a rank among its arguments.
        world_size: number of ranks.
        args: given to every rank: the same objects.
        hosts: the names of the hosts that ranks are to be on, by rank; by default they share one.
        schedule: whose turn is next: by default the next rank's, where one has to wait.
            ``Random(seed)`` passes the turn at random, at every operation on what ranks share.
            ``Exhaustive(limit)`` tries all orders, each in a new world, but at most ``limit``.

    Returns:
        What the function returned and printed, by rank.

    Raises:
        Exception: what a rank raised first. A note names the rank, and says what the others were
            about to do.
        RanksDivergedError: ranks wait for each other in different collectives.
        ShardwiseError: what a rank returns depends on the order of turns (with ``Exhaustive``).
        RuntimeError: this process has a process group already, or simulates ranks now.
        TypeError: ``function`` cannot be called.
        ValueError: there is no rank, there is not a host for each of them, or ``limit`` is 0.
    """
    check_arguments(simulate, locals())
    _check(function)
    if not isinstance(schedule, Exhaustive):
        return _run_once(world_size, hosts, schedule, function, args)
    first: SimulatedRanks | None = None
    for number, order in enumerate(schedule.orders(), 1):
        ranks = _run_once(world_size, hosts, order, function, args)
        first = first or ranks
        _compare(first, ranks, order)
        first.orders = number
    if first is None:
        raise ValueError(f"schedule: found {schedule}, expected a limit of 1 or more")
    return first


def _check(function: object) -> None:
    if not callable(function):
        raise TypeError(f"function: found {function!r}, expected a function for every rank to call")
    if dist.is_initialized():
        raise RuntimeError(
            f"this process is rank {dist.get_rank()} of a world of {dist.get_world_size()}: it "
            "cannot simulate another one. Call destroy_process_group() first, or simulate in a "
            "process of its own"
        )


def _run_once(
    world_size: int,
    hosts: Sequence[str],
    schedule: Schedule | None,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> SimulatedRanks:
    """Run in a world that ends with what is returned."""
    with contextlib.ExitStack() as on_error:
        world = on_error.enter_context(Simulation(world_size, hosts=hosts, schedule=schedule))
        ranks = world.run(function, *args)
        weakref.finalize(ranks, ranks.world.end)
        on_error.pop_all()
    return ranks


def _compare(first: SimulatedRanks, ranks: SimulatedRanks, order: FixedOrder) -> None:
    """Check that ranks return the same values in two orders, as far as these are numbers."""
    for rank, (one, other) in enumerate(zip(first, ranks, strict=True)):
        if one.output != other.output or _bits(one.value) != _bits(other.value):
            raise ShardwiseError(
                f"rank {rank} returns or prints other values with schedule={order!r} than with "
                "schedule=FixedOrder([]): the program depends on whose turn is next"
            )


def _bits(value: Any) -> list[object]:
    """Return what can be compared of a value."""
    found: list[object] = []
    for leaf in operations.leaves(value):
        if isinstance(leaf, nn.Module):
            found += _bits(dict(leaf.state_dict()))
        elif isinstance(leaf, torch.Tensor):
            local = dtensor.local_of(leaf) if isinstance(leaf, DTensor) else leaf
            found.append(bytes(local.detach().cpu().contiguous().view(-1).view(torch.uint8)))
        elif isinstance(leaf, int | float | str | bytes | None):
            found.append(leaf)
    return found
