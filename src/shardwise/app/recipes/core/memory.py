"""A run in the memory of its hosts: kept every N steps, and brought back after a loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
from torch import nn

from shardwise.app.recipes.core.checkpointing import Checkpoints, SaveError, on_rank_zero
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.base.errors import CheckpointError, UserError, lost_peer_behind
from shardwise.base.units import binary_size, counted
from shardwise.checkpoint.ranks.neighbor import (
    Neighbors,
    neighbors_of,
    words_of_loss,
)
from shardwise.checkpoint.ranks.ring import ReplicaCost

#: Seconds of waiting for the version before that are worth a word.
_LONG = 0.05


class RunInMemory:
    """What the hosts of a run keep in memory.

    Args:
        every: steps from one version to the next.
        checkpoints: of the run.
        say: tells the user.
    """

    def __init__(self, every: int, checkpoints: Checkpoints, say: Callable[[str], object]) -> None:
        self._every, self._checkpoints, self._say = every, checkpoints, say
        self._neighbors: Neighbors = neighbors_of(None)
        self._has_warned = False

    def recover(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, files: RunDir
    ) -> Position | None:
        """Bring the run back, if hosts have kept it since its newest checkpoint. All ranks call it.

        Args:
            model: of the run.
            optimizer: of the run.
            files: its folder, which need not have a checkpoint.

        Returns:
            How far it is; ``None``: there is nothing to go on from.

        Raises:
            UserError: versions cannot be kept here.
        """
        checkpoints = self._checkpoints
        saved = on_rank_zero(f"looking for checkpoints in {files.place}", checkpoints.steps)
        at_least = saved[-1] if saved else 0
        try:
            found = self._neighbors.recover((model, optimizer), at_least)
        except CheckpointError as error:
            if lost_peer_behind(error) is not None:
                raise
            raise UserError(f"--replicate-every: {error}") from error
        if found is None and self._neighbors.lost is not None:
            since = f"the checkpoint of step {at_least}" if at_least else "the beginning"
            self._say(f"memory     {words_of_loss(self._neighbors.lost)}; going on from {since}")
        if found is None:
            return None
        position = checkpoints.go_on(found.extra, files.place)
        checkpoints.restore_random(found.extra, files.place, found.world_size)
        self._say(f"memory     step {found.step} is back, without the disk")
        return position

    def keep_if_due(
        self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep a version every so many steps, and the first: it shows whether there is room.

        It waits for the version before: so a loss never costs more than two versions.

        Raises:
            SaveError: this one, or the one before, could not be kept; every rank raises it.
        """
        is_first = self._neighbors.cost is None
        if not is_first and position.step % self._every:
            return
        began, was_under_way = time.perf_counter(), self._neighbors.is_under_way
        try:
            self._neighbors.wait()
            waited = time.perf_counter() - began
            extra = self._checkpoints.extra(position)
            self._neighbors.start(position.step, (model, optimizer), extra)
        except CheckpointError as error:
            raise SaveError(f"--replicate-every: step {position.step}: {error}") from error
        if is_first and (cost := self._neighbors.cost) is not None:
            self._say(f"memory     {described(cost, self._every)}")
        if was_under_way and waited > _LONG and not self._has_warned:
            self._has_warned = True
            self._say(
                f"memory     training waited {waited:.1f} s for the version before, which was "
                "still being sent: a larger --replicate-every waits less"
            )

    def wait(self) -> None:
        """Wait for the version under way, whatever becomes of it: the run is saved."""
        with contextlib.suppress(CheckpointError):
            self._neighbors.wait()


def described(cost: ReplicaCost, every: int) -> str:
    """Say in a line what keeping versions takes."""
    kept = f"two versions take {binary_size(cost.memory)} of this host's memory"
    if cost.hosts == 1:
        return f"{kept}; on one host, they survive its processes, but not the host"
    sent = f"a rank sends {binary_size(cost.sent)} every {counted(every, 'step')}"
    return f"{kept}; {sent} to the next of {cost.hosts} hosts"
