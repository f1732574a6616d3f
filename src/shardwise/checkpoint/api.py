"""Save and load a training, or a model alone, on any mesh.

save: names and shards -> plan (torch's planner) -> every rank writes its file -> commit
load: manifest -> memory -> plan (torch's planner) -> every rank reads its parts -> the model
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult

from shardwise.checkpoint import background
from shardwise.checkpoint.background import Handle
from shardwise.checkpoint.commit import check_files, keep_last
from shardwise.checkpoint.describe import strategy_of
from shardwise.checkpoint.entries import Manifest, TensorEntry
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.optimizer import (
    destinations,
    load_optimizer_tree,
    optimizer_tree,
    parameter_names,
)
from shardwise.checkpoint.pieces import CHUNK, PieceReader, read_tensor
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.state import State, check_tensor, leaves, local_of, unflatten
from shardwise.checkpoint.storage import Reader, Writer
from shardwise.errors import CheckpointError

StrPath = str | os.PathLike[str]


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
            Where ranks have different values under one key, the first rank's is kept; so give each
            rank keys of its own for what is its own.
        keep_last: once it is committed, delete all complete checkpoints named ``step-...`` beside
            it but the newest so many.
        group: the ranks that save together; all of the default process group, if there is one.

    Raises:
        CheckpointError: a rank could not do its part; the message names it. It could not write;
            or something is neither a tensor nor a plain value, is on the meta device, or has the
            name of another.
    """
    background.wait()
    _Saving(Path(path), strategy_of(model), Ranks(background.group_for(group)), keep_last).run(
        lambda: _state_of(model, optimizer, extra)
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
    background.wait()
    ranks = Ranks(background.group_for(group))
    saving = _Saving(Path(path), strategy_of(model), ranks, keep_last)
    try:
        state = _state_of(model, optimizer, extra)
        state.tensors = background.copies(state.tensors)
    except Exception as error:
        reason = error

        def refuse() -> State:
            raise reason

        # Other ranks are waiting for this one's part: they are told, and so is the caller here.
        background.start(lambda: saving.run(refuse), saving.path).forget()
        raise
    return background.start(lambda: saving.run(lambda: state), saving.path)


def load(
    path: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    buffer: int = CHUNK,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a model, sharded as it is now. Every rank calls it.

    The mesh, the strategy and the number of ranks may be others than those that saved. Each rank
    reads what it needs, straight into its shards, and verifies the checksums of what it reads. No
    code from the checkpoint is run, and no file outside of its folder is opened.

    If it raises, on all ranks alike, the model may hold some of what was read.

    Args:
        path: the checkpoint.
        model: with memory, not on the meta device.
        optimizer: over the model's parameters; new, or with a state, which is replaced.
        strict: whether the model must have exactly the names that were saved.
        buffer: bytes that reading may hold beside the shards.
        group: the ranks that load together; all of the default process group, if there is one.

    Returns:
        ``extra``, as it was saved; tensors on the CPU.

    Raises:
        CheckpointError: it is damaged, or of another model or optimizer; the message names the
            rank, the file and the tensor. Or a parameter is on the meta device.
    """
    background.wait()
    ranks = Ranks(background.group_for(group))
    return ranks.all(
        f"loading {path}",
        lambda: _load(Path(path), model, optimizer, strict=strict, buffer=buffer),
    )


@dataclass
class _Saving:
    """One checkpoint to be saved by all ranks of a group."""

    path: Path
    strategy: str
    ranks: Ranks
    keep_last: int | None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last: found {self.keep_last}, expected 1 or more")

    def run(self, state: Callable[[], State]) -> None:
        """Plan, write and commit, in the order in which torch's ``dcp.save`` does."""
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


def _load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool,
    buffer: int,
) -> dict[str, Any]:
    manifest = read_manifest(path)
    check_files(path, manifest)
    saved = get_model_state_dict(model)
    names = parameter_names(model, saved)
    into = _model_tensors(saved)
    _check_names(manifest, into, saved, strict=strict, where=str(path))
    if optimizer is not None:
        into |= destinations(manifest, optimizer, names)
    known = {entry.fqn for entry in manifest.tensors}
    into = {name: tensor for name, tensor in into.items() if name in known}
    _read(path, manifest, into, buffer)
    entries = {entry.fqn: entry for entry in manifest.tensors}
    tree = unflatten(
        [
            *((value.path, value.value) for value in manifest.values),
            *((entries[name].path, tensor) for name, tensor in into.items()),
        ],
        str(path),
    )
    if not _is_filled_in_place(model, saved):
        options = StateDictOptions(strict=strict)
        set_model_state_dict(model, {**saved, **tree.get("model", {})}, options=options)
    if optimizer is not None:
        load_optimizer_tree(optimizer, names, tree.get("optimizer", {}))
    return _read_extra(path, manifest, buffer)


def _state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
) -> State:
    state = State()
    saved = get_model_state_dict(model)
    state.add("model", saved)
    if optimizer is not None:
        state.add("optimizer", optimizer_tree(optimizer, parameter_names(model, saved)))
    state.add("extra", extra or {})
    return state


def _is_filled_in_place(model: nn.Module, saved: Mapping[str, Any]) -> bool:
    """Whether a state dict is nothing but the memory of the model's own tensors.

    Then what was read is where it belongs. Hooks may have put something else into it.
    """
    own = {
        (local.data_ptr(), local.shape)
        for tensor in (*model.parameters(), *model.buffers())
        for local in [local_of(tensor)]
    }
    return all(
        isinstance(value, Tensor) and (local_of(value).data_ptr(), local_of(value).shape) in own
        for value in saved.values()
    )


def _model_tensors(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, by the names that they have in a manifest."""
    found = ((".".join(map(str, path)), leaf) for path, leaf in leaves(("model",), saved))
    return {name: check_tensor(leaf, name) for name, leaf in found if isinstance(leaf, Tensor)}


def _check_names(
    manifest: Manifest,
    into: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    *,
    strict: bool,
    where: str,
) -> None:
    """The checkpoint is of this model.

    Raises:
        CheckpointError: names or shapes differ.
    """
    entries: dict[str, TensorEntry] = {entry.fqn: entry for entry in manifest.section("model")}
    missing = [name for name in into if name not in entries]
    unexpected = [name for name in entries if name not in into]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{where}: is of another model: {_some(missing, 'not in the checkpoint')}"
            f"{'; ' if missing and unexpected else ''}{_some(unexpected, 'not in the model')}"
        )
    for name, tensor in into.items():
        if name in entries and entries[name].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{where}: {name}: found shape {list(entries[name].shape)}, expected "
                f"{list(tensor.shape)}"
            )


def _some(names: list[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "are" if len(names) > 1 else "is"
    return f"{', '.join(names[:3])}{more} {verb} {what}"


def _read(path: Path, manifest: Manifest, into: dict[str, Tensor], buffer: int) -> None:
    """Fill tensors, each rank by itself: what it needs follows from the manifest alone."""
    reader = Reader(path, manifest, buffer=buffer)
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(into, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner)


def _read_extra(path: Path, manifest: Manifest, buffer: int) -> dict[str, Any]:
    found: list[tuple[Any, Any]] = [(value.path, value.value) for value in manifest.values]
    with PieceReader(path, manifest, buffer=buffer) as reader:
        found += [(entry.path, read_tensor(reader, entry)) for entry in manifest.section("extra")]
    extra = unflatten(found, str(path)).get("extra", {})
    assert isinstance(extra, dict)
    return extra
