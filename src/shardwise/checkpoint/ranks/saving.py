"""Saving a training state: now, or in the background while training goes on.

names and shards -> plan (torch's planner) -> every rank writes its file -> commit
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base import devices
from shardwise.base.arguments import check_timeout
from shardwise.base.errors import CheckpointError, StoreError
from shardwise.checkpoint.disk.commit import keep_last
from shardwise.checkpoint.disk.entries import Origin, dotted
from shardwise.checkpoint.disk.place import Place, StrPath, absolute, place_of
from shardwise.checkpoint.ranks.agreement import Ranks, checked, group_for
from shardwise.checkpoint.ranks.alike import check_alike, digests_of
from shardwise.checkpoint.ranks.state import SavedState, facts_of, state_of
from shardwise.checkpoint.ranks.subclasses import whole_path
from shardwise.checkpoint.storage import Writer
from shardwise.transport.carrier import carrier


def save(
    path: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    keep: Collection[StrPath] = (),
    ignore_frozen_params: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a checkpoint. Every rank calls this, with the same path.

    When it returns, the checkpoint is complete and on the disk. If it raises, which it does on all
    ranks alike, or if processes are killed, then there is nothing of its name, and all other
    checkpoints are unchanged.

    Each rank writes its own shards from where they are in memory; what several ranks have in common
    is written once. A model that is not sharded, in a single process without a process group, works
    too.

    Args:
        path: the folder to make, which must not exist, or its URL in an object store, such as
            ``s3://bucket/run/step-00000040``. Leftovers of killed processes beside it are deleted.
        model: the model, sharded or not.
        optimizer: an optimizer of the model's parameters.
        extra: anything else to save: step, random states, position in the data. It consists of
            tensors other than ``DTensor``, and of plain values: None, bool, int, float, str, bytes,
            list, tuple, dict. What several ranks pass under one key has to be the same. Wrap what
            differs by rank in :func:`per_rank`.
        keep_last: after the commit, delete all complete checkpoints named ``step-...`` beside it
            except this many of the newest.
        keep: checkpoints beside it that ``keep_last`` does not delete, whatever their age: the best
            one, say.
        ignore_frozen_params: leave out parameters that require no gradient, as torch's option of
            this name does. :func:`load` needs it too.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: a rank could not do its part; the message names it. It could not write; or
            something is neither a tensor nor a plain value, is on the meta device, or has the same
            name as something else; or ``extra`` differs between ranks.
        ValueError: ``keep_last`` is less than 1.

    Warns:
        UserWarning: ranks differ in what they should have in common of the model or the optimizer,
            such as buffers. The first rank's is saved, all of it.
    """
    wait_for_save()
    checked(save, group, locals(), lambda: _check_keep_last(keep_last))
    Saving(
        path,
        model,
        optimizer,
        extra,
        keep_last=keep_last,
        keep=keep,
        ignore_frozen_params=ignore_frozen_params,
        group=group,
    ).write()


def async_save(
    path: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    keep: Collection[StrPath] = (),
    ignore_frozen_params: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Handle:
    """Save a checkpoint while training goes on. Every rank calls this, with the same path.

    It returns once all shards have been copied to the host's memory. A thread then does what
    :func:`save` does, in a process group of its own.

    A process saves one checkpoint at a time: the next save or load first waits for this one. If
    this one failed and its handle has not reported that, the next call raises the error. So ask the
    handle on all ranks, or on none.

    Args:
        path: as for :func:`save`; so are the others.
        model: may change as soon as this returns.
        optimizer: may change as soon as this returns.
        extra: may change as soon as this returns.
        keep_last: as for :func:`save`.
        keep: as for :func:`save`.
        ignore_frozen_params: as for :func:`save`.
        group: as for :func:`save`.

    Returns:
        A handle to wait for. Wait before you destroy the process group.

    Raises:
        CheckpointError: the previous save failed.
        RuntimeError: this rank is simulated.
        TypeError: something on this rank is neither a tensor nor a plain value.
        ValueError: something on this rank is on the meta device, or has the same name as something
            else; or ``keep_last`` is less than 1.
    """
    wait_for_save()
    checked(async_save, group, locals(), lambda: _check_keep_last(keep_last))
    carrier().check_threads()
    saving = Saving(
        path,
        model,
        optimizer,
        extra,
        keep_last=keep_last,
        keep=keep,
        ignore_frozen_params=ignore_frozen_params,
        group=group,
    )
    saving.copy()
    handle = start_saving(saving.write, saving.path)
    if saving.error is not None:
        # The other ranks wait for this one's part: the thread reports the error to them.
        handle.mark_reported()
        raise saving.error
    return handle


class Handle:
    """A checkpoint that is being saved in the background.

    Args:
        work: saves it; called in a thread.
        path: path of the checkpoint.

    Attributes:
        path: path of the checkpoint.
    """

    def __init__(self, work: Callable[[], None], path: Place) -> None:
        self.path = path
        self._work = work
        self._error: BaseException | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def done(self) -> bool:
        """Whether it has been saved, or has failed.

        Returns:
            ``True`` if :meth:`result` does not have to wait.
        """
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Place:
        """Wait until the checkpoint is complete and on the disk.

        Args:
            timeout: longest time to wait, in seconds; forever if ``None``.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: it could not be saved.
            TimeoutError: it is not done yet.
        """
        if timeout is not None:
            check_timeout("timeout", timeout)
            timeout = min(timeout, threading.TIMEOUT_MAX)
        self.join_thread(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"saving {self.path}: not done after {timeout} s")
        if self._error is not None:
            self._reported = True
            raise CheckpointError(str(self._error)) from self._error
        return self.path

    def join(self) -> None:
        """Wait, and raise the error if it has not been reported yet.

        Raises:
            CheckpointError: it could not be saved.
        """
        self.join_thread()
        if not self._reported:
            self.result()

    def join_thread(self, timeout: float | None = None) -> None:
        """Wait for the thread, if it was started: Ctrl-C may have come before.

        Args:
            timeout: longest time to wait, in seconds; forever if ``None``.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def mark_reported(self) -> None:
        """Do not raise the error again, because the caller reports it."""
        self._reported = True

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # and the copies with it


@dataclass(frozen=True)
class _Apart:
    """The answer to plans that do not fit together: plan again, with these tensors taken apart."""

    names: frozenset[str]


def mixed(names: Iterable[str], origins: Iterable[Origin]) -> frozenset[str]:
    """The states whose shards are taken apart on some ranks and whole on others.

    Args:
        names: of all tensors of all ranks.
        origins: where they are in the state.
    """
    paths = (whole_path(origin.path) for origin in origins)
    return frozenset(names) & {dotted(path) for path in paths if path is not None}


def _check_keep_last(keep_last: int | None) -> None:
    """Raise ``ValueError`` if fewer than one checkpoint is to be kept."""
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last: found {keep_last}, expected 1 or more")


class Saving:
    """One save by all ranks of a group. Every rank makes one, with the same path.

    It first waits for a save in progress, because there is memory for one copy only.

    Args:
        path: path of the checkpoint.
        model: as for :func:`save`; so are the others.
        optimizer: an optimizer of its parameters.
        extra: anything else to save.
        keep_last: number of checkpoints to keep, this one included.
        keep: checkpoints that are kept besides.
        ignore_frozen_params: leave out parameters that require no gradient.
        group: the ranks that save.

    Attributes:
        path: absolute path of the checkpoint.
        error: why this rank could not copy its part, which :meth:`write` reports; or ``None``.
        before_commit: called on the first rank when all have written, just before the commit.

    Raises:
        CheckpointError: the previous save failed.
    """

    def __init__(
        self,
        path: StrPath,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any] | None,
        *,
        keep_last: int | None = None,
        keep: Collection[StrPath] = (),
        ignore_frozen_params: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        wait_for_save()
        # A thread may use them later, when the working directory has changed.
        self.path = absolute(path)
        self._keep = [absolute(each) for each in keep]
        self._keep_last = keep_last
        self._facts = facts_of(model)
        self._ranks = Ranks(group_for(group))
        self._state: Callable[[], SavedState] = functools.partial(
            state_of,
            *(model, optimizer, extra),
            ignore_frozen_params=ignore_frozen_params,
            rank=self._ranks.rank,
        )
        self.error: Exception | None = None
        self.before_commit: Callable[[], None] = lambda: None

    def copy(self) -> Self:
        """Copy what this rank has to save: model, optimizer and extra may change then."""
        copied = SavedState()
        try:
            copied = self._state()
            copied.tensors = copies(copied.tensors)
        except Exception as error:
            self.error = error
        self._state = lambda: copied
        return self

    def write(self) -> None:
        """Plan, write and commit, in the order of torch's ``dcp.save``.

        All ranks call this; once there are copies, at any time and in any thread.

        Raises:
            CheckpointError: a rank could not do its part; raised on every rank alike.
        """
        from shardwise.checkpoint.ranks import outline  # of no use before

        doing = f"saving {self.path}"
        writer = Writer(self.path, facts=self._facts)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        items: list[WriteItem] = []
        outlines: outline.Outlines | None = None
        files: list[str] = []
        state = functools.cache(self._state)

        def described(apart: Collection[str] = ()) -> outline.Outline:
            if self.error is not None:
                raise self.error
            mine = state()
            mine.take_apart(apart)
            planner.set_up_planner(mine.tensors, is_coordinator=self._ranks.coordinates)
            writer.set_up_storage_writer(self._ranks.coordinates)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            items[:] = outline.in_order(plan.items)
            return outline.outline_of(items, mine.origins, mine.values)

        def find_shared(found: list[outline.Outline]) -> list[_Apart | bytes]:
            nonlocal outlines
            outlines = outline.Outlines(found, self._ranks.names)
            if apart := mixed(outlines.infos, outlines.origins.values()):
                return [_Apart(apart)] * len(found)
            return [*outlines.shared()]

        def digests(shared: bytes) -> bytes:
            names = {item.index.fqn: b"" for item in outline.chosen(items, shared)}
            found = digests_of(state().tensors, names.keys())
            return bytes.fromhex("".join(found[name] for name in names))

        def plan_all(found: list[bytes]) -> list[tuple[bytes, str, str]]:
            assert outlines is not None
            differs = check_alike(outlines.states(found), self._ranks.names)
            # Of what is the same on all ranks, each writes some.
            bits = outlines.writers(lowest=bool(differs))
            files[:] = writer.begin(outlines.origins, outlines.values, self._ranks.size)
            return [(mine, file, differs) for mine, file in zip(bits, files, strict=True)]

        def write(bits: bytes, file: str) -> tuple[bytes, bytes]:
            plan = SavePlan(outline.chosen(items, bits), storage_data=file)
            written = writer.write_data(plan, planner).value()
            return outline.summary(result.storage_data for result in written)

        def finish(written: list[tuple[bytes, bytes]]) -> list[None]:
            assert outlines is not None
            names = [place_of(file).name for file in files]
            self.before_commit()
            writer.commit(outlines.infos, outlines.pieces(written, names))
            self._delete_old()
            return [None] * len(written)

        try:
            shared = self._ranks.together(doing, described, find_shared)
            if isinstance(shared, _Apart):
                names = shared.names
                shared = self._ranks.together(doing, lambda: described(names), find_shared)
            assert isinstance(shared, bytes)
            common = shared
            bits, file, differs = self._ranks.together(doing, lambda: digests(common), plan_all)
            self._ranks.together(doing, lambda: write(bits, file), finish)
        except BaseException:
            writer.abandon()
            raise
        if differs:
            warnings.warn(differs, stacklevel=3)

    def _delete_old(self) -> None:
        if self._keep_last is None:
            return
        try:
            keep_last(self.path.parent, self._keep_last, spare=self.path, keep=self._keep)
        except OSError as error:
            raise CheckpointError(
                "the checkpoint is saved, but an older one cannot be deleted: "
                f"{error.filename}: {error.strerror}"
            ) from error
        except StoreError as error:
            raise StoreError(
                f"the checkpoint is saved, but an older one cannot be deleted: {error}"
            ) from error


# One per process, because a second one would need host memory for copies of its own.
_current: Handle | None = None


def start_saving(work: Callable[[], None], path: Place) -> Handle:
    """Start to save in the background. Call :func:`wait_for_save` first."""
    global _current
    handle = _current = Handle(work, path)
    handle.start()  # once a next save waits for it, whatever happens here
    return handle


def wait_for_save() -> None:
    """Wait for the save in progress, if there is one.

    Raises:
        CheckpointError: it failed, and that has not been reported yet.
    """
    global _current
    before = _current
    if before is not None:
        before.join_thread()  # Ctrl-C may end that, and the next save waits, too
        _current = None
        before.join()


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the local shards of tensors to the host's memory, completely when this returns.

    Shards that several names share are copied once.

    Args:
        tensors: tensors by name, on any device.

    Returns:
        Tensors and ``DTensor`` s by name, with the copies as local shards.
    """
    made: dict[tuple[object, ...], Tensor] = {}
    copied: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            local = dtensor.plain(tensor).detach()
            key = (
                *(local.data_ptr(), local.shape, local.stride(), local.dtype),
                *(local.is_conj(), local.is_neg()),
            )
            if key not in made or not local.numel():
                made[key] = _copy(local)
            spec = dtensor.spec_of(tensor) if isinstance(tensor, DTensor) else None
            copied[name] = made[key] if spec is None else dtensor.wrap_local(made[key], spec)
    for device in {tensor.device for tensor in tensors.values()}:
        if devices.pins(device):  # else no copy was left under way
            devices.synchronize(device)
    return copied


def _copy(local: Tensor) -> Tensor:
    """A copy on the host. From a device with pinned memory it is only started."""
    if local.device.type == "cpu":
        return local.clone(memory_format=torch.contiguous_format)
    how = devices.Copy.STARTED if devices.pins(local.device) else devices.Copy.PAGEABLE
    return devices.copy_to_host(local, how)
