"""State dicts of a wrapped model: whole, as ``DTensor``s, or this rank's shards.

    FULL_STATE_DICT     whole tensors, gathered one parameter at a time
    SHARDED_STATE_DICT  ``DTensor``s, for ``torch.distributed.checkpoint``
    LOCAL_STATE_DICT    plain tensors: the rows that this rank holds

The names are those of the model that was wrapped, in all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise import _torch
from shardwise.sharding.param import ShardedParam


def is_first_of(mesh: DeviceMesh) -> bool:
    """Whether this is the rank that ``rank0_only`` means: the first of the mesh."""
    return dist.get_rank() == int(mesh.mesh.flatten()[0])


def whole_tensor(value: DTensor) -> torch.Tensor:
    """All of ``value``, on every rank, in memory of its own. Every rank calls it."""
    local = _torch.local_of(value)
    if local.is_meta:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    kind = value.device_mesh.device_type
    if local.device.type != kind:  # offloaded: collectives run where computing does
        local = local.to(kind)
        value = _torch.wrap_local(local, _torch.spec_of(value))
    whole = _torch.wait_tensor(value.full_tensor())
    shared = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return whole.clone() if shared else whole


def exported(value: Any, kind: StateDictType, *, to_host: bool) -> Any:
    """A value of a state dict as that kind of state dict has it.

    What is whole, or on the host by request, is a copy: it stays as it is while training goes on.
    Shards that stay where they are alias the model's.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if kind is StateDictType.FULL_STATE_DICT:
        if isinstance(value, DTensor):
            whole = whole_tensor(value)
            return whole.cpu() if to_host else whole
        return value.detach().to("cpu" if to_host else value.device, copy=True)
    if isinstance(value, DTensor) and kind is StateDictType.SHARDED_STATE_DICT:
        if not to_host:
            return value
        local = _torch.local_of(value).detach().to("cpu", copy=True)
        return _torch.wrap_local(local, _torch.spec_of(value))
    value = _torch.plain(value)
    return value.detach().to("cpu", copy=True) if to_host else value.detach()


def convert_saved(
    state: dict[str, Any],
    keys: list[str],
    params: Mapping[str, ShardedParam],
    settings: StateDictSettings,
    *,
    keeps: bool,
) -> None:
    """Turn values of a state dict into what ``settings`` ask for, in place.

    Args:
        state: the state dict.
        keys: which of its keys to convert, in the same order on every rank.
        params: those of them that are sharded parameters.
        settings: the kind of state dict.
        keeps: whether this rank wants whole tensors; it takes part in gathering them anyway.
    """
    done: dict[int, Any] = {}  # tied parameters stay tied
    for key in keys:
        tie = id(params[key].form) if key in params else id(key)
        if tie not in done:
            to_host = settings.state_dict_config.offload_to_cpu
            done[tie] = exported(state[key], settings.state_dict_type, to_host=to_host)
        if keeps:
            state[key] = done[tie]
        else:
            del state[key]
            done[tie] = None


def convert_loaded(
    fqn: str, value: Any, param: ShardedParam, settings: StateDictSettings
) -> torch.Tensor:
    """What to load into a sharded parameter: a ``DTensor`` that lies as it does. No communication.

    Args:
        fqn: its fully qualified name, for messages.
        value: a whole tensor, a ``DTensor``, or this rank's rows under ``LOCAL_STATE_DICT``.
        param: the parameter.
        settings: the kind of state dict.

    Raises:
        ValueError: the value has another shape than the kind of state dict lets expect.
    """
    sharded = param.sharded
    assert isinstance(sharded, DTensor)
    if isinstance(value, DTensor):
        _check_shape(fqn, value.shape, sharded.shape, "whole", settings)
        if value.placements == sharded.placements and value.device_mesh == sharded.device_mesh:
            return value
        return value.redistribute(sharded.device_mesh, sharded.placements)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _check_shape(fqn, value.shape, param.local.shape, "this rank's rows", settings)
        return as_shard(param, value)
    _check_shape(fqn, value.shape, sharded.shape, "the whole", settings)
    return cut(param, value)


def cut(param: ShardedParam, whole: torch.Tensor) -> DTensor:
    """This rank's rows of ``whole`` as a ``DTensor``, without communication."""
    origin = param.form.origin
    if origin is not None:
        split = distribute_tensor(whole, origin.mesh, origin.placements, src_data_rank=None)
        whole = _torch.local_of(split)
    return as_shard(param, param.layout.cut(whole, param.form.mesh.shard.rank))


def as_shard(param: ShardedParam, rows: torch.Tensor) -> DTensor:
    """``rows``, copied to where ``param`` keeps its own, as a ``DTensor`` like it."""
    rows = rows.detach().to(param.local.device, copy=True).contiguous()
    return _torch.wrap_local(rows, _torch.with_dtype(_torch.spec_of(param.sharded), rows.dtype))


def _check_shape(
    fqn: str,
    found: torch.Size,
    expected: torch.Size,
    what: str,
    settings: StateDictSettings,
) -> None:
    if found != expected:
        raise ValueError(
            f"{fqn} on rank {dist.get_rank()}: expected {what}, of shape {tuple(expected)}, found "
            f"shape {tuple(found)}; the state dict type is {settings.state_dict_type.name}, "
            "set_state_dict_type changes it"
        )
