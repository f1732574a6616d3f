"""``fully_shard``: the front door that is a drop-in for torch's FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwise import _torch
from shardwise.sharding.collect import (
    managed_modules,
    mark_taken,
    move_to_device,
    outermost,
    parameters_of,
)
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.hooks import FSDPState, state_of
from shardwise.sharding.mesh import DataMesh, default_mesh
from shardwise.sharding.module import become_fsdp_module
from shardwise.sharding.offload import Offload
from shardwise.sharding.param import ParamOwner, ShardedParam
from shardwise.sharding.precision import Precision

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]
_Module = TypeVar("_Module", bound=nn.Module)
_Modules = TypeVar("_Modules", bound=Sequence[nn.Module])

_NO_MIXED_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: _Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    transport: str | None = ...,
) -> _Module: ...


@overload
def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    transport: str | None = ...,
) -> _Modules: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _NO_MIXED_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    transport: str | None = None,
) -> Any:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    The parameters that no earlier call on a submodule has taken become one *group*: gathered
    together before the module's forward and backward, freed after each, their gradients reduced
    together. So call it bottom-up: on every block, then on the model. Between steps every
    parameter is a ``DTensor`` under its old name, of which this rank holds its rows; build the
    optimizer after the last call. Same API as ``torch.distributed.fsdp.fully_shard``.

    Args:
        module: the module, or several that form one group.
        mesh: 1-D to shard over, or 2-D to replicate over the first dimension and shard over the
            second. By default all ranks, 1-D.
        reshard_after_forward: free the parameters between forward and backward (``True``, ZeRO-3)
            or keep them (``False``, ZeRO-2). By default ``True``, but ``False`` for the root, whose
            parameters backward needs at once.
        shard_placement_fn: called with every parameter; may return ``Shard(dim)`` to cut it along
            another dimension than 0. Uneven sizes are fine along any dimension.
        mp_policy: dtypes of computing, of reducing, and of outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and so the optimizer on the
            host. On a CPU mesh they are there already.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: not available yet.
        transport: what moves the bytes: ``"auto"``, ``"c10d"`` or ``"collectives"``; by default
            what ``SHARDWISE_TRANSPORT`` says, else ``"auto"``.

    Returns:
        ``module``, now an :class:`~shardwise.FSDPModule`.

    Raises:
        ValueError: a module without a forward of its own, one that is sharded already, a mesh that
            is not 1-D or 2-D, or an argument out of its range.
        NotImplementedError: what this version cannot do yet; nothing has been changed then.
    """
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims is not available in this version of Shardwise")
    tops = _check_modules((module,) if isinstance(module, nn.Module) else module)
    data_mesh = DataMesh.of(default_mesh() if mesh is None else mesh, transport)
    reshard = _check_reshard_after_forward(reshard_after_forward, data_mesh.shard.world_size)
    managed = managed_modules(tops)
    found = parameters_of(managed, ignored_params or set())
    placements = _check_placements(found, shard_placement_fn)
    for top in tops:
        _torch.mark_composable(top, "fully_shard")
    move_to_device(found, managed, data_mesh.device)
    offload = Offload.of(offload_policy, data_mesh.device)
    params = []
    for param, (fqn, owners) in found.items():
        params.append(ShardedParam(param, fqn, owners, data_mesh, placements[param], offload))
        mark_taken(param, fqn)
    groups = (
        [ParamGroup(params, tops, data_mesh, Precision(mp_policy), offload, reshard)]
        if params
        else []
    )
    FSDPState(tops, groups, data_mesh.device, mp_policy, keep_if_root=reshard_after_forward is None)
    _keep_state_dicts_sharded(groups)
    for each in managed:
        # torch.compile looks for these: parameters are swapped under it, by hooks outside graphs.
        each.__dict__["_is_fsdp_managed_module"] = True
        each.__dict__["_fsdp_use_orig_params"] = True
    for top in tops:
        become_fsdp_module(top)
    return module


def _check_modules(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The outermost of ``modules``, if all of them can be sharded."""
    if not modules:
        raise ValueError("fully_shard: expected a module or a list of modules, found an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard: expected an nn.Module, found {type(each).__name__}")
    tops = outermost(modules)
    for top in tops:
        if (
            isinstance(top, nn.ModuleList | nn.ModuleDict)
            and type(top).forward is nn.Module.forward
        ):
            raise ValueError(
                f"fully_shard: a {type(top).__name__} has no forward of its own that could gather "
                "its parameters; apply fully_shard to the modules in it, or to the module that "
                "contains it"
            )
        if state_of(top) is not None:
            raise ValueError(
                f"fully_shard has already been applied to this {type(top).__name__}; apply it once"
            )
    return tops


def _check_reshard_after_forward(value: bool | int | None, shard_size: int) -> bool:
    if value is None or isinstance(value, bool):
        return value is not False
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward: expected a bool, an int or None, found "
            f"{type(value).__name__} {value!r}"
        )
    if value < 1 or shard_size % value != 0:
        raise ValueError(
            f"reshard_after_forward: expected a factor of the {shard_size} ranks that parameters "
            f"are sharded over, found {value}"
        )
    if value == shard_size:
        return True
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps parameters whole between forward and backward, as False "
            "does; pass True to free them",
            stacklevel=3,
        )
        return False
    raise NotImplementedError(
        f"reshard_after_forward={value}: sharding over fewer ranks between forward and backward is "
        "not available in this version of Shardwise; pass True or False"
    )


def _check_placements(
    found: dict[nn.Parameter, tuple[str, list[ParamOwner]]], fn: ShardPlacementFn | None
) -> dict[nn.Parameter, Shard | None]:
    """Ask ``fn`` for every parameter's placement, before anything is changed."""
    placements: dict[nn.Parameter, Shard | None] = {}
    for param, (fqn, _) in found.items():
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"{fqn} is a DTensor with placements {param.placements} already; sharding what "
                "tensor parallelism left is not available in this version of Shardwise"
            )
        placement = fn(param) if fn is not None else None
        if placement is not None and not isinstance(placement, Shard):
            raise NotImplementedError(
                f"shard_placement_fn returned {placement!r} for {fqn}; this version of Shardwise "
                "takes Shard(dim) or None"
            )
        if placement is not None and not -param.ndim <= placement.dim < max(param.ndim, 1):
            raise ValueError(
                f"shard_placement_fn returned {placement} for {fqn} of shape {tuple(param.shape)}; "
                f"expected a dimension from {-param.ndim} to {param.ndim - 1}"
            )
        placements[param] = placement
    return placements


def _keep_state_dicts_sharded(groups: list[ParamGroup]) -> None:
    """State dicts are taken from, and loaded into, the sharded form."""
    for group in groups:
        modules = {owner.module for param in group.params for owner in param.owners}

        def reshard(*_: Any, group: ParamGroup = group) -> None:
            group.reshard()

        def refresh(*_: Any, group: ParamGroup = group) -> None:
            group.refresh()

        for module in modules:
            module.register_state_dict_pre_hook(reshard)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(reshard)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]


fully_shard.state = state_of  # type: ignore[attr-defined]
