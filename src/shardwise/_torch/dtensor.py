"""Private names of ``DTensor``, other tensor subclasses and device meshes.

Tried on torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["DTensorSpec"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``: not differentiable, not waited for, not copied."""
    return cast(DTensor, tensor)._local_tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``; any other as it is."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def set_local_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Have the local tensor of a ``DTensor`` live in ``memory``, of the same shape and dtype."""
    dtensor = cast(DTensor, tensor)
    local = dtensor._local_tensor
    if local.device == memory.device and not local.is_inference():
        local.data = memory  # who holds the local tensor itself goes along
    else:
        dtensor._local_tensor = memory


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Mesh, placements and global shape of a ``DTensor``, to build others like it."""
    return cast(DTensor, tensor)._spec


def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A ``DTensor`` around ``local``: what ``DTensor.from_local`` does, without its checks.

    Made once per gradient and step, where the public way would cost more than the arithmetic.
    """
    make = cast(Callable[..., DTensor], DTensor)
    return make(local, spec, requires_grad=local.requires_grad)


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    strides: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Describe a ``DTensor`` of global ``shape`` and ``strides``."""
    meta = TensorMeta(shape, tuple(strides), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """``spec`` for values of ``dtype``."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` once the collective that makes it (if one does) is over."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a subclass that has its values in tensors inside it."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    says_so = bool(is_traceable_wrapper_subclass(tensor))
    if says_so:
        return True
    try:  # not all of them say so
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a view of one memory: not on the meta device, not a wrapper."""
    return not tensor.is_meta and not is_wrapper(tensor)


def storage_of(tensor: torch.Tensor) -> int | None:
    """A number that tells the storage of a tensor from all others that exist.

    ``None`` where it has none of its own, as a wrapper around other tensors has not.
    """
    local = plain(tensor)
    if is_wrapper(local):
        return None
    try:
        return int(local.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # inside a transformation of torch.func
        return None


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors made inside have a dtype, a shape and a CPU storage without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # trainings need none of it

    return cast(AbstractContextManager[Any], FakeTensorMode())


def strided_shard(dim: int, pieces: int) -> Placement:
    """``Shard(dim)`` of a tensor that others have cut along ``dim`` into ``pieces`` before."""
    return _StridedShard(dim, split_factor=pieces)


def is_sharded_on(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts along ``dim``."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def sharded_dim(placement: Placement) -> int | None:
    """The dimension of the tensor that ``placement`` cuts, ``None`` if it cuts none."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def split_factor(placement: Placement) -> int:
    """Into how many pieces others have cut the tensor before ``placement`` cuts each."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def describe_placement(placement: Placement) -> str:
    """``Shard(0)``, ``StridedShard(0, 2)``, ``Replicate`` or ``Partial``, for people."""
    if isinstance(placement, _StridedShard):
        return f"StridedShard({placement.dim}, {placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return type(placement).__name__.lstrip("_")


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh with the dimensions of all ``meshes``, in order; they are parts of one mesh."""
    return DeviceMesh._concatenate(list(meshes)) if len(meshes) > 1 else meshes[0]


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The dimensions ``names`` of ``mesh`` as one."""
    return mesh[names]._flatten("_".join(names))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was taken from, or itself."""
    return mesh._get_root_mesh()


def sibling_meshes(mesh: DeviceMesh) -> torch.Tensor:
    """Ranks of all meshes that are cut from the root as ``mesh`` is, ``(count, *mesh.shape)``.

    Of a mesh (dp, tp), ``mesh["dp"]`` has one for each place along ``tp``; this rank's is among
    them.
    """
    layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is None or ranks is None:  # an older torch does not tell
        return mesh.mesh.unsqueeze(0)
    return cast(torch.Tensor, layout.remap_to_tensor(ranks)).view(-1, *mesh.shape)
