"""What ranks do to save: plan, write and commit.

The one checkpoint that a process is saving while it trains on.

A checkpoint of which this rank's part is copied: training may go on while it is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.checkpoint.disk.commit import StrPath, keep_last
from shardwise.checkpoint.disk.entries import ModelFacts
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.state import State, facts_of, local_of, state_of
from shardwise.checkpoint.storage import Writer
from shardwise.errors import CheckpointError


@dataclass
class Saving:
    """One checkpoint to be saved by all ranks of a group.

    Attributes:
        path: the folder that it becomes.
        facts: what the checkpoint tells of the model.
        ranks: who saves.
        keep_last: how many checkpoints to keep, this one included; all, if ``None``.

    Raises:
        ValueError: ``keep_last`` is not positive.
    """

    path: Path
    facts: ModelFacts
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
        writer = Writer(self.path, facts=self.facts)
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


class Handle:
    """A checkpoint that is being saved.

    Args:
        work: saves it.
        path: where.
    """

    def __init__(self, work: Callable[[], None], path: Path) -> None:
        self.path = path
        self._work = work
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}")
        self._thread.start()

    def done(self) -> bool:
        """Whether it is saved, or has failed.

        Returns:
            ``True`` if :meth:`result` does not have to wait.
        """
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is whole and on the disk.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Where it is.

        Raises:
            CheckpointError: it could not be saved.
            TimeoutError: it takes longer.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"saving {self.path}: is not done after {timeout} s")
        if self._error is not None:
            self._told = True
            raise CheckpointError(str(self._error)) from self._error
        return self.path

    def settle(self) -> None:
        """Wait, and raise an error that nobody has been told yet.

        Raises:
            CheckpointError: it could not be saved.
        """
        self._thread.join()
        if not self._told:
            self.result()

    def forget(self) -> None:
        """Count its error as told: the caller knows it already."""
        self._told = True

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # and the copies with it


# One a process, because the host's memory is: a second would need room for copies of its own.
_current: Handle | None = None


def start_saving(work: Callable[[], None], path: Path) -> Handle:
    """Begin to save; :func:`wait_for_save` has been called before."""
    global _current
    _current = Handle(work, path)
    return _current


def wait_for_save() -> None:
    """Wait for what is being saved, if anything is.

    Raises:
        CheckpointError: it could not be saved, and nobody has been told yet.
    """
    global _current
    before, _current = _current, None
    if before is not None:
        before.settle()


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, complete when this returns.

    What several names share is copied once.
    """
    made: dict[tuple[object, ...], Tensor] = {}
    copied: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            local = local_of(tensor)
            key = (
                *(local.data_ptr(), local.shape, local.stride(), local.dtype),
                *(local.is_conj(), local.is_neg()),
            )
            if key not in made or not local.numel():
                made[key] = _copy(local)
            spec = dtensor.spec_of(tensor) if isinstance(tensor, DTensor) else None
            copied[name] = made[key] if spec is None else dtensor.wrap_local(made[key], spec)
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copied


def _copy(local: Tensor) -> Tensor:
    """A copy; from a GPU it is only begun."""
    if local.device.type == "cpu":
        return local.clone(memory_format=torch.contiguous_format)
    copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")
    return copy.copy_(local, non_blocking=True)


class Snapshot:
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
        wait_for_save()
        ranks = Ranks(group_for(group))
        self._saving = Saving(Path(path), facts_of(model), ranks, keep_last)
        self._state = State()
        self.path = self._saving.path
        self.error: Exception | None = None
        try:
            self._state = state_of(model, optimizer, extra)
            self._state.tensors = copies(self._state.tensors)
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


def save(
    path: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a checkpoint. Every rank calls it, with the same path.

    When it returns, the checkpoint is whole and on the disk. If it raises, on all ranks alike, or
    if processes are killed, nothing of its name is there, and all others are as they were.

    Each rank writes its own shards from where they lie; what several ranks hold alike is written
    once. A model that is not sharded, in one process without a process group, works as well.

    Args:
        path: the folder that the checkpoint becomes. There must be nothing of that name. Leftovers
            of killed processes beside it are deleted.
        model: sharded or not.
        optimizer: over the model's parameters.
        extra: what else belongs to it: step, random states, position in the data. Tensors that are
            no ``DTensor``, and plain values: None, bool, int, float, str, bytes, list, tuple, dict.
            Ranks should have the same under one key: of plain values the first rank's is kept, of
            tensors any rank's. So give each rank keys of its own for what is its own.
        keep_last: once it is committed, delete all complete checkpoints named ``step-...`` beside
            it but the newest so many.
        group: the ranks that save together; all of the default process group, if there is one.

    Raises:
        CheckpointError: a rank could not do its part; the message names it. It could not write;
            or something is neither a tensor nor a plain value, is on the meta device, or has the
            name of another.
    """
    wait_for_save()
    Saving(Path(path), facts_of(model), Ranks(group_for(group)), keep_last).run(
        lambda: state_of(model, optimizer, extra)
    )


def async_save(
    path: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Handle:
    """Save a checkpoint while training goes on. Every rank calls it, with the same path.

    It returns once all shards are copied to the host's memory. A thread does the rest, as
    :func:`save`, and talks to other ranks through a process group of its own.

    A process saves one checkpoint at a time: the next save, or load, first waits for this one. If
    this one failed and the handle was not asked, that next call raises the error instead; so ask
    the handle on all ranks or on none.

    Args:
        path: as for :func:`save`, and so are the others.
        model: may change as soon as this returns.
        optimizer: may change as well.
        extra: may change as well.
        keep_last: as for :func:`save`.
        group: as for :func:`save`.

    Returns:
        Something to wait for. Wait before the process group is destroyed.

    Raises:
        CheckpointError: the save before this one failed.
        TypeError: something on this rank is neither a tensor nor a plain value.
        ValueError: something on this rank is on the meta device, or has the name of another.
    """
    copied = Snapshot(path, model, optimizer, extra, keep_last=keep_last, group=group)
    handle = start_saving(copied.write, copied.path)
    if copied.error is not None:
        # Other ranks are waiting for this one's part: they are told, and so is the caller here.
        handle.forget()
        raise copied.error
    return handle
