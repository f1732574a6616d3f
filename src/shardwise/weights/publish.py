"""``publish``: the weights of a model, sharded or not, for other processes to read."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from shardwise.base.arguments import check_arguments
from shardwise.base.files import Closing
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.hf import SavedModel, saved_model
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.pretrained.api import AdapterForm, saved_pretrained
from shardwise.weights.folder import FolderVersions
from shardwise.weights.memory import MemoryVersions
from shardwise.weights.version import quoted


def publish(
    model: nn.Module,
    name: str,
    *,
    to: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    adapters: str = "alone",
    buffers: int = 3,
    group: dist.ProcessGroup | None = None,
) -> Publication:
    """Publish the weights of a model, and keep publishing as it changes. Every rank calls this.

    Each rank writes its rows to memory that processes of the same user on this host can map, or to
    a folder. Nothing is gathered, except for what has another form in files, as in
    :func:`shardwise.save_pretrained`: one group at a time. The first version is there when this
    returns.

        weights = shardwise.publish(model, "policy")
        for batch in batches:
            ...
            optimizer.step()
            weights.update()

    Args:
        model: the model: sharded by Shardwise or by torch, or not sharded. One of ``transformers``
            is published under the names that :func:`shardwise.save_pretrained` gives its weights.
        name: what readers call it; any text.
        to: a folder that all ranks and readers see, or its URL in an object store. Versions are
            written to ``to/name`` as safetensors. ``None`` for memory of this host.
        dtype: what floating-point tensors are converted to; ``None`` for the dtype of the shards.
        adapters: what is published of a ``PeftModel``: ``"alone"``, the adapters as peft saves
            them; ``"merged"``, the weights of the base with the adapters merged into them, for
            which one layer at a time is gathered.
        buffers: how many versions there is memory for, at least 2. The newest one stays, and so
            does one that somebody reads.
        group: the ranks that publish; the default process group if ``None``.

    Returns:
        What publishes further versions.

    Raises:
        CheckpointError: another process publishes this name, ranks do not share a host (publish to
            a folder then), or writing failed; raised on all ranks alike.
        ValueError: ``name``, ``dtype``, ``adapters`` or ``buffers`` is out of range.
    """
    given = locals()
    wait_for_save()
    ranks = Ranks(group_for(group))

    def prepare() -> SavedModel:
        check_arguments(publish, given)
        if buffers < 2:
            raise ValueError(f"buffers: found {buffers}, expected 2 or more")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype: found {dtype}, expected a floating-point one")
        if adapters not in (forms := [form.value for form in AdapterForm]):
            expected = " or ".join(map(repr, forms))
            raise ValueError(f"adapters: found {adapters!r}, expected {expected}")
        quoted(name)
        if to is not None:
            place_of(to)
        own = saved_pretrained(model, AdapterForm(adapters)) or saved_model(model)
        return replace(own, contents=lambda: replace(own.contents(), dtype=dtype))

    saved = ranks.begin("publish", prepare)
    publication = Publication(
        MemoryVersions(name, saved, buffers, ranks)
        if to is None
        else FolderVersions(place_of(to) / quoted(name), saved, ranks, group)
    )
    try:
        publication.update()
    except BaseException:
        publication.close()
        raise
    return publication


class Publication(Closing):
    """What publishes the weights of a model, one version after the other.

    :func:`publish` makes it.

    Args:
        versions: where they are published.
    """

    def __init__(self, versions: MemoryVersions | FolderVersions) -> None:
        self._versions = versions
        self._process = os.getpid()
        self._is_closed = False
        self._turn = threading.RLock()  # other threads wait
        self._has_turn = False  # a thread, which would not wait for itself

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self._versions.version

    def update(self) -> int:
        """Publish the weights as they are now. Every rank calls this, between steps.

        Readers see the new version once it is complete, or the one before. Threads of a process
        update one after the other.

        Returns:
            The number of the version.

        Raises:
            CheckpointError: it could not be written, or readers hold all memory there is; the
                message names them. Or a checkpoint that was being saved failed. Raised on all ranks
                alike; the version before is still there, and a later update may succeed.
            ValueError: it is closed, or of a process that this one was forked from.
            RuntimeError: this thread is updating it, as where a signal handler updates.
        """
        if self._process != os.getpid():
            raise ValueError(
                f"publication: found it in process {os.getpid()}, expected process {self._process},"
                " which was forked; update there, or publish under another name"
            )
        with self._own_turn():
            if self._is_closed:
                raise ValueError(
                    "publication: found it closed, expected an open one; publish again"
                )
            wait_for_save()  # which uses the same process group
            # Copies are kept for the next update, whatever mode and default device that has.
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                self._versions.update()
            return self.version

    def close(self) -> None:
        """Publish no more. Versions in memory vanish once nobody reads them, folders stay."""
        if self._process != os.getpid():  # where no thread is updating
            self._turn, self._has_turn = threading.RLock(), False
        with self._own_turn():
            self._versions.close()  # which may be interrupted, and called again
            self._is_closed = True

    @contextlib.contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Let threads update one after the other, and none inside its own update."""
        with self._turn:
            if self._has_turn:
                raise RuntimeError(
                    "publication: found this thread updating it already, expected one update after "
                    "the other; let a signal handler set a flag, and update between steps"
                )
            try:
                try:
                    self._has_turn = True
                    yield
                finally:
                    self._has_turn = False
            finally:
                self._has_turn = False  # Ctrl-C may have ended the first attempt
