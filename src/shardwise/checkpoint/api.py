"""Save and load a training, or a model alone, on any mesh.

save: names and shards -> plan (torch's planner) -> every rank writes its file -> commit
load: manifest -> memory -> plan (torch's planner) -> every rank reads its parts -> the model
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.disk.commit import StrPath
from shardwise.checkpoint.disk.pieces import CHUNK
from shardwise.checkpoint.ranks import background
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.background import Handle
from shardwise.checkpoint.ranks.copied import Copied
from shardwise.checkpoint.ranks.describe import facts_of
from shardwise.checkpoint.ranks.loading import load_into
from shardwise.checkpoint.ranks.saving import Saving, state_of


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
    background.wait()
    Saving(Path(path), facts_of(model), Ranks(background.group_for(group)), keep_last).run(
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
    copied = Copied(path, model, optimizer, extra, keep_last=keep_last, group=group)
    handle = background.start(copied.write, copied.path)
    if copied.error is not None:
        # Other ranks are waiting for this one's part: they are told, and so is the caller here.
        handle.forget()
        raise copied.error
    return handle


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
        lambda: load_into(Path(path), model, optimizer, strict=strict, buffer=buffer),
    )
