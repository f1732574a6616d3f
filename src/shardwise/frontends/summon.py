"""Give modules their full parameters between steps, for the user to read and change.

These are new tensors with the values and dtype of the shards. They are not the full form that
forward uses, which may have another dtype and shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch import autograd, dtensor
from shardwise.base.errors import MisuseError
from shardwise.sharding import attributes
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.placement import full_tensor
from shardwise.sharding.state import FSDPState
from shardwise.sharding.states import GroupState, Phase


@dataclass(frozen=True)
class SummonOptions:
    """How full parameters are summoned.

    Attributes:
        writeback: whether changes are copied back to the shards.
        first_rank_only: whether only the first rank of the mesh gets full parameters. The others
            take part in the all-gather, and hold their shards meanwhile.
        offload_to_cpu: whether the full parameters are on the host.
        with_grads: whether the full parameters have their gradients.
    """

    writeback: bool = True
    first_rank_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@contextmanager
def summoned(states: Iterable[FSDPState], options: SummonOptions) -> Iterator[None]:
    """Let the modules of ``states`` hold full parameters inside. Every rank enters.

    Raises:
        MisuseError: a module is in a forward or backward, or summoned already.
        RuntimeError: a parameter is on the meta device.
    """
    states = list(states)
    for state in states:
        _check_idle(state)
    with ExitStack() as stack:
        for state in states:
            for group in state.groups:
                stack.enter_context(_summoned(group, options))
        yield


@contextmanager
def _summoned(group: ParamGroup, options: SummonOptions) -> Iterator[None]:
    group.refresh()
    group.reshard()
    # A tied parameter may have been summoned with another group.
    own = [param for param in group.params if param.form.summoned is None]
    with autograd.no_grad():
        fulls = [_full_parameter(param, options) for param in own]
    if options.first_rank_only and not is_first(group.mesh.mesh):
        yield
        return
    with ExitStack() as stack:  # what is undone at its end, from the last line to the first
        stack.callback(_write_all_back, own, fulls, options)
        for param in own:
            stack.callback(setattr, param.form, "summoned", None)
        stack.callback(_end, group)
        stack.callback(_end, group)  # Ctrl-C may end the first attempt
        for param, full in zip(own, fulls, strict=True):
            param.form.summoned = full
        group.use_summoned()
        yield


def _end(group: ParamGroup) -> None:
    """Put the shards into the modules, if some have full parameters of the user's."""
    if group.state is GroupState.SUMMONED:
        group.use_shards()


def is_first(mesh: DeviceMesh) -> bool:
    """Whether this is the first rank of a mesh."""
    return dist.get_rank() == int(mesh.mesh.flatten()[0])


def full_value(form: ShardedParam, sharded: torch.Tensor) -> torch.Tensor:
    """Gather ``sharded``, which is sharded like ``form``, on every rank.

    Args:
        form: the parameter.
        sharded: its sharded form, its sharded gradient, or a ``DTensor`` on the same mesh.

    Returns:
        A plain tensor in its own memory. With tensor parallelism, it is this rank's part.
    """
    assert isinstance(sharded, DTensor)
    if form.origin is None:
        return full_tensor(sharded)
    outer = sharded.device_mesh.ndim - form.origin.mesh.ndim
    own = form.mesh.own_dims or frozenset(range(outer))
    wanted = [
        Replicate() if dim in own else placement for dim, placement in enumerate(sharded.placements)
    ]
    return full_tensor(sharded, wanted)


def _full_parameter(param: GroupParam, options: SummonOptions) -> nn.Parameter:
    if param.local.is_meta:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {param.fqn} is on the meta device and has no values; "
            "materialize it first, with shardwise.materialize(model)"
        )
    full = _full_for_user(param, param.sharded, options)
    parameter = nn.Parameter(full, requires_grad=param.sharded.requires_grad)
    attributes.share(parameter, param.form.attributes)
    if options.with_grads and param.sharded.grad is not None:
        parameter.grad = _full_for_user(param, param.sharded.grad, options)
    return parameter


def _full_for_user(
    param: GroupParam, sharded: torch.Tensor, options: SummonOptions
) -> torch.Tensor:
    full = full_value(param.form, sharded)
    if options.offload_to_cpu:
        full = full.cpu()
    origin = param.form.origin
    if origin is None:
        return full
    return dtensor.wrap_local(full, dtensor.with_dtype(origin, full.dtype))


def _write_all_back(
    params: Sequence[GroupParam], fulls: Sequence[nn.Parameter], options: SummonOptions
) -> None:
    if options.writeback:
        with autograd.no_grad():
            for param, full in zip(params, fulls, strict=True):
                _write_back(param, full, with_grads=options.with_grads)


def _write_back(param: GroupParam, full: nn.Parameter, *, with_grads: bool) -> None:
    param.local.copy_(_rows(param, full))
    if not with_grads:
        return
    if full.grad is None:
        param.sharded.grad = None
    elif param.sharded.grad is None:
        param.form.add_grad(_rows(param, full.grad).flatten().to(param.local.device))
    else:
        dtensor.local_of(param.sharded.grad).copy_(_rows(param, full.grad))


def _rows(param: GroupParam, full: torch.Tensor) -> torch.Tensor:
    full = dtensor.plain(full)
    return param.layout.cut(full.detach(), param.form.mesh.shard.rank).contiguous()


def _check_idle(state: FSDPState) -> None:
    where = f"{type(state.modules[0]).__name__} on rank {dist.get_rank()}"
    if any(group.state is GroupState.SUMMONED for group in state.groups):
        raise MisuseError(
            f"{where}: its full parameters are summoned already; do not nest summon_full_params"
        )
    in_forward = state.phase is Phase.FORWARD or state.root.forward_root is not None
    if in_forward or autograd.in_backward():
        raise MisuseError(
            f"{where} is in {'forward' if in_forward else 'backward'}; full parameters can be "
            "summoned between steps only"
        )
