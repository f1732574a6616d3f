"""The checkpoints of a run: what a training adds to :mod:`shardwise.checkpoint`.

checkpoints/step-00000040/    model, optimizer, and in `extra`: position, random states
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardwise.app.recipes.core.position import Position
from shardwise.base.errors import CheckpointError, StoreError, UserError
from shardwise.checkpoint.disk.commit import (
    damage,
    delete,
    delete_partial,
    is_complete,
    step_folder,
    steps,
)
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.disk.place import Place

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from shardwise.app.recipes.core.stored import RunStore
    from shardwise.checkpoint import Handle
    from shardwise.checkpoint.ranks.agreement import Ranks
    from shardwise.checkpoint.ranks.saving import Saving

T = TypeVar("T")

# Where DiLoCo keeps the outer state; it hides that from those who look at the inner one's.
DILOCO = "diloco"
_POSITION, _RANDOM, _DATA, _REPLICAS = "position", "random", "data", "replicas"
_BASE = "base"  # shardwise.checkpoint.formats.source knows it, too


class Resumable(Protocol):
    """Data whose position is more than a number of examples."""

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the position: tensors and plain values under its own names."""

    def load_state(self, state: Mapping[str, Any], where: Place) -> None:
        """Go on from the parts of all ranks together, in the same or another world.

        Raises:
            CheckpointError: it is no such state; ``where`` names the file it is from.
        """


@dataclass(frozen=True)
class Best:
    """The checkpoint whose evaluation was the best one so far.

    Attributes:
        step: its step.
        loss: its validation loss.
    """

    step: int
    loss: float

    @classmethod
    def among(cls, records: Iterable[Mapping[str, Any]], steps: Collection[int]) -> Best | None:
        """Return the best of some steps by the records of ``metrics.jsonl``; None: none has one."""
        found = [
            cls(record["step"], loss)
            for record in records
            if record["step"] in steps and (loss := record.get("validation_loss")) is not None
        ]
        return min(found, key=lambda each: each.loss, default=None)


class SaveError(UserError):
    """A checkpoint could not be written: the disk is full, or the folder is gone."""

    exit_code = 1


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when the first one is saved.
        keep_last: how many to keep; older ones are deleted once a newer one is complete. ``None``:
            all.
        data: data that save a position of their own.
        group: the ranks that save together; ``None``: all.
        replicas: number of replicas that train apart, each with checkpoints of its own.
        device: where this rank trains; ``None``: on the CPU.
        base: where the frozen parameters are from, which checkpoints leave out; ``None``: they hold
            all parameters.

    Attributes:
        folder: where they are.
        keep_last: how many to keep; ``None``: all.
        data: data that save a position of their own.
        device: where this rank trains; ``None``: on the CPU.
        best: the checkpoint that is kept beside the last ones, the one to be saved next included;
            None: none is.
        collected: the position of the data to save; None: what the data say themselves.
        store: to which the first rank copies the files of the run when it commits; None: to none.
    """

    store: RunStore | None = None

    def __init__(
        self,
        folder: Place,
        keep_last: int | None = 2,
        data: Resumable | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        replicas: int = 1,
        device: torch.device | None = None,
        base: str | None = None,
    ) -> None:
        self._base = base
        self.folder = folder
        self.keep_last = keep_last
        self.data = data
        self._group = group
        self._replicas = replicas
        self.device = device
        self.best: Best | None = None
        self.collected: dict[str, Any] | None = None
        self._under_way: tuple[int, Handle] | None = None

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return steps(self.folder)

    def damage(self) -> tuple[Place, str] | None:
        """Return the newest checkpoint and what is wrong with it; None: it is complete."""
        return damage(self.folder)

    def path(self, step: int) -> Place:
        """Return the folder of the checkpoint of a step."""
        path: Place = step_folder(self.folder, step)
        return path

    def replicas(self, step: int) -> int:
        """Return how many replicas trained apart when the checkpoint of a step was saved.

        Raises:
            UserError: the file that says so is damaged.
        """
        return _replicas(self._extra(step))

    def position(self, step: int) -> Position:
        """Return how far the run was at a step.

        Raises:
            UserError: the file that says so is damaged.
        """
        with _resuming():
            return _position(self._extra(step), self.path(step))

    def _extra(self, step: int) -> dict[str, Any]:
        """Return the plain values of ``extra``, two keys deep."""
        with _resuming():
            manifest = read_manifest(self.path(step))
        found: dict[str, Any] = {}
        for value in manifest.values:
            if value.path[0] == "extra" and len(value.path) == 3:
                found.setdefault(str(value.path[1]), {})[value.path[2]] = value.value
        return found

    def save(self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer) -> Place:
        """Save all that training needs to go on. Every rank calls it.

        When it returns, the checkpoint is complete and on disk. If it raises, or the process is
        killed, all earlier checkpoints are as they were.

        Raises:
            SaveError: a rank could not write, this one or the one before; every rank raises it.
        """
        self.wait()
        if not self._is_saved(position.step):
            self.write(position, model, optimizer)
        return self.path(position.step)

    def write(self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save, and replace whatever is there.

        Raises:
            SaveError: a rank could not write; every rank raises it.
        """
        with self._saving(position.step):
            self._prepared(position, model, optimizer).write()

    def begin(self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start to save, and return once the state is copied. Every rank calls it.

        It waits for the save before. :meth:`wait` waits for this one, and raises if it failed.

        Raises:
            SaveError: a rank could not write the one before; every rank raises it.
        """
        from shardwise.checkpoint.ranks.saving import start_saving

        self.wait()
        if self._is_saved(position.step):
            return
        with self._saving(position.step):
            write = self.copied(position, model, optimizer)
        self._under_way = position.step, start_saving(write, self.path(position.step))

    def wait(self) -> int | None:
        """Wait for the checkpoint under way, if there is one. All ranks call it, or none.

        Returns:
            Its step, once it is complete and on disk; ``None`` if none was under way.

        Raises:
            SaveError: a rank could not write; every rank raises it.
        """
        if self._under_way is None:
            return None
        (step, handle), self._under_way = self._under_way, None
        with self._saving(step):
            handle.result()
        return step

    @property
    def has_ended(self) -> bool:
        """Whether a save is under way and this rank's part of it has ended, well or not."""
        return self._under_way is not None and self._under_way[1].done()

    def copied(
        self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[], None]:
        """Copy this rank's part of a checkpoint; return what writes it.

        Raises:
            CheckpointError: what is in the way of it cannot be deleted; on every rank.
        """
        return self._prepared(position, model, optimizer).copy().write

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Load a checkpoint into shards, in the same or another world. Every rank calls it.

        Random states are restored if the world has as many ranks as when it was saved.

        Raises:
            UserError: the checkpoint is damaged, or is of another model.
        """
        from shardwise.checkpoint import load

        path = self.path(step)
        with _resuming():
            frozen = self._base is not None
            extra = load(path, model, optimizer, ignore_frozen_params=frozen, group=self._group)
            if any(DILOCO in state for state in optimizer.state.values()):
                raise CheckpointError(
                    f"{path}: was saved by --strategy diloco; go on with that (with --replicas 1, "
                    "if need be)"
                )
            position = self.go_on(extra, path)
            self.restore_random(extra, path, read_manifest(path).world_size)
        return position

    def restore_random(self, extra: dict[str, Any], where: Place, world_size: int) -> None:
        """Restore random states, if the world has as many ranks as the one that they are of."""
        import torch.distributed as dist

        if (world_size, _replicas(extra)) == (dist.get_world_size(self._group), self._replicas):
            _set_random_state(self.device, extra, where)

    def go_on(self, extra: Mapping[str, Any], where: Place) -> Position:
        """Go on from what :meth:`extra` returned; ``where`` names it in messages.

        Raises:
            CheckpointError: it is no such thing.
        """
        if self.data is not None:
            self.data.load_state(extra.get(_DATA, {}), where)
        return _position(extra, where)

    def improves(self, step: int, loss: float) -> bool:
        """Whether an evaluation is the best one so far; if so, the checkpoint of its step is kept.

        Every rank calls it with the same numbers, and saves the step if it is.
        """
        if not (math.isfinite(loss) and (self.best is None or loss < self.best.loss)):
            return False
        self.best = Best(step, loss)
        return True

    def _is_saved(self, step: int) -> bool:
        """Whether a step has a complete checkpoint, as rank 0 sees it. Every rank calls it.

        Raises:
            SaveError: a rank was lost.
        """

        def look() -> bool:
            if self.store is not None:
                self.store.check_session()
            return is_complete(self.path(step))

        with self._saving(step):
            return self._ranks().first(f"looking for {self.path(step)}", look)

    def _prepared(
        self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Saving:
        """Make way for a checkpoint; return what saves it.

        Raises:
            CheckpointError: what is in the way cannot be deleted; on every rank of the group.
        """
        from shardwise.checkpoint.ranks.saving import Saving

        target = self.path(position.step)
        # What is there is incomplete, or of a replica whose first replica was not saved.
        self._ranks().first(f"saving {target}", lambda: _make_way(target))
        saving = Saving(
            *(target, model, optimizer, self.extra(position)),
            keep_last=self.keep_last,
            keep=[] if self.best is None else [self.path(self.best.step)],
            ignore_frozen_params=self._base is not None,
            group=self._group,
        )
        if self.store is not None:
            saving.before_commit = self.store.publish
        return saving

    def extra(self, position: Position) -> dict[str, Any]:
        """Return what belongs to a training beside its model and optimizer."""
        extra: dict[str, Any] = {
            _POSITION: asdict(position),
            _RANDOM: _random_state(self.device),
            _REPLICAS: {"count": self._replicas},
        }
        if self._base is not None:
            extra[_BASE] = {"name": self._base}
        if self.data is not None:
            extra[_DATA] = self.data.state() if self.collected is None else self.collected
        return extra

    def _ranks(self) -> Ranks:
        """Return the ranks that save together; not while a save is under way in the background."""
        from shardwise.checkpoint.ranks.agreement import Ranks, group_for

        return Ranks(group_for(self._group))

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Report a checkpoint that could not be saved, and what is saved."""
        try:
            yield
        except CheckpointError as error:
            since = "none was saved before"
            try:
                if kept := self.steps():
                    since = f"step {kept[-1]} is the last that is saved"
            except StoreError:
                since = "what was saved before is there"
            raise SaveError(f"checkpoint of step {step}: {error}; {since}") from error


@contextlib.contextmanager
def _resuming() -> Iterator[None]:
    """Report a checkpoint that cannot be read as a mistake in ``--resume``."""
    try:
        yield
    except CheckpointError as error:
        raise UserError(f"--resume: {error}") from error


def _make_way(target: Place) -> None:
    delete(target)
    if isinstance(target, Path):
        delete_partial(target)  # two runs never train into one folder


def _position(extra: Mapping[str, Any], path: Place) -> Position:
    found = extra.get(_POSITION)
    match found:
        case {"step": int(step), "examples": int(examples)}:
            return Position(step, examples)
    raise CheckpointError(f"{path}: found {found!r} as extra.{_POSITION}, expected step, examples")


def _replicas(extra: dict[str, Any]) -> int:
    match extra.get(_REPLICAS):
        case {"count": int(count)} if count > 0:
            return count
    return 1  # as before there were replicas that train apart


def _random_state(device: torch.device | None) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of this rank's random generators by type of device, under its own name."""
    import torch.distributed as dist

    from shardwise.base import devices

    found = {each.type: devices.random_state(each) for each in (devices.CPU, device or devices.CPU)}
    states = {kind: state for kind, state in found.items() if state is not None}
    return {f"rank{dist.get_rank()}": states}


def _set_random_state(device: torch.device | None, extra: dict[str, Any], path: Place) -> None:
    import torch.distributed as dist

    from shardwise.base import devices

    own = f"rank{dist.get_rank()}"
    try:
        states = extra[_RANDOM][own]
        devices.set_random_state(devices.CPU, states[devices.CPU.type])
        if device is not None and device.type in states:  # it may have been saved on another type
            devices.set_random_state(device, states[device.type])
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: extra.{_RANDOM}.{own} holds no random states ({error!r})"
        ) from None


def on_rank_zero(doing: str, act: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank.

    No two ranks see the same disk: one looks earlier, another through a cache. So where the disk
    decides what ranks do together (save, load, start over, delete), rank 0 looks and tells the
    others. Every rank calls this, while no checkpoint is being saved in the background.

    Args:
        doing: what is done, for messages: ``"looking for checkpoints in runs/lm"``.
        act: what rank 0 does; what it returns is small, and pickled.

    Raises:
        StoreError: ``act`` raised one; on every rank alike.
        UserError: ``act`` raised one, or an ``OSError``; on every rank alike.
        CheckpointError: ``act`` raised anything else, or a rank was lost.
    """
    from shardwise.checkpoint.ranks.agreement import Ranks, group_for

    def part() -> T | UserError | StoreError:
        try:
            return act()
        except (UserError, StoreError) as error:
            return error  # others raise it, too
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            refused = UserError(f"{doing}: {where}{error.strerror or error}")
            refused.__cause__ = error
            return refused

    found = Ranks(group_for(None)).first(doing, part)
    if isinstance(found, UserError | StoreError):
        raise found
    return found
