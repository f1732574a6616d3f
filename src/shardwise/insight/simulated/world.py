"""A world of ranks that are threads of this process, as the rest of the library sees it."""

from __future__ import annotations

import contextlib
import contextvars
import io
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import threads
from shardwise.base import devices, observe
from shardwise.base.devices import Backend
from shardwise.base.observe import Activity
from shardwise.insight.simulated.group import Channel, Contribution, SimulatedGroup
from shardwise.insight.simulated.schedules import InOrder, Schedule
from shardwise.insight.simulated.turns import RankOutcome, RankTurns
from shardwise.transport.base import Call, Kind, PendingWork, Transport, Work
from shardwise.transport.buckets import as_rows
from shardwise.transport.carrier import Announced, Carrier, carried_by
from shardwise.transport.peers import Peers

_BACKEND = Backend("simulated", shares_memory=True, averages=True)
_numbers = itertools.count()


class SimulatedWorld:
    """Ranks that are threads.

    Args:
        world_size: number of ranks.
        hosts: the names of the hosts that they are on, by rank; by default all are on one.

    Attributes:
        turns: lets one rank run at a time.
        outputs: what each rank has printed in the last run.
    """

    def __init__(self, world_size: int, hosts: Sequence[str] = ()) -> None:
        self.turns = RankTurns(world_size, _Process())
        self.outputs: list[list[str]] = [[] for _ in range(world_size)]
        self._hosts = list(hosts) or ["host"] * world_size
        self._number = next(_numbers)
        self._channels: dict[str, Channel] = {}
        self._wires: dict[tuple[str, int], str] = {}
        self._has_joined: set[int] = set()

    def run(self, function: Callable[[int], Any], schedule: Schedule) -> list[RankOutcome]:
        """Call ``function(rank)`` on every rank, and return what came of it.

        Args:
            function: any function.
            schedule: decides whose turn is next.
        """
        context = contextvars.copy_context()

        def be(rank: int) -> Any:
            if rank not in self._has_joined:
                self._has_joined.add(rank)
                self._join(rank)
            return context.copy().run(function, rank)

        output = _Output(sys.stdout, self)
        kinds = sorted({devices.CPU.type, devices.default_type()})
        with (
            threads.worlds_of_threads(self._create, self._number_of_rank, kinds),
            carried_by(_Threads(self)),
            contextlib.redirect_stdout(output),
        ):
            self.outputs = [[] for _ in self.outputs]
            self.turns.schedule = schedule
            return self.turns.run(be)

    def renew(self) -> None:
        """Let the next function begin on ranks as new as those of another world.

        Their threads stay, with what torch has cached in them: it takes a new thread 20 ms to know
        again how the operations of an optimizer's step are sharded.
        """
        if self._has_joined:
            self.run(lambda rank: dist.destroy_process_group(), InOrder())
        self._forget()
        self.turns.renew()

    def end(self) -> None:
        """End the threads, unless they are in a function."""
        self.turns.end()
        if self.turns.has_ended:
            self._forget()

    def _forget(self) -> None:
        self._channels.clear()
        self._wires.clear()
        self._has_joined.clear()
        threads.forget_meshes()

    def channel(self, name: str, members: Sequence[int]) -> Channel:
        """Return what the ranks of a group share."""
        return self._channels.setdefault(name, Channel(name, members, self.turns))

    def announce(self, group: str, rank: int, wire: str) -> None:
        """Note the wire that a rank has for a group."""
        self.turns.pause()
        self._wires.setdefault((group, rank), wire)

    def announced(self, group: str, members: Sequence[int]) -> list[Announced]:
        """Wait until all members of a group have announced a wire; return what they have."""
        keys = [(group, place) for place in range(len(members))]
        doing = f"the comparison of wires in group {group}"
        self.turns.wait_for(lambda: all(key in self._wires for key in keys), doing)
        return [
            Announced(self._hosts[rank], self._wires[key])
            for key, rank in zip(keys, members, strict=True)
        ]

    def _join(self, rank: int) -> None:
        size, host = self.turns.world_size, self._hosts[rank]
        on_host = self._hosts[:rank].count(host)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            GROUP_RANK=str(list(dict.fromkeys(self._hosts)).index(host)),
            LOCAL_RANK=str(on_host % (devices.count() or size)),  # ranks share accelerators
        )
        threads.join_world_of_threads(rank, size)

    def _create(self, rank: int, members: Sequence[int], name: str) -> dist.ProcessGroup:
        return SimulatedGroup(rank, self.channel(name, members))

    def _number_of_rank(self) -> int:
        """Return a number that no rank of another world has, nor any thread of the system."""
        if not self.turns.is_rank():
            return threading.get_ident()
        return -1 - self._number * 1000 - self.turns.rank


class _Process:
    """What torch, Python and the system keep once per process.

    The generators of random numbers (of torch, of its accelerator, of Python, and NumPy's if it is
    loaded), the default dtype, what ``loss_parallel`` changes, the environment variables and the
    current folder.
    """

    def save(self) -> Any:
        """Return all of it."""
        numpy = sys.modules.get("numpy")
        accelerator = devices.accelerator()
        return (
            torch.get_rng_state(),
            None if accelerator is None else devices.random_state(accelerator),
            random.getstate(),
            None if numpy is None else numpy.random.get_bit_generator(),
            torch.get_default_dtype(),
            threads.handlers_of_process().copy(),
            threads.variables_of_process().copy(),
            self._folder(),
        )

    def restore(self, saved: Any) -> None:
        """Put back what is another's now."""
        state, of_accelerator, of_python, of_numpy, dtype, handlers, environment, folder = saved
        torch.set_rng_state(state)
        accelerator = devices.accelerator()
        if accelerator is not None:
            devices.set_random_state(accelerator, of_accelerator)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(of_numpy)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if threads.handlers_of_process() != handlers:
            threads.handlers_of_process().clear()
            threads.handlers_of_process().update(handlers)
        present = threads.variables_of_process()
        if present != environment:
            for name in present.keys() - environment.keys():
                del os.environb[name]
            for name, value in environment.items():
                if present.get(name) != value:
                    os.environb[name] = value
        if folder and self._folder() != folder:
            os.chdir(folder)

    def _folder(self) -> str:
        """Return the current folder; ``""`` if a rank has removed it."""
        try:
            return os.getcwd()
        except FileNotFoundError:
            return ""


class _Output(io.TextIOBase):
    """Passes on what is printed, and keeps what ranks print."""

    def __init__(self, shown: Any, world: SimulatedWorld) -> None:
        self._shown = shown
        self._world = world

    def write(self, text: str) -> int:
        """Write text."""
        if self._world.turns.is_rank():
            self._world.outputs[self._world.turns.rank].append(text)
        self._shown.write(text)
        return len(text)

    def flush(self) -> None:
        """Show what was written."""
        self._shown.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


class _Threads(Carrier):
    """What carries between threads, which share all memory."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world

    def backend(self, peers: Peers, device: torch.device) -> Backend:
        return _BACKEND

    def share_memory(self, peers: Peers) -> Transport | str:
        name = f"{peers.group.group_name}/{SimulatedTransport.name}"
        return SimulatedTransport(peers, self._world.channel(name, peers.members))

    def announce(self, peers: Peers, wire: str) -> None:
        self._world.announce(peers.group.group_name, peers.rank, wire)

    def announced(self, peers: Peers) -> Sequence[Announced]:
        return self._world.announced(peers.group.group_name, peers.members)


class SimulatedTransport(Transport):
    """Collectives between threads: one copy from tensor to tensor.

    Args:
        peers: the ranks of a simulated process group.
        channel: that they share.
    """

    name = "simulated"
    overlaps_compute = False

    def __init__(self, peers: Peers, channel: Channel) -> None:
        self.rank = peers.rank
        self.world_size = peers.size
        self._channel = channel
        self._wire = peers.wire(self.name)

    def _all_gather(self, call: Call) -> Work:
        """Copy every shard to its place at once; the others take it from there."""
        rows = [as_rows(full, self.world_size) for full in call.outputs]
        mine = [row[self.rank] for row in rows]
        for own, shard in zip(mine, call.inputs, strict=True):
            own[: shard.numel()].copy_(shard)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return self._post(
            call,
            parts=dict.fromkeys(others, mine),
            into={rank: [row[rank] for row in rows] for rank in others},
        )

    def _reduce_scatter(self, call: Call) -> Work:
        """Add what all ranks have of each shard, in the order of ranks."""
        chunks = [shard.numel() for shard in call.outputs]

        def of(rank: int) -> list[torch.Tensor]:
            return [
                full[rank * chunk : (rank + 1) * chunk]
                for full, chunk in zip(call.inputs, chunks, strict=True)
            ]

        mine = of(self.rank)
        sums = [shard[: part.numel()] for shard, part in zip(call.outputs, mine, strict=True)]
        parts = {rank: of(rank) for rank in range(self.world_size)}
        return self._post(call, parts=parts, sums=sums)

    def _all_reduce(self, call: Call) -> Work:
        """Add in the order of ranks."""
        parts = dict.fromkeys(range(self.world_size), call.outputs)
        return self._post(call, parts=parts, sums=call.outputs)

    def _post(self, call: Call, **given: Any) -> Work:
        op = f" with {call.op.name}" if "sums" in given else ""
        name = f"{call.kind.value} of {call.label.name or 'tensors'}{op}"
        sizes = tuple((each.numel(), each.dtype) for each in call.outputs)
        issued = 0
        if observe.is_observed():
            fulls = call.inputs if call.kind is Kind.REDUCE_SCATTER else call.outputs
            nbytes = sum(full.nbytes for full in fulls)
            activity = Activity(call.kind.value)
            issued = observe.collective(activity, call.label.name, self._wire, nbytes, 1)
        work = self._channel.post(self.rank, Contribution(name, sizes, call.label.detail, **given))

        def finish() -> None:
            with observe.during(Activity.WAIT, call.label.name, self._wire.dimension):
                work.wait()
            observe.end(issued)

        return PendingWork(finish)
