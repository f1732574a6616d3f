"""What ranks do to save: plan, write and commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from shardwise.checkpoint.disk.commit import keep_last
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.optimizer import optimizer_tree, parameter_names
from shardwise.checkpoint.ranks.state import State
from shardwise.checkpoint.ranks.storage import Writer
from shardwise.errors import CheckpointError
from shardwise.sharding.state_dicts import sharded_state_dicts


@dataclass
class Saving:
    """One checkpoint to be saved by all ranks of a group.

    Attributes:
        path: the folder that it becomes.
        strategy: how the model is sharded, in words.
        ranks: who saves.
        keep_last: how many checkpoints to keep, this one included; all, if ``None``.

    Raises:
        ValueError: ``keep_last`` is not positive.
    """

    path: Path
    strategy: str
    ranks: Ranks
    keep_last: int | None

    def __post_init__(self) -> None:
        # The thread of async_save gets there later, when the process may be in another folder.
        self.path = Path(os.path.abspath(self.path))
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last: found {self.keep_last}, expected 1 or more")

    def run(self, state: Callable[[], State]) -> None:
        """Plan, write and commit, in the order in which torch's ``dcp.save`` does.

        Args:
            state: gives what this rank has to save.

        Raises:
            CheckpointError: a rank could not do its part; on every rank alike.
        """
        doing = f"saving {self.path}"
        writer = Writer(self.path, strategy=self.strategy)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata: Any = None

        def plan_part() -> SavePlan:
            mine = state()
            writer.describe(mine.origins, mine.values)
            planner.set_up_planner(mine.tensors, is_coordinator=self.ranks.coordinates)
            writer.set_up_storage_writer(self.ranks.coordinates)
            return writer.prepare_local_plan(planner.create_local_plan())

        def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        def finish(results: list[list[WriteResult]]) -> list[None]:
            writer.finish(metadata, results)
            self._delete_old()
            return [None] * len(results)

        try:
            plan = self.ranks.together(doing, plan_part, plan_all)
            final = planner.finish_plan(plan)
            self.ranks.together(doing, lambda: writer.write_data(final, planner).value(), finish)
        except BaseException:
            writer.abandon()
            raise

    def _delete_old(self) -> None:
        if self.keep_last is None:
            return
        try:
            keep_last(self.path.parent, self.keep_last, spare=self.path)
        except OSError as error:
            raise CheckpointError(
                f"is saved; but an older one cannot be deleted: {error.filename}: {error.strerror}"
            ) from error


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
) -> State:
    """What this rank has to save; the memory is still the model's and the optimizer's own.

    Raises:
        TypeError: something is neither a tensor nor a plain value.
        ValueError: something is on the meta device, or has the name of another.
    """
    state = State()
    with sharded_state_dicts(model):
        saved = get_model_state_dict(model)
    state.add("model", saved)
    if optimizer is not None:
        state.add("optimizer", optimizer_tree(optimizer, parameter_names(model, saved)))
    state.add("extra", extra or {})
    return state
