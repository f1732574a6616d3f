"""Tensors that were not initialized: marked when memory is made, found before a model runs.

New memory is filled with one value: a NaN with a payload that no computation produces, or integers
of one byte pattern. Any write to a tensor removes the mark. A tensor that
still has it when its model runs would be trained on as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardwise._torch import dtensor
from shardwise.transport.peers import Peers

_CHUNK = 1 << 20  # elements compared at a time

# Quiet NaNs with a payload, as integers of the same size; the payload survives copies.
_NANS = {
    torch.float64: (torch.int64, 0x7FF8_5A5A_C3C3_5A5B),
    torch.float32: (torch.int32, 0x7FC5_A35B),
    torch.float16: (torch.int16, 0x7E5B),
    torch.bfloat16: (torch.int16, 0x7FDB),
}
_INTEGERS = {
    torch.int64: -0x5A5A_5A5A_5A5A_5A5B,  # bytes of 0xA5
    torch.int32: -0x5A5A_5A5B,
    torch.int16: -0x5A5B,
}


def mark(tensor: torch.Tensor) -> None:
    """Fill the memory of a tensor with its mark, if its dtype has one.

    Booleans and numbers of 8 bits have no value to spare.
    """
    found = _bits(tensor)
    if found is not None:
        bits, value = found
        bits.fill_(value)


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether an element of a tensor still has the mark."""
    found = _bits(tensor)
    if found is None:
        return False
    bits, value = found
    if bits.is_contiguous():  # in chunks, so that no mask as long as the tensor is made
        parts = torch.split(bits.view(-1), _CHUNK)
        return any(bool((part == value).any()) for part in parts)
    return bool((bits == value).any())


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The elements of a tensor as integers, in the same memory, and the mark of its dtype."""
    local = dtensor.plain(tensor).detach()
    if type(local) is not torch.Tensor or local.is_meta or local.layout != torch.strided:
        return None
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    if local.dtype in _NANS:
        integers, value = _NANS[local.dtype]
        return local.view(integers), value
    if local.dtype in _INTEGERS:
        return local, _INTEGERS[local.dtype]
    return None


class InitializationCheck:
    """A hook before the first forwards of a model, until nothing is marked any more.

    Args:
        model: the model.
        names: parameters and buffers that were marked when their initialization ended; the same on
            every rank.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self._names = names
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(self, prepend=True)

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Check before a forward. Every rank of the model calls this.

        Raises:
            RuntimeError: a tensor still has the mark on a rank; raised on every rank.
        """
        tensors = dict(_named(model))
        left = [name for name in self._names if name in tensors and is_marked(tensors[name])]
        left = _on_any_rank(self._names, left, tensors)
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise RuntimeError(
                f"{type(model).__name__}: {', '.join(left[:5])}{more}: memory that was neither "
                "initialized nor loaded, found before forward; expected init= of materialize() to "
                "initialize every parameter and buffer, or load_weights() to load them. Call "
                "materialize(model) without init= to initialize as the model itself does"
            )
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> InitializationCheck:
        return self  # the copy of a model has its own memory, and the same check


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _on_any_rank(
    names: list[str], left: list[str], tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """The names that are left on any rank: one may have no rows of a tensor, or others of it."""
    meshes = {each.device_mesh: None for each in tensors.values() if isinstance(each, DTensor)}
    if not meshes:
        return left
    flags = [int(name in left) for name in names]
    for mesh in meshes:
        found = torch.tensor(flags, dtype=torch.int32, device=mesh.device_type)
        for group in mesh.get_all_groups():
            with Peers(group).collective("the check of initialized tensors"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        flags = found.tolist()
    return [name for name, flag in zip(names, flags, strict=True) if flag]
