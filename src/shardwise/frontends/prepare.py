"""What happens to a module before it is sharded: it gets its memory, and rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch import fsdp
from shardwise.sharding.api import form_of, managed_modules
from shardwise.transport.peers import naming_lost_peer

#: Small tensors are broadcast together, up to so many bytes.
BUCKET_BYTES = 8 * 1024 * 1024

ParamInit = Callable[[nn.Module], object]


def materialise_unit(
    module: nn.Module,
    device: torch.device,
    init: ParamInit | None,
    ignored: Iterable[nn.Module] = (),
) -> None:
    """Give what of ``module`` is on the meta device its memory and values, parents first.

    Nested units have had their turn. A tied parameter stays tied, also to one in another unit.

    Args:
        module: a module that is about to be sharded.
        device: where the memory is.
        init: called with every module that has tensors of its own on the meta device, to put them
            elsewhere and to fill them. By default ``to_empty`` and ``reset_parameters()``.
        ignored: modules to leave alone.

    Raises:
        ValueError: there is no ``init``, and a module has no ``reset_parameters()``; or ``init``
            left something on the meta device.
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
        _check_materialised(each, name)
        for own, old in before.items():
            new = fsdp.parameter_of(each, own)
            if new is not old and old.is_meta:
                fsdp.swap_tensors(old, new)  # so whoever else holds the old one has the new one
                fsdp.register_parameter(each, own, old)


def _reset(module: nn.Module, name: str, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        tensors = ", ".join(own for own, tensor in _own_tensors(module) if tensor.is_meta)
        raise ValueError(
            f"{name or 'the wrapped module'} ({type(module).__name__}) has {tensors} on the meta "
            "device and no reset_parameters(); pass param_init_fn, a function that puts a module's "
            "own tensors on a device and initialises them"
        )
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        reset()


def _check_materialised(module: nn.Module, name: str) -> None:
    left = [own for own, tensor in _own_tensors(module) if tensor.is_meta]
    if left:
        raise ValueError(
            f"{name or 'the wrapped module'} ({type(module).__name__}): param_init_fn left "
            f"{', '.join(left)} on the meta device on rank {dist.get_rank()}; call "
            "module.to_empty(device=..., recurse=False) in it and initialise"
        )


def broadcast_states(
    module: nn.Module, mesh: DeviceMesh, device: torch.device, ignored: set[nn.Parameter]
) -> None:
    """Give every rank the parameters and buffers that the first rank of ``mesh`` has.

    Nested units have had their turn. Every rank of the mesh calls it.

    Args:
        module: a module that is about to be sharded.
        mesh: the ranks, along all of its dimensions.
        device: where collectives run.
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
                with naming_lost_peer(group, "the broadcast of module states"):
                    dist.broadcast(flat, dist.get_process_group_ranks(group)[0], group=group)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype each, of :data:`BUCKET_BYTES` together or a large one alone."""
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
