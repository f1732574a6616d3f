"""A checkpoint of which this rank's part is copied: training may go on while it is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.ranks import background
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.describe import facts_of
from shardwise.checkpoint.ranks.saving import Saving, state_of
from shardwise.checkpoint.ranks.state import State


class Copied:
    """What a rank has to save, in memory of its own. Every rank makes it, with the same path.

    It waits for the checkpoint that is being saved, if one is: there is room for one copy.

    Args:
        path: the folder that the checkpoint becomes.
        model: may change as soon as this is made.
        optimizer: may change as well.
        extra: may change as well.
        keep_last: as for :func:`shardwise.checkpoint.save`.
        group: the ranks that save together; ``None``: all.

    Attributes:
        path: where it goes, in full.
        error: why this rank's part could not be copied, if so; :meth:`write` tells the others.

    Raises:
        CheckpointError: the save before this one failed.
        ValueError: ``keep_last`` is not positive.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any] | None,
        *,
        keep_last: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        background.wait()
        ranks = Ranks(background.group_for(group))
        self._saving = Saving(Path(path), facts_of(model), ranks, keep_last)
        self._state = State()
        self.path = self._saving.path
        self.error: Exception | None = None
        try:
            self._state = state_of(model, optimizer, extra)
            self._state.tensors = background.copies(self._state.tensors)
        except Exception as error:
            self.error = error

    def write(self) -> None:
        """Write and commit it. All ranks of the group do, at any time, in any thread.

        Raises:
            CheckpointError: a rank could not do its part; on every rank alike.
        """
        self._saving.run(self._copied)

    def _copied(self) -> State:
        if self.error is not None:
            raise self.error
        return self._state
