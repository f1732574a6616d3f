"""A world of ranks that are threads of this process, as the rest of the library sees it."""

from __future__ import annotations

import contextvars
import copy
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import threads
from shardwise.base import devices
from shardwise.base.devices import Backend
from shardwise.schedules import Schedule
from shardwise.simulated.group import Channel, SimulatedGroup
from shardwise.simulated.turns import RankTurns
from shardwise.transport.base import NO_LABEL, Call, Transport, Work
from shardwise.transport.carrier import Announced, Carrier, carried_by
from shardwise.transport.collectives import CollectivesTransport
from shardwise.transport.peers import Peers

_BACKEND = Backend("simulated", shares_memory=True)
_numbers = itertools.count()


class SimulatedWorld(Carrier):
    """Ranks that are threads, and what carries between them.

    Args:
        world_size: number of ranks.
        hosts: the names of the hosts that they are on, by rank; by default all are on one.

    Attributes:
        turns: lets one rank run at a time.
    """

    def __init__(self, world_size: int, hosts: Sequence[str] = ()) -> None:
        self.turns = RankTurns(world_size)
        self._hosts = list(hosts) or ["host"] * world_size
        self._number = next(_numbers)
        self._channels: dict[str, Channel] = {}
        self._wires: dict[tuple[str, int], str] = {}
        self._has_joined = False

    def run(self, function: Callable[[int], Any], schedule: Schedule) -> list[Any]:
        """Call ``function(rank)`` on every rank, and return what it returned, by rank.

        Args:
            function: any function.
            schedule: decides whose turn is next.

        Raises:
            Exception: what a rank raised first.
            RuntimeError: the ranks have ended, or this process runs others.
        """
        context = contextvars.copy_context()
        kinds = sorted({devices.CPU.type, devices.default_type()})

        def run() -> list[Any]:
            with carried_by(self):
                if not self._has_joined:
                    self._has_joined = True
                    self.turns.run(self._join)
                self.turns.schedule = schedule
                return self.turns.run(lambda rank: context.copy().run(function, rank))

        return threads.call_with_worlds_of_threads(run, self._create, self._number_of_rank, kinds)

    def end(self) -> None:
        """End the threads, unless they are in a function."""
        self.turns.end()
        if self.turns.has_ended:
            self._channels.clear()
            self._wires.clear()
            threads.forget_meshes()

    def _join(self, rank: int) -> None:
        size, host = self.turns.world_size, self._hosts[rank]
        on_host = self._hosts[:rank].count(host)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            GROUP_RANK=str(list(dict.fromkeys(self._hosts)).index(host)),
            LOCAL_RANK=str(on_host % (devices.count() or size)),  # ranks share accelerators
        )
        numpy = sys.modules.get("numpy")
        if numpy is not None:  # a generator is an object: the others keep the one that is here
            numpy.random.set_bit_generator(copy.deepcopy(numpy.random.get_bit_generator()))
        threads.join_world_of_threads(rank, size)

    def _create(self, rank: int, members: Sequence[int], name: str) -> dist.ProcessGroup:
        channel = self._channels.setdefault(name, Channel(name, members, self.turns))
        return SimulatedGroup(rank, channel)

    def _number_of_rank(self) -> int:
        """Return a number that no rank of another world has, nor any thread of the system."""
        if not self.turns.is_rank():
            return threading.get_ident()
        return -1 - self._number * 1000 - self.turns.rank

    # -- as a carrier -----------------------------------------------------------------------------

    def backend(self, peers: Peers, device: torch.device) -> Backend:
        """Return what a simulated process group can do."""
        return _BACKEND

    def share_memory(self, peers: Peers) -> Transport | str:
        """Make the transport of threads, which share all memory."""
        return SimulatedTransport(peers.group)

    def check_threads(self) -> None:
        """Refuse collectives in other threads: each rank is one."""
        raise RuntimeError(
            f"rank {self.turns.rank} of {self.turns.world_size} is simulated, and saves in no "
            "other thread: call checkpoint.save() in place of async_save(), or start processes"
        )

    def announce(self, peers: Peers, wire: str) -> None:
        """Note the wire that this rank has for a group."""
        self.turns.pause()
        self._wires.setdefault((peers.group.group_name, peers.rank), wire)

    def announced(self, peers: Peers) -> Sequence[Announced]:
        """Wait until all ranks of a group have announced a wire; return what they have."""
        keys = [(peers.group.group_name, place) for place in range(peers.size)]
        doing = f"the comparison of wires in group {peers.group.group_name}"
        self.turns.wait_for(lambda: all(key in self._wires for key in keys), doing)
        return [
            Announced(self._hosts[rank], self._wires[key])
            for key, rank in zip(keys, peers.members, strict=True)
        ]


class SimulatedTransport(CollectivesTransport):
    """Collectives of a simulated process group, which compares what they are of.

    Args:
        group: one rank of it.
    """

    name = "simulated"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group, _BACKEND)
        self.overlaps_compute = False

    def start(self, call: Call) -> Work:
        """Start a collective."""
        group: Any = self.group
        group.label = call.label
        try:
            return super().start(call)
        finally:
            group.label = NO_LABEL
