"""``publish``: the weights of a model, sharded or not, for other processes to read."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import nn

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import torch_dtype
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.disk.safetensors import PT_METADATA, lay_out
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.hf import (
    Contents,
    Rows,
    SavedModel,
    own_rows,
    saved_model,
    write_rows,
)
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.frontends.pretrained.api import AdapterForm, saved_pretrained
from shardwise.weights.folder import FolderVersions
from shardwise.weights.memory import SharedVersions, this_host
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
        to: a folder that all ranks and readers see. Versions are written to ``to/name`` as
            safetensors: in full, or as what has changed. ``None`` for memory of this host.
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
    if buffers < 2:
        raise ValueError(f"buffers: found {buffers}, expected 2 or more")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: found {dtype}, expected a floating-point one")
    if adapters not in (forms := [form.value for form in AdapterForm]):
        raise ValueError(f"adapters: found {adapters!r}, expected {' or '.join(map(repr, forms))}")
    file = quoted(name)
    saved = saved_pretrained(model, AdapterForm(adapters)) or saved_model(model)
    ranks = Ranks(group_for(group))
    if to is None:
        versions: _Versions = _RanksInMemory(name, saved, dtype, buffers, ranks)
    else:
        versions = FolderVersions(Path(to) / file, saved, dtype, ranks, group)
    publication = Publication(versions)
    try:
        publication.update()
    except BaseException:
        publication.close()
        raise
    return publication


class _Versions(Protocol):
    """Where versions are published."""

    version: int

    def update(self) -> None:
        """Write the next version."""

    def close(self) -> None:
        """Publish no more."""


class Publication:
    """What publishes the weights of a model, one version after the other.

    :func:`publish` makes it.

    Args:
        versions: where they are published.
    """

    def __init__(self, versions: _Versions) -> None:
        self._versions = versions
        self._is_closed = False

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self._versions.version

    def update(self) -> int:
        """Publish the weights as they are now. Every rank calls this, between steps.

        Readers see the new version once it is complete, or the one before.

        Returns:
            The number of the version.

        Raises:
            CheckpointError: it could not be written, or readers hold all memory there is; the
                message names them. Or a checkpoint that was being saved failed. Raised on all ranks
                alike; the version before is still there, and a later update may succeed.
            ValueError: it is closed.
        """
        if self._is_closed:
            raise ValueError("publication: found it closed, expected an open one; publish again")
        wait_for_save()  # which uses the same process group
        with torch.no_grad():
            self._versions.update()
        return self.version

    def close(self) -> None:
        """Publish no more. Versions in memory vanish once nobody reads them, folders stay."""
        if not self._is_closed:
            self._is_closed = True
            self._versions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _RanksInMemory:
    """The versions that the ranks of one host write to memory.

    Args:
        name: what readers call it.
        saved: how the model is saved.
        dtype: what floating-point tensors are converted to; ``None`` for their own.
        buffers: how many versions there is memory for.
        ranks: who publishes.
    """

    def __init__(
        self, name: str, saved: SavedModel, dtype: torch.dtype | None, buffers: int, ranks: Ranks
    ) -> None:
        self._doing = f"publishing {name!r}"
        self._saved = saved
        self._dtype = dtype
        self._ranks = ranks
        self._maps: dict[Path, torch.Tensor] = {}
        self._shared: SharedVersions | None = None

        def begin() -> tuple[str, int]:
            self._shared = SharedVersions(name, buffers)
            return this_host(), self._shared.version

        self._host, self.version = ranks.first(self._doing, begin)

    def update(self) -> None:
        """Write the next version, and show it to readers once all ranks have written."""
        ranks, doing = self._ranks, self._doing
        contents = ranks.all(doing, self._contents)
        infos = contents.infos()
        header, starts = lay_out(infos, PT_METADATA)
        nbytes = len(header) + sum(info.nbytes for info in infos.values())
        with contextlib.ExitStack() as stack:

            def prepare() -> Path:
                assert self._shared is not None
                return stack.enter_context(self._shared.next(header, nbytes))

            memory = self._mapped(ranks.first(doing, prepare), nbytes)

            def write(rows: list[Rows]) -> None:
                for each in rows:
                    info = infos[each.name]
                    place = memory[starts[each.name] :][: info.nbytes]
                    full = place.view(torch_dtype(info.dtype)).view(info.shape)
                    narrow(full, each.box).copy_(each.values)

            write_rows(contents, ranks, doing, write)

            def show() -> int:
                stack.close()
                assert self._shared is not None
                return self._shared.version

            self.version = ranks.first(doing, show)

    def _mapped(self, file: Path, nbytes: int) -> torch.Tensor:
        """The bytes of a version, to be written by all ranks. They stay mapped for the next one."""
        found = self._maps.get(file)
        if found is None or found.nbytes != nbytes:
            with file.open("r+b") as opened:
                memory = mmap.mmap(opened.fileno(), nbytes)
            found = self._maps[file] = torch.frombuffer(memory, dtype=torch.uint8)
        return found

    def _contents(self) -> Contents:
        contents = replace(self._saved.contents(), dtype=self._dtype)
        writes = bool(contents.conversions) or any(own_rows(contents, self._ranks))
        if writes and this_host() != self._host:
            raise CheckpointError(
                "is on another host, or in another container, than the first rank; expected ranks "
                "that see each other in /proc. Publish to a folder that all see (to=)"
            )
        return contents

    def close(self) -> None:
        """Publish no more."""
        self._maps.clear()
        if self._shared is not None:
            self._shared.close()
