"""Replicas that train apart (DiLoCo): their exchanges, and a checkpoint for each of them.

checkpoints/step-00000040/               replica 0, committed last: complete if all others are
checkpoints/replicas/1/step-00000040/    replica 1: its inner parameters and optimizer differ

The other replicas keep what the first one keeps, and nothing of theirs is deleted before it has
committed. Whatever else they have is left from an attempt that failed.

Where they are worlds of their own, a file says what happens among them:

    {"event": "started", "time": 1763931000.0, "replica": 2, "incarnation": 1, "pids": [4711]}
    {"event": "round", "time": 1763931020.5, "round": 8, "replicas": [0, 1], "late": [], ...}
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.app.recipes.core.checkpointing import Checkpoints, Resumable, SaveError, on_rank_zero
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.rundir import REPLICAS
from shardwise.base import devices
from shardwise.base.errors import CheckpointError
from shardwise.base.say import say
from shardwise.checkpoint.disk.commit import delete, step_folder, steps
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.diloco import DiLoCo, Quorum
from shardwise.diloco.coordinator import Event, EventKind, numbers_of
from shardwise.diloco.membership import TIMEOUT
from shardwise.elastic.world import ReplicaWorld
from shardwise.frontends.strategies import REPLICATE, SHARD
from shardwise.insight.schema.training import TrainConfig
from shardwise.transport.peers import Peers

#: The most steps until all ranks tell each other whether they were asked to stop.
MEET_EVERY = 10


@dataclass(frozen=True)
class Replicas:
    """The replicas of a run, as its training loop sees them.

    Where each is a world of its own, steps are counted in rounds: a replica that catches up, or
    that another one has called to an exchange before it had done all of its steps, goes on at the
    first step of the next round. So all have the same learning rate, and no example that has
    changed the parameters comes again.

    Attributes:
        diloco: of this rank.
        mesh: (replicate, shard); where replicas are worlds, the first has one rank.
        replica: the one that this world is; None: the world has all of them.
        local_steps: steps of each replica between two exchanges.
        tokens: of an example.
    """

    diloco: DiLoCo
    mesh: DeviceMesh
    replica: ReplicaWorld | None
    local_steps: int
    tokens: int

    @property
    def own_group(self) -> dist.ProcessGroup:
        """The ranks of this replica, which average gradients."""
        return self.mesh.get_group(SHARD)

    def group_after(self, step: int) -> dist.ProcessGroup | None:
        """Return the ranks that exchange losses and signals after a step; ``None``: all."""
        alone = self.replica is None and step % min(MEET_EVERY, self.local_steps)
        return self.own_group if alone else None

    def count(self, examples: int) -> None:
        """Count the examples that a rank of this replica has trained on in a step."""
        self.diloco.count_tokens(examples * self.tokens * self.mesh.size(1))

    def reached(self, step: int) -> int:
        """Return the step that this replica is at: at least the first one of the round."""
        if self.replica is None:
            return step  # all go together
        return max(step, self.diloco.rounds[0] * self.local_steps)


def replicas_of(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    mesh: DeviceMesh,
    replica: ReplicaWorld | None,
    train: TrainConfig,
    tokens: int,
) -> tuple[DiLoCo, Replicas]:
    """Return the optimizer of this rank's replica, and the replicas.

    Args:
        model: of this rank.
        inner: the inner optimizer.
        mesh: (replicate, shard).
        replica: the one that this world is; None: the world has all of them.
        train: how replicas exchange parameters, and how long one may take.
        tokens: of an example.
    """
    config = train.diloco
    assert config is not None
    quorum: Quorum | None = None
    if replica is not None:
        quorum = Quorum(
            server=replica.server,
            replica=replica.number,
            group=mesh.get_group(SHARD),
            token=replica.token,
            timeout=TIMEOUT if train.peer_timeout is None else train.peer_timeout,
        )
    diloco = DiLoCo(
        model,
        inner,
        outer=config.outer,
        every=config.local_steps,
        group=mesh[REPLICATE] if quorum is None else quorum,
        wire=config.wire,
        error_feedback=config.keeps_errors,
        streaming=config.streaming,
    )
    return diloco, Replicas(diloco, mesh, replica, config.local_steps, tokens)


class ReplicaCheckpoints(Checkpoints):
    """The checkpoints of a run whose replicas train apart: one for each replica.

    Each gets the positions of the data of all ranks.

    Args:
        folder: where they are.
        keep_last: how many to keep.
        mesh: (replicate, shard).
        data: data that save a position of their own.
    """

    def __init__(
        self, folder: Place, keep_last: int, mesh: DeviceMesh, data: Resumable | None
    ) -> None:
        self._count = mesh.size(0)
        self._number = mesh.get_local_rank(REPLICATE)
        self.own_group = mesh.get_group(SHARD)
        super().__init__(folder, keep_last, data, device=devices.current(mesh.device_type))

    def write(self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save every replica, the first one last. Every rank calls it.

        What other replicas saved of this step in an attempt that failed is replaced.

        Raises:
            SaveError: a rank could not write; every rank raises it.
        """
        own = self._own(optimizer)
        try:
            self._in_turn(position, lambda: own.write(position, model, optimizer))()
        except CheckpointError as error:
            raise SaveError(str(error)) from error

    def copied(
        self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[], None]:
        """Copy this rank's part; return what writes the checkpoints of all replicas.

        Raises:
            CheckpointError: what is in the way of it cannot be deleted.
        """
        return self._in_turn(position, self._own(optimizer).copied(position, model, optimizer))

    def _own(self, optimizer: torch.optim.Optimizer) -> Checkpoints:
        """Return this replica's checkpoints, once all ranks are ready to save in turn."""
        if isinstance(optimizer, DiLoCo):
            optimizer.finish_exchanges()
        own = self._of(self._number)
        if self.data is not None:
            parts = Peers().gather_objects(self.data.state(), "the positions of streams")
            own.collected = {name: value for part in parts for name, value in part.items()}
        return own

    def _in_turn(self, position: Position, part: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does this replica's part; the first replica comes last."""
        ranks = Ranks(group_for(None))
        doing = f"saving step {position.step}"

        def all_parts() -> None:
            for first in (False, True):
                own_turn = (self._number == 0) == first
                ranks.all(doing, part if own_turn else lambda: None)
            kept = ranks.first(doing, lambda: steps(self.folder))
            ranks.all(doing, lambda: self._delete_but(kept))

        return all_parts

    def _delete_but(self, kept: list[int]) -> None:
        """Delete the steps of this replica that the first one does not have."""
        if self._number == 0 or dist.get_rank(self.own_group) != 0:
            return
        folder = self._folder_of(self._number)
        for step in steps(folder):
            if step not in kept:
                delete(step_folder(folder, step))

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Load the checkpoint of each replica. Every rank calls it.

        If there are more replicas than before, the new ones begin as copies of the old ones.

        Raises:
            UserError: a checkpoint is damaged, or is of another model.
        """
        # The count decides which ranks load together.
        count = on_rank_zero(f"looking at step {step}", lambda: self.replicas(step))
        return self._of(self._number % count).load(step, model, optimizer)

    def _of(self, number: int) -> Checkpoints:
        """Return the checkpoints of a replica. The first one decides what the others keep."""
        checkpoints = Checkpoints(
            self._folder_of(number),
            self.keep_last if number == 0 else None,
            self.data,
            group=self.own_group,
            replicas=self._count,
            device=self.device,
        )
        checkpoints.best = self.best
        checkpoints.store = self.store if number == 0 else None
        return checkpoints

    def _folder_of(self, number: int) -> Place:
        return self.folder if number == 0 else self.folder / REPLICAS / str(number)


class RoundsFile:
    """Writes a line of JSON for everything that happens, and tells of what is unusual.

    Args:
        path: the file; lines are appended.
        replicas: how many there are.
        report: called for each line of text.
    """

    def __init__(self, path: Path, replicas: int, report: Callable[[str], object] = say) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._writing = threading.Lock()
        self._replicas = replicas
        self._report = report
        self._incarnations: dict[int, int] = {}

    def close(self) -> None:
        """Close the file."""
        with self._writing, contextlib.suppress(OSError):
            self._file.close()

    def started(self, replica: ReplicaWorld, pids: list[int]) -> None:
        """Note that the processes of a replica were started."""
        self._incarnations[replica.number] = replica.restarts
        self._write("started", replica=replica.number, incarnation=replica.restarts, pids=pids)

    def lost(self, replica: ReplicaWorld, why: str) -> None:
        """Note that the processes of a replica have ended before the training has."""
        self._write("lost", replica=replica.number, incarnation=replica.restarts, why=why)
        self._report(f"replicas   replica {replica.number} {why}")

    def happened(self, event: Event) -> None:
        """Note what the quorum has reported."""
        number, going_on = event.replica, len(event.live)
        match event.kind:
            case EventKind.ROUND:
                self._round(event)
            case EventKind.LOST:
                self._write("disconnected", replica=number, round=event.round)
                them = "none go on" if not going_on else f"{going_on} of {self._replicas} go on"
                self._report(
                    f"replicas   replica {number} was lost in round {event.round + 1}; {them}"
                )
            case EventKind.LEFT:
                self._write("left", replica=number, round=event.round)
            case EventKind.JOINED | EventKind.CAUGHT_UP:
                source = None if event.source < 0 else event.source
                self._write(
                    "joined" if event.kind is EventKind.JOINED else "caught-up",
                    replica=number,
                    incarnation=self._incarnations.get(number, 0),
                    round=event.round,
                    source=source,
                    seconds=round(event.seconds, 3),
                )
                if source is not None:
                    self._report(
                        f"replicas   replica {number} is back in round {event.round + 1}: caught "
                        f"up from replica {source} in {event.seconds:.1f} s"
                    )

    def _round(self, event: Event) -> None:
        attempt = event.attempt
        assert attempt is not None
        members = sorted(attempt.members)
        self._write(
            "round",
            round=event.round,
            replicas=members,
            tokens=[attempt.tokens[replica] for replica in members],
            late=list(event.late),
            attempts=event.attempts,
            seconds=round(event.seconds, 3),
        )
        if event.late:
            one = len(event.late) == 1
            noun, verb = ("replica", "was") if one else ("replicas", "were")
            self._report(
                f"replicas   round {event.round}: {len(members)} of {self._replicas}; "
                f"{noun} {numbers_of(event.late)} {verb} late"
            )

    def _write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values})
        with self._writing, contextlib.suppress(OSError, ValueError):  # a full disk is no end
            self._file.write(line + "\n")
            self._file.flush()
