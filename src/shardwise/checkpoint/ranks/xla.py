"""XLA-style checkpoints, one file per rank, and their consolidation into full state dicts.

    lm_rank-00000000-of-00000002.pth      {"model": ..., "shard_metadata": ..., "optimizer": ...}
    lm_rank-00000001-of-00000002.pth

``shard_metadata`` says which part of each parameter the rank has, in numbers, strings and lists.
Without a process group, the parts of all ranks become full tensors again, for the model and the
optimizer. No code in a file is run.

Source: ``torch_xla.distributed.fsdp.state_dict_utils``.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base.arguments import check_arguments
from shardwise.base.boxes import Box
from shardwise.base.errors import CheckpointError
from shardwise.base.strict import refuse, shorten
from shardwise.base.units import printable
from shardwise.checkpoint.disk.beside import written_beside
from shardwise.checkpoint.disk.entries import StatePath, TensorEntry, dotted, dtype_name
from shardwise.checkpoint.disk.place import folder_of
from shardwise.checkpoint.disk.values import replaced_in
from shardwise.checkpoint.formats.detect import open_rank_files
from shardwise.checkpoint.formats.rank_files import (
    FORMAT,
    VERSION,
    RankFile,
    RankSource,
    TensorSlice,
    read_rank_file,
)
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER, ReadWindow, Watch, unwatched
from shardwise.checkpoint.formats.torchfile import Placeholder, write_tree
from shardwise.checkpoint.ranks.optimizer import optimizer_tree, parameter_names
from shardwise.checkpoint.ranks.optimizer_loading import (
    destinations,
    load_optimizer_tree,
    saved_groups,
)
from shardwise.checkpoint.ranks.state import sharded_state_dict, sharded_state_dicts

SUFFIX = "_rank-*-of-*.pth"


def rank_file(ckpt_prefix: str, rank: int, world_size: int) -> Path:
    """The path of a rank's file: ``<prefix>_rank-00000000-of-00000002.pth``."""
    return folder_of("ckpt_prefix", f"{ckpt_prefix}_rank-{rank:08}-of-{world_size:08}.pth")


def save_rank_checkpoint(
    ckpt_prefix: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    force: bool = False,
) -> Path:
    """Save what this rank has of a model and its optimizer. Every rank calls this.

    The file contains plain tensors, and is complete or does not exist. Ranks do not wait for each
    other.

    Args:
        ckpt_prefix: the beginning of the files' paths.
        model: the model.
        optimizer: an optimizer of its parameters.
        force: replace an existing file.

    Returns:
        The path of this rank's file.

    Raises:
        ValueError: the file exists, or its folder does not.
    """
    check_arguments(save_rank_checkpoint, locals())
    path = rank_file(ckpt_prefix, _own_rank(), _world_size())
    model_state, metadata = sharded_state_dict(model), get_shard_metadata(model)
    state = {"model": replaced_in(model_state, _local), "shard_metadata": metadata}
    if optimizer is not None:
        tree = optimizer_tree(optimizer, parameter_names(model, model_state))
        metadata["optimizer_info"] = parts_of(tree)
        state["optimizer"] = {"state": {}, **replaced_in(tree, _local)}
    with written_beside(path, None, force=force) as partial:
        torch.save(state, partial)
    return path


def load_rank_checkpoint(
    ckpt_prefix: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load what :func:`save_rank_checkpoint` saved, on as many ranks, sharded in the same way.

    Args:
        ckpt_prefix: the same path as for :func:`save_rank_checkpoint`.
        model: the model, sharded as it was when it was saved.
        optimizer: an optimizer of its parameters, to load its state too.

    Raises:
        CheckpointError: the file is missing or damaged, or of another model, mesh or number of
            ranks.
    """
    check_arguments(load_rank_checkpoint, locals())
    path = rank_file(ckpt_prefix, _own_rank(), _world_size())
    if not path.exists():
        raise CheckpointError(
            f"{path}: is missing; to load on another number of ranks, consolidate the files first"
        )
    file = read_rank_file(path)
    expected = get_shard_metadata(model)["shard_info"]
    _check_same_parts(file.tree["shard_metadata"]["shard_info"], expected, str(path))
    with _refusing(path):  # a file that was read can be read in one way, and has no code
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    model_state = sharded_state_dict(model)
    names = parameter_names(model, model_state)
    tree: dict[str, Any] = {}
    if optimizer is not None:
        if state.get("optimizer") is None:
            raise CheckpointError(f"{path}: contains no optimizer; load it without one")
        tree = _dict(state["optimizer"], f"{path}, optimizer")
        with _refusing(path):
            saved_groups(optimizer, names, tree)  # before anything changes
            tree = _sharded_optimizer(file, tree, optimizer, names)
    full_state = copy.copy(model_state)  # with the versions of its modules
    full_state.clear()
    for name, each in _dict(state["model"], f"{path}, model").items():
        full_state[name] = _wrapped_like(each, model_state.get(name))
    with _refusing(path), sharded_state_dicts(model):
        model.load_state_dict(full_state)
    if optimizer is None:
        return
    with _refusing(path):
        dtypes = {
            name: each.dtype
            for name, each in state["model"].items()
            if isinstance(each, torch.Tensor)
        }
        load_optimizer_tree(optimizer, names, tree, dtypes)


def _check_same_parts(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    if found == expected:
        return
    name = next(name for name in {**found, **expected} if found.get(name) != expected.get(name))
    raise CheckpointError(
        f"{where}: {name}: found {shorten(found.get(name))}, expected {expected.get(name)}; "
        "consolidate the files to load them on another mesh"
    )


def _sharded_optimizer(
    file: RankFile,
    tree: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
) -> dict[str, Any]:
    """The state of the optimizer, with a ``DTensor`` for each shard."""
    where = f"{file.path}, optimizer"
    saved = _dict(tree.get("state", {}), f"{where}, state")
    params = {name: param for param, name in names.items()}
    find = destinations(optimizer, names, ())

    def sharded(param: Tensor, path: StatePath, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sharded(param, (*path, key), each) for key, each in value.items()}
        part = file.optimizer_parts.get(dotted(path))
        if isinstance(value, Tensor) and part is not None and part.shape != param.shape:
            return _placed(find, ("optimizer", *path), value, part)
        if part is not None or isinstance(value, DTensor):
            return _wrapped_like(value, param, part)
        return value

    state: dict[str, Any] = {}
    for name, values in saved.items():
        if name not in params:
            refuse(f"{where}, state", name, "the name of a parameter of the model")
        values = _dict(values, f"{where}, {name}")
        state[name] = sharded(params[name], ("state", name), values)
    return {**tree, "state": state}


def _placed(
    find: Callable[[TensorEntry], Tensor | None], path: StatePath, local: Tensor, part: TensorSlice
) -> Tensor:
    """A shard of a state as the ``DTensor`` that the optimizer needs."""
    entry = TensorEntry(path, part.shape, dtype_name(local.dtype), "sharded", "", ())
    made = find(entry)
    box = None if made is None else Box(*dtensor.chunk_of(made))
    if made is None or box != part.box:
        raise CheckpointError(
            f"{entry.fqn}: found the part {part.box} of {list(part.shape)}, expected {box}, as the "
            "parameter is sharded; consolidate the files to load it"
        )
    dtensor.plain(made).copy_(local)
    return made


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        refuse(where, type(value).__name__, "a dict")
    return value


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Name the file in errors of a model or an optimizer that cannot load it."""
    try:
        yield
    except MemoryError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # their own code and hooks may meet values they do not expect
        reason = printable(" ".join(str(error).split()))[:200]
        raise CheckpointError(
            f"{path}: cannot be loaded ({type(error).__name__}: {reason}); expected a file that "
            "save_rank_checkpoint saved for the same model and optimizer"
        ) from error


def _local(value: Any) -> Any:
    """The local shard in place of a ``DTensor``, in a storage of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    local = dtensor.plain(value).detach()
    return local if local.untyped_storage().nbytes() == local.nbytes else local.clone()


def _wrapped_like(local: Any, like: Any, part: TensorSlice | None = None) -> Any:
    """Wrap a local shard in a ``DTensor`` that is sharded like a parameter.

    Args:
        local: the shard.
        like: the parameter.
        part: for state of an optimizer, the part of the full tensor that it is, if it is one.
    """
    local = dtensor.plain(local) if isinstance(local, DTensor) else local
    if not isinstance(like, DTensor) or not isinstance(local, torch.Tensor):
        return local
    if local.shape != dtensor.local_of(like).shape:
        if part is not None:
            raise CheckpointError(
                f"found a part with sizes {list(local.shape)}, expected "
                f"{list(dtensor.local_of(like).shape)}, like the parameter"
            )
        return local
    return dtensor.placed_as(like, local.to(dtensor.local_of(like).device))


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = SUFFIX,
    save_path: str = "",
    save_model: bool = True,
    *,
    force: bool = False,
    buffer: int = DEFAULT_BUFFER,
    watch: Watch = unwatched,
) -> tuple[Mapping[str, torch.Tensor], str | None]:
    """Make full state dicts from the files of all ranks, without a process group.

    Args:
        ckpt_prefix: the beginning of the files' paths.
        ckpt_suffix: the end of the files' paths, as a pattern.
        save_path: the file to make; ``<prefix>_consolidated.pth`` if empty. It contains the model's
            state dict under ``model``, and the optimizer's under ``optimizer`` if the files have
            one; and what else they have under ``extra``, by rank where ranks differ.
        save_model: whether to make the file. If so, no more than ``buffer`` bytes are in memory,
            and the returned tensors are read from the file when they are used.
        force: replace an existing file.
        buffer: bytes that may be in memory.
        watch: called with the number of bytes to move; returns what is called as they are moved.

    The files may also be those of PyTorch/XLA's own FSDP. If they do not say which parameter each
    state of the optimizer belongs to, a warning says so, and the result has none.

    Returns:
        The full state dict of the model, and the path of the file or ``None``.

    Raises:
        CheckpointError: files are missing, damaged, or not of one checkpoint.
        ValueError: the file to make exists.
    """
    check_arguments(consolidate_sharded_model_checkpoints, locals())
    target = Path(save_path or f"{ckpt_prefix}_consolidated.pth")
    found = sorted(map(Path, glob.glob(glob.escape(ckpt_prefix) + ckpt_suffix)))
    files = [file for file in found if file != target]
    if not files:
        raise CheckpointError(f"{ckpt_prefix}{ckpt_suffix}: found no files that match")
    with open_rank_files(files) as source:
        if source.left_out:
            warnings.warn(f"{source.left_out}; it is left out", stacklevel=2)
        if not save_model:
            return _in_memory(source), None
        window = ReadWindow(buffer, watch(source.nbytes))
        with written_beside(target, files[0], force=force) as partial:
            write_tree(partial, source.tree, window.by_name(source, source.by_name))
    loaded = torch.load(target, map_location="cpu", weights_only=True, mmap=True)
    return loaded["model"], str(target)


def _in_memory(source: RankSource) -> dict[str, Any]:
    """The full state dict of the model, in the memory of the model and no more."""
    paths = source.by_name.items()
    full = {name: source.full(path) for name, path in paths if path[0] == "model"}
    model: dict[str, Any] = replaced_in(
        source.tree["model"],
        lambda each: full[each.name] if isinstance(each, Placeholder) else each,
    )
    return model


def get_shard_metadata(model: nn.Module) -> dict[str, Any]:
    """The part of each parameter and buffer that this rank has, as plain values.

    Save it beside ``model.state_dict()``, in one file per rank.
    :func:`shardwise.checkpoint.consolidate_sharded_model_checkpoints` needs it. PyTorch/XLA has a
    method of the same name.

    Args:
        model: the sharded model.

    Returns:
        A dict with the rank, the world size, and for each name the shape of the full tensor and the
        offsets and sizes of this rank's part, in elements.

    Raises:
        NotImplementedError: a parameter is a partial sum, or this rank has several parts of it.
    """
    check_arguments(get_shard_metadata, locals())
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": _own_rank(),
        "world_size": _world_size(),
        "shard_info": parts_of(sharded_state_dict(model)),
    }


def parts_of(tree: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, list[int]]]:
    """Where this rank's part of every ``DTensor`` in a tree is, by the keys joined with dots.

    Raises:
        NotImplementedError: one is a partial sum, or this rank has several parts of it.
    """
    found = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found.update(parts_of(value, f"{prefix}{key}."))
        elif isinstance(value, DTensor):
            found[f"{prefix}{key}"] = _part_of(f"{prefix}{key}", value)
    return found


def _own_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _part_of(name: str, tensor: DTensor) -> dict[str, list[int]]:
    """The shape of the full tensor, and the offsets and sizes of this rank's part."""
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = dtensor.local_of(tensor)
    if len(chunks) != 1 or chunks[0].sizes != local.shape:
        raise NotImplementedError(
            f"{name} on rank {_own_rank()}: found placements {tensor.placements}, expected one "
            "part a rank"
        )
    return {
        "shape": list(tensor.shape),
        "offsets": list(chunks[0].offsets),
        "sizes": list(chunks[0].sizes),
    }
