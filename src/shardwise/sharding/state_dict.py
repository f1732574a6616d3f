"""State dicts of shards, and the metadata that says which part of each tensor a rank has.

Wrappers return state dicts of several kinds. Code that saves shards needs ``DTensor``s, and gets
them here without knowing about wrappers.

The metadata is saved beside a rank's own shards, so that a program without a process group can
consolidate the shards of all ranks:

    {"shape": [7, 4], "offsets": [3, 0], "sizes": [3, 4]}       rows 3, 4 and 5 of 7
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor


class HasStateDictKinds:
    """A module whose state dicts are of one of several kinds."""

    def sharded_kind(self) -> AbstractContextManager[None]:
        """Return a context in which its state dicts hold its shards as ``DTensor``s."""
        raise NotImplementedError


@contextmanager
def sharded_state_dicts(model: nn.Module) -> Iterator[None]:
    """Make state dicts of ``model`` hold its shards as ``DTensor``s inside."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, HasStateDictKinds):
                stack.enter_context(module.sharded_kind())
        yield


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model`` with its shards as ``DTensor``s.

    Args:
        model: a model that is wrapped, contains wrapped modules, or is sharded without a wrapper.
    """
    with sharded_state_dicts(model):
        return model.state_dict()


def check_origin(what: str, value: Any, like: torch.Tensor) -> None:
    """Check that a loaded value is not the part that another rank has of a tensor.

    A pickled ``DTensor`` keeps its mesh, with the coordinates of the rank that saved it. Torch does
    not compare them, so ranks that all load rank 0's file would go on with rank 0's rows.

    Args:
        what: the value, for messages.
        value: what was loaded. Anything but a ``DTensor`` passes.
        like: the sharded parameter that the value belongs to.

    Raises:
        ValueError: a rank with another part saved it, or a job with another number of ranks.
    """
    if not (isinstance(value, DTensor) and isinstance(like, DTensor)):
        return
    saved, own = value.device_mesh, like.device_mesh
    if saved is own or saved.ndim != own.ndim:
        return
    sharded = [dim for dim, each in enumerate(value.placements) if not each.is_replicate()]
    found, expected = (
        [(mesh.size(dim), (mesh.get_coordinate() or ())[dim:][:1]) for dim in sharded]
        for mesh in (saved, own)
    )
    if found != expected:
        raise ValueError(
            f"{what} on rank {own_rank()}: found a shard saved at {saved.get_coordinate()} "
            f"of a mesh of shape {tuple(saved.shape)}, expected the one of {own.get_coordinate()} "
            f"of {tuple(own.shape)}. torch.save writes the shards of one rank; save one file per "
            "rank, or full tensors, or use shardwise.checkpoint, which also loads on other meshes"
        )


def keep_out_other_parts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Refuse to load the parts of other ranks; a hook. Parameters stay as they are."""
    for name, param in module.named_parameters(recurse=False):
        key = prefix + name
        try:
            check_origin(key, state_dict.get(key), param)
        except ValueError as error:
            errors.append(str(error))
            state_dict[key] = param.detach()


FORMAT = "shardwise.rank"
VERSION = 1


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
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": own_rank(),
        "world_size": world_size(),
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


def own_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _part_of(name: str, tensor: DTensor) -> dict[str, list[int]]:
    """The shape of the full tensor, and the offsets and sizes of this rank's part."""
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = dtensor.local_of(tensor)
    if len(chunks) != 1 or chunks[0].sizes != local.shape:
        raise NotImplementedError(
            f"{name} on rank {own_rank()}: found placements {tensor.placements}, expected one part "
            "a rank"
        )
    return {
        "shape": list(tensor.shape),
        "offsets": list(chunks[0].offsets),
        "sizes": list(chunks[0].sizes),
    }
