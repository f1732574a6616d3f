"""Replicas that train apart: what a recipe does for them beside training.

checkpoints/step-00000040/               replica 0, committed last: complete if all others are
checkpoints/replicas/1/step-00000040/    replica 1: its inner parameters and optimizer differ

The further replicas keep what the first one keeps, and nothing is deleted of them before it has
committed: what they have beyond that is left from an attempt that ended, whatever its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpoint.disk.commit import delete, step_folder, steps
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.diloco import DiLoCo
from shardwise.errors import CheckpointError
from shardwise.frontends.strategies import REPLICATE, SHARD
from shardwise.recipes.core.checkpointing import Checkpoints, Resumable, SaveError
from shardwise.recipes.core.config import DilocoConfig
from shardwise.recipes.core.position import Position
from shardwise.recipes.core.rank import on_rank_zero
from shardwise.recipes.core.rundir import REPLICAS
from shardwise.transport.peers import Peers

#: After so many steps at most, all ranks tell each other whether they were asked to stop.
MEET_EVERY = 10


class Replicas:
    """The replicas of a run, as its training loop sees them.

    Args:
        diloco: of this rank.
        mesh: (replicate, shard).
        config: how they meet.
    """

    def __init__(self, diloco: DiLoCo, mesh: DeviceMesh, config: DilocoConfig) -> None:
        self._diloco = diloco
        self._every = min(MEET_EVERY, config.local_steps)
        self._own_group: dist.ProcessGroup = mesh.get_group(SHARD)

    def group_after(self, step: int) -> dist.ProcessGroup | None:
        """The ranks that tell each other how they do after a step; ``None``: all of them."""
        return self._own_group if step % self._every else None

    def outer_parameters(self) -> AbstractContextManager[None]:
        """Inside, the model of every replica has the outer parameters."""
        return self._diloco.outer_parameters()

    def end(self) -> None:
        """After the last step: all replicas become alike."""
        self._diloco.flush()


def replicas_of(
    model: nn.Module, inner: torch.optim.Optimizer, mesh: DeviceMesh, config: DilocoConfig
) -> tuple[DiLoCo, Replicas]:
    """The optimizer of a replica, as it was asked for, and the replicas."""
    diloco = DiLoCo(
        model,
        inner,
        outer=config.outer,
        every=config.local_steps,
        group=mesh[REPLICATE],
        wire=config.wire,
        error_feedback=config.error_feedback,
        streaming=config.streaming,
    )
    return diloco, Replicas(diloco, mesh, config)


class _PositionOfAll:
    """What the data of all ranks say of where they stand, for the checkpoint of each replica.

    Args:
        data: of this rank.
    """

    def __init__(self, data: Resumable) -> None:
        self._data = data
        self._told: dict[str, Any] = {}

    def tell(self) -> None:
        """Tell all ranks, and hear from all. Every rank calls it."""
        parts = Peers().gather_objects(self._data.state(), "the positions of streams")
        self._told = {name: value for part in parts for name, value in part.items()}

    def state(self) -> dict[str, Any]:
        """What all ranks have told."""
        return self._told

    def load_state(self, state: Mapping[str, Any], where: Path) -> None:
        """Go on from it.

        Raises:
            CheckpointError: it is no such state.
        """
        self._data.load_state(state, where)


class ReplicaCheckpoints(Checkpoints):
    """The checkpoints of a run whose replicas train apart: one of each replica.

    Args:
        folder: where they lie.
        keep_last: how many to keep.
        mesh: (replicate, shard).
        data: what has a position of its own in them.
    """

    def __init__(
        self, folder: Path, keep_last: int, mesh: DeviceMesh, data: Resumable | None
    ) -> None:
        self._count = mesh.size(0)
        self._number = mesh.get_local_rank(REPLICATE)
        self._own_group = mesh.get_group(SHARD)
        self._position = None if data is None else _PositionOfAll(data)
        self._root, self._keep = folder, keep_last
        super().__init__(folder, keep_last)

    def write(self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save every replica, the first one last. Every rank calls it.

        What other replicas saved of this step and the first did not, in an attempt that ended, is
        replaced.

        Raises:
            SaveError: a rank could not write; every rank raises it.
        """
        self._come_together(optimizer)

        def part() -> None:
            self._of(self._number).write(position, model, optimizer)

        try:
            self._in_turn(position, part)()
        except CheckpointError as error:
            raise SaveError(str(error)) from error

    def copied(
        self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[], None]:
        """What writes the checkpoints of all replicas, of which this rank's part is copied.

        Raises:
            CheckpointError: what is in the way of it cannot be deleted.
        """
        self._come_together(optimizer)
        return self._in_turn(position, self._of(self._number).copied(position, model, optimizer))

    def _come_together(self, optimizer: torch.optim.Optimizer) -> None:
        """What all ranks do together, before replicas save one after the other."""
        if isinstance(optimizer, DiLoCo):
            optimizer.finish_exchanges()
        if self._position is not None:
            self._position.tell()

    def _in_turn(self, position: Position, part: Callable[[], None]) -> Callable[[], None]:
        """Does a replica's part; the first one's when all others are done."""
        ranks = Ranks(group_for(None))
        doing = f"saving step {position.step}"

        def nothing() -> None:
            """It is the others' turn."""

        def all_parts() -> None:
            for first in (False, True):
                own_turn = (self._number == 0) == first
                ranks.all(doing, part if own_turn else nothing)
            kept = ranks.first(doing, lambda: steps(self._root))
            ranks.all(doing, lambda: self._delete_but(kept))

        return all_parts

    def _delete_but(self, kept: list[int]) -> None:
        """Delete what a further replica has of steps that the first one does not have."""
        if self._number == 0 or dist.get_rank(self._own_group) != 0:
            return
        folder = self._folder_of(self._number)
        for step in steps(folder):
            if step not in kept:
                delete(step_folder(folder, step))

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Load what each replica has saved. Every rank calls it.

        Where there are more replicas than there were, the further ones begin as the first ones do.

        Raises:
            UserError: a checkpoint is damaged, or is of another model.
        """
        # It decides which ranks load together.
        count = on_rank_zero(f"looking at step {step}", lambda: self.replicas(step))
        return self._of(self._number % count).load(step, model, optimizer)

    def _of(self, number: int) -> Checkpoints:
        """The checkpoints of a replica. What the others keep, the first one decides."""
        return Checkpoints(
            self._folder_of(number),
            self._keep if number == 0 else None,
            self._position,
            group=self._own_group,
            replicas=self._count,
        )

    def _folder_of(self, number: int) -> Path:
        return self._root if number == 0 else self._root / REPLICAS / str(number)
