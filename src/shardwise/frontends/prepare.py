"""Prepare a module to be sharded: materialize it, and broadcast the first rank's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch import fsdp
from shardwise.frontends.fsdp2 import form_of, managed_modules
from shardwise.transport.peers import Peers

#: Bytes of small tensors that are broadcast together.
BUCKET_BYTES = 8 * 1024 * 1024

ParamInit = Callable[[nn.Module], object]


def materialize_unit(
    module: nn.Module,
    device: torch.device,
    init: ParamInit | None,
    ignored: Iterable[nn.Module] = (),
) -> None:
    """Allocate and initialize the tensors of ``module`` that are on the meta device.

    Parents come before children; nested units have been materialized before. Tied parameters stay
    tied, also across units.

    Args:
        module: a module that is about to be sharded.
        device: the device to allocate on.
        init: called with every module that has tensors of its own on the meta device, to move them
            to a device and initialize them. By default ``to_empty`` and ``reset_parameters()``.
        ignored: modules to leave alone.

    Raises:
        ValueError: there is no ``init`` and a module has no ``reset_parameters()``, or ``init``
            left a tensor on the meta device.
    """
    ignored = set(ignored)
    for each, name in managed_modules((module,)).items():
        if each in ignored or not any(tensor.is_meta for _, tensor in _own_tensors(each)):
            continue
        before = dict(each.named_parameters(recurse=False))
        if init is not None:
            init(each)
        else:
            _reset(each, name, device)
        _check_materialized(each, name)
        for own, old in before.items():
            owner = fsdp.ParamOwner(each, own)
            new = owner.registered
            if new is not old and old.is_meta:
                fsdp.swap_tensors(old, new)  # so that other holders of the old one have the new one
                owner.register(old)


def _reset(module: nn.Module, name: str, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        tensors = ", ".join(own for own, tensor in _own_tensors(module) if tensor.is_meta)
        raise ValueError(
            f"{name or 'the wrapped module'} ({type(module).__name__}) has {tensors} on the meta "
            "device and no reset_parameters(); pass param_init_fn, a function that moves a "
            "module's own tensors to a device and initializes them"
        )
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        reset()


def _check_materialized(module: nn.Module, name: str) -> None:
    left = [own for own, tensor in _own_tensors(module) if tensor.is_meta]
    if left:
        raise ValueError(
            f"{name or 'the wrapped module'} ({type(module).__name__}): param_init_fn left "
            f"{', '.join(left)} on the meta device on rank {dist.get_rank()}; call "
            "module.to_empty(device=..., recurse=False) in it, and initialize"
        )


def broadcast_states(
    module: nn.Module, mesh: DeviceMesh, device: torch.device, ignored: set[nn.Parameter]
) -> None:
    """Broadcast parameters and buffers from the first rank of ``mesh``.

    A collective over all dimensions of the mesh. Leaves out nested units, which have had theirs.

    Args:
        module: a module that is about to be sharded.
        mesh: the ranks.
        device: the device that collectives run on.
        ignored: parameters to leave alone.
    """
    tensors: dict[torch.Tensor, None] = {}
    for each in managed_modules((module,)):
        for _, tensor in _own_tensors(each):
            taken = isinstance(tensor, nn.Parameter) and form_of(tensor) is not None
            if tensor not in ignored and not isinstance(tensor, DTensor) and not taken:
                tensors[tensor] = None
    with torch.no_grad():
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().flatten().to(device) for tensor in bucket])
            for dim in reversed(range(mesh.ndim)):
                group = mesh.get_group(dim)
                with Peers(group).collective("the broadcast of module states"):
                    dist.broadcast(flat, dist.get_process_group_ranks(group)[0], group=group)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype, at most :data:`BUCKET_BYTES` together; larger ones alone."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        bucket: list[torch.Tensor] = []
        for tensor in alike:
            if bucket and sum(map(_nbytes, bucket)) + _nbytes(tensor) > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
