"""Loading onto any mesh: a training state, or the weights of a model alone, from any format.

manifest -> memory -> every rank reads its parts -> the model
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch import dtensor
from shardwise.base.boxes import Box, narrow
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.columns import Pieces
from shardwise.checkpoint.disk.commit import check_files
from shardwise.checkpoint.disk.entries import (
    Manifest,
    StatePath,
    TensorEntry,
    dotted,
    torch_dtype,
)
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.disk.pieces import CHUNK, PieceReader, read_box
from shardwise.checkpoint.disk.place import Place, StrPath, place_of
from shardwise.checkpoint.disk.safetensors import is_lazy
from shardwise.checkpoint.disk.values import unflatten
from shardwise.checkpoint.formats.detect import Format, format_of, open_source
from shardwise.checkpoint.formats.source import (
    DEFAULT_BUFFER,
    ReadWindow,
    Source,
    extra_states,
    model_tensors,
)
from shardwise.checkpoint.ranks.agreement import checked
from shardwise.checkpoint.ranks.arrival import Arrival
from shardwise.checkpoint.ranks.optimizer import parameter_names
from shardwise.checkpoint.ranks.optimizer_loading import (
    check_groups,
    destinations,
    load_optimizer_tree,
)
from shardwise.checkpoint.ranks.per_rank import restored
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import (
    check_tensor,
    frozen,
    model_state,
    own_tensors,
)
from shardwise.sharding.param import forms_of


def load(
    path: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    ignore_frozen_params: bool = False,
    buffer: int = CHUNK,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a model, sharded as it is now. Every rank calls this.

    The mesh, the strategy and the number of ranks may differ from those that saved it. Each rank
    reads what it needs straight into its shards, and verifies the checksums of what it reads. No
    code from the checkpoint is run, and no file outside its folder is opened.

    If it raises, which it does on all ranks alike, the model and the optimizer may hold some of
    what was read. Nothing has changed if the optimizer has other parameter groups.

    Args:
        path: the checkpoint: its folder, or its URL in an object store.
        model: the model, with memory, not on the meta device.
        optimizer: an optimizer of the model's parameters; new, or with a state, which is replaced.
        strict: whether the model must have exactly the names that were saved.
        ignore_frozen_params: leave parameters that require no gradient as they are. The checkpoint
            was saved without them.
        buffer: bytes that reading may hold beside the shards.
        group: the ranks that load together; the default process group if ``None``.

    Returns:
        ``extra`` as it was saved, with its tensors on the CPU. Where ranks saved values of their
        own (:func:`per_rank`), it has a :class:`PerRank`.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or optimizer; the message
            names the rank, the file and the tensor. Or a parameter is on the meta device.
    """
    given = locals()
    wait_for_save()
    ranks = checked(load, group, given, lambda: place_of(path))
    return ranks.all(
        f"loading {path}",
        lambda: _load(
            place_of(path),
            model,
            optimizer,
            strict=strict,
            ignore_frozen_params=ignore_frozen_params,
            buffer=buffer,
        ),
    )


def _load(
    path: Place,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool,
    ignore_frozen_params: bool,
    buffer: int,
) -> dict[str, Any]:
    """Load a checkpoint on this rank. No rank waits for another."""
    kind = format_of(path) if isinstance(path, Path) else None
    if kind not in (None, Format.SHARDWISE):
        raise CheckpointError(
            f"{path}: found a checkpoint of another format ({kind.value}), expected one of "
            "shardwise.checkpoint.save; shardwise.checkpoint.load_weights reads the weights of "
            "this one, and `shardwise checkpoint convert --to shardwise` makes one of ours of it"
        )
    manifest = read_manifest(path)
    check_files(path, manifest)
    left_out = frozen(model) if ignore_frozen_params else ()
    arrival = Arrival(model, str(path), strict=strict, left_out=left_out)
    own = own_tensors(model)
    for form in forms_of(model.parameters()):
        form.check_not_lost()
    for name in own.keys() - {*left_out}:
        check_tensor(own[name], dotted(("model", name)))
    with PieceReader(path, manifest, buffer=buffer) as reader:
        arrival.expect(_model_values(manifest, reader, arrival, str(path)))
        into: dict[str, Tensor] = {}
        if optimizer is not None:
            names, saved = parameter_names(model, own), manifest.section("optimizer")
            check_groups(optimizer, names, manifest.values)
            find = destinations(optimizer, names, saved)
            found = ((entry.fqn, find(entry)) for entry in saved)
            into = {fqn: tensor for fqn, tensor in found if tensor is not None}
        for entry in manifest.section("extra"):
            into[entry.fqn] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        entries = [entry for entry in manifest.tensors if entry.fqn in into]
        in_files = sorted(entries, key=_place)
        reader.expect(_own_parts(manifest, own, left_out))
        reader.expect((entry, own_part(into[entry.fqn])[0]) for entry in in_files)
        arrival.load()
        for entry in in_files:
            _read(reader, entry, into[entry.fqn])
    tree = unflatten(
        [
            *((value.path, value.value) for value in manifest.values if value.path[0] != "model"),
            *((entry.path, into[entry.fqn]) for entry in entries),
        ],
        str(path),
    )
    return install(tree, model, optimizer, manifest.section("model"))


def _own_parts(
    manifest: Manifest, own: Mapping[str, Any], left_out: Collection[str]
) -> Iterator[tuple[TensorEntry, Box]]:
    """What this rank is going to read of a model, as far as names and shapes are as saved."""
    for entry in manifest.section("model"):
        name = dotted(entry.path[1:])
        mine = None if name in left_out else own.get(name)
        if isinstance(mine, Tensor) and tuple(mine.shape) == entry.shape:
            yield entry, own_part(mine)[0]


def _model_values(
    manifest: Manifest, reader: PieceReader, arrival: Arrival, where: str
) -> dict[str, Any]:
    """What a checkpoint has of a model, by name, with tensors that are read where they arrive."""
    entries = manifest.section("model")
    values = [(value.path, value.value) for value in manifest.values if value.path[0] == "model"]
    tensors = [
        (
            entry.path,
            arrival.unread(
                entry.shape, torch_dtype(entry.dtype), functools.partial(_read, reader, entry)
            ),
        )
        for entry in entries
    ]
    found: dict[str, Any] = unflatten([*tensors, *values], where).get("model", {})
    return found


def _read(reader: PieceReader, entry: TensorEntry, into: Tensor) -> None:
    """Read this rank's part of a tensor."""
    box, local = own_part(into)
    if box.numel:
        read_box(reader, entry, box, local)


def install(
    tree: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    saved: Iterable[TensorEntry],
) -> dict[str, Any]:
    """Give an optimizer the state that has been brought to where it belongs.

    Args:
        tree: the state, as it was saved.
        model: the model.
        optimizer: an optimizer of its parameters.
        saved: the tensors of the model that were saved with it.

    Returns:
        ``extra`` as it was saved.
    """
    if optimizer is not None:
        names = parameter_names(model, own_tensors(model))
        dtypes = {dotted(entry.path[1:]): torch_dtype(entry.dtype) for entry in saved}
        load_optimizer_tree(optimizer, names, tree.get("optimizer", {}), dtypes)
    extra: dict[str, Any] = restored(tree.get("extra", {}))
    return extra


def _place(entry: TensorEntry) -> tuple[str, int]:
    """Where a tensor begins, so that files are read front to back."""
    if isinstance(entry.pieces, Pieces):
        return entry.pieces.first
    return min(((piece.file, piece.offset) for piece in entry.pieces), default=("", 0))


def load_weights(
    path: StrPath,
    model: nn.Module,
    *,
    strict: bool = True,
    buffer: int = DEFAULT_BUFFER,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load a model's weights. Each rank reads its shards and no more. Every rank calls this.

    Values are converted to the dtype of the parameter. A tied parameter is found under any of its
    names.

    Args:
        path: a folder of ``save_pretrained``, a safetensors file, a file of ``torch.save`` (which
            is read without running code from it), a checkpoint of ``torch.distributed.checkpoint``,
            or one of Shardwise. A URL of an object store may be that of safetensors, of a
            checkpoint of Shardwise, or of its run.
        model: the model, sharded or not. Tensors on the meta device get memory; those that are not
            in the checkpoint (``strict=False``) stay on the meta device.
        strict: whether the names must be exactly the model's.
        buffer: bytes that reading may hold beside the model.
        group: the ranks that load together; the default process group if ``None``.

    Raises:
        CheckpointError: it is damaged or of another model; raised on all ranks alike.
    """
    given = locals()
    wait_for_save()
    ranks = checked(load_weights, group, given, lambda: place_of(path))
    ranks.all(
        f"loading {path}",
        lambda: _load_weights(place_of(path), model, strict=strict, buffer=buffer),
    )


def _load_weights(path: Place, model: nn.Module, *, strict: bool, buffer: int) -> None:
    with open_source(path) as source:
        arrival = Arrival(model, str(source.where), strict=strict)
        arrival.expect(_stored_values(source, arrival, ReadWindow(buffer)))
        own = own_tensors(model)
        source.expect(
            (path, own_part(own[name])[0])
            for name, path in model_tensors(source).items()
            if name in own and tuple(own[name].shape) == source.tensors[path].shape
        )
        arrival.load(source.versions)


def _stored_values(source: Source, arrival: Arrival, window: ReadWindow) -> dict[str, Any]:
    """What a source has of a model, by name, with tensors that are read where they arrive."""
    extra = extra_states(source) if arrival.has_extra_states else {}
    tensors = {
        name: arrival.unread(
            source.tensors[path].shape,
            torch_dtype(source.tensors[path].dtype),
            functools.partial(read_part, name=name, source=source, window=window, path=path),
        )
        for name, path in model_tensors(source).items()
        if not any(name.startswith(f"{each}.") for each in extra)
    }
    return tensors | extra


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a model saves, by name, with shards as ``DTensor``s."""
    return {
        name: each
        for name, each in model_state(model, ignore_frozen_params=False).items()
        if isinstance(each, torch.Tensor)
    }


def own_part(tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """This rank's part of a tensor: where it is, and its elements."""
    return Box(*dtensor.chunk_of(tensor)), dtensor.plain(tensor)


def read_part(
    tensor: torch.Tensor, name: str, source: Source, window: ReadWindow, path: StatePath
) -> None:
    """Read this rank's part of a tensor, converted to the tensor's dtype.

    Args:
        tensor: the tensor to fill, with memory.
        name: its name, for error messages.
        source: the checkpoint.
        window: the buffer for what cannot be read straight into the tensor.
        path: path of the tensor in the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or has another shape.
    """
    info = source.tensors[path]
    check_tensor(tensor, name)
    if info.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{source.where}: {name}: found shape {list(info.shape)}, expected {list(tensor.shape)}"
        )
    box, local = own_part(tensor)
    same = local.device.type == "cpu" and local.dtype == torch_dtype(info.dtype)
    if same and local.is_contiguous() and not is_lazy(local) and box.numel:
        source.read(path, box, local.detach())
        local.view(-1)[:0].zero_()  # tells autograd of a write, since it does not see the read
        return
    for part, elements in window.parts(source, path, box):
        narrow(local, part.relative_to(box.offsets)).copy_(elements)
