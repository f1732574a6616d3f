"""Private names of ``DTensor``, other tensor subclasses, device meshes and storages."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
    return_and_correct_aliasing,
)

from shardwise._torch import operations

__all__ = ["DTensorSpec", "is_traceable_wrapper_subclass_type"]

#: The specs in use, by mesh, placements, shape, strides and dtype.
_specs: weakref.WeakValueDictionary[tuple[Any, ...], DTensorSpec] = weakref.WeakValueDictionary()
#: Placements with which each element is whole on the ranks that have it.
_PARTS = frozenset({Shard, _StridedShard, Replicate})


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a ``DTensor``: not differentiable, not waited for, not copied."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a ``DTensor``, and any other tensor as it is."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a ``DTensor`` is cut over ranks, or a sum over ranks that is still to be made."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = tensor.device_mesh.shape
    return any(
        size > 1 and not placement.is_replicate()
        for size, placement in zip(sizes, tensor.placements, strict=True)
    )


def code_that_finds_shapes() -> CodeType:
    """Return the code that runs operations on shapes of whole tensors, to know those of results."""
    # Here, since trainings can do without this name of torch's.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator._propagate_tensor_meta_non_cached.__code__


def chunk_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's part of a tensor begins in each dimension, and its shape."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    with real_tensors():  # in a rehearsal too: torch reads the ranks of a mesh
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def set_local_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Move the local tensor of a ``DTensor`` into ``memory``, of the same shape and dtype."""
    dtensor = cast(DTensor, tensor)
    local = dtensor._local_tensor
    if local.device == memory.device and not local.is_inference():
        local.data = memory  # for all who hold the local tensor itself
    else:
        dtensor._local_tensor = memory
    if dtensor.device != memory.device:  # of the wrapper, where torch expects the gradient
        dtensor.data = wrap_local(memory, dtensor._spec)


def move_local(tensor: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give a ``DTensor`` another local tensor and layout. Its device and global shape stay."""
    dtensor = cast(DTensor, tensor)
    dtensor._local_tensor, dtensor._spec = local, spec


def without_memory(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor like another one, of any shape, with memory for one element: NaN, or 0.

    Its strides are 0, unless it has no more than one element.
    """
    value = float("nan") if tensor.is_floating_point() else 0
    few = shape if math.prod(shape) < 2 else ()
    return torch.full(few, value, dtype=tensor.dtype, device=tensor.device).expand(shape)


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Return mesh, placements and global shape of a ``DTensor``, to build others like it."""
    return cast(DTensor, tensor)._spec


def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap ``local`` in a ``DTensor``, as ``DTensor.from_local`` does but without its checks.

    Called once per gradient and step, where the public way would cost more than the arithmetic.
    ``DTensor.__init__`` only serves ``torch.export``, and costs more than the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=local.requires_grad)


def make_parameter(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """Wrap ``local`` in a ``DTensor`` that is a parameter.

    ``nn.Parameter(wrap_local(local, spec))`` gives the same, but dispatches an operation to make a
    second wrapper. A model has thousands of parameters.
    """
    made = DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)
    made._is_param = True  # by this, torch recognizes parameters of other classes than its own
    return cast(nn.Parameter, made)


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    strides: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Return the spec of a ``DTensor`` of global ``shape`` and ``strides``.

    Equal ones on a mesh are one object. Torch looks a spec up in each operation on a ``DTensor``,
    and knows the same object at once, while comparing another costs as much as the operation.
    """
    key = id(mesh), tuple(placements), tuple(shape), tuple(strides), dtype
    found = _specs.get(key)  # which keeps its mesh
    if found is None:
        meta = TensorMeta(shape, tuple(strides), dtype)
        found = _specs[key] = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return found


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return ``spec`` for values of ``dtype``."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


def placed_as(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as a ``DTensor`` that is sharded as ``tensor`` is, unless that is none."""
    if not isinstance(tensor, DTensor):
        return local
    return wrap_local(local, with_dtype(spec_of(tensor), local.dtype))


def redistributed_as(tensor: DTensor, spec: DTensorSpec) -> DTensor:
    """Return a ``DTensor`` with the placements of ``spec``: itself if it has them."""
    if tensor._spec.placements == spec.placements:
        return tensor
    return tensor.redistribute(placements=spec.placements)


def part_like(tensor: object, spec: DTensorSpec) -> torch.Tensor | None:
    """Return the local tensor of a ``DTensor`` if it is the part of it that ``spec`` describes."""
    if type(tensor) is not DTensor:
        return None
    own = tensor._spec
    if own is spec or (
        own.mesh == spec.mesh and own.placements == spec.placements and own.shape == spec.shape
    ):
        return tensor._local_tensor
    return None


def local_with_grad(param: DTensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor of a parameter, as another object whose gradient is that of ``grad``.

    Returns:
        The tensor; ``None`` if these are not the same elements of both, in the same dtype.
    """
    spec, local = param._spec, param._local_tensor
    own = part_like(grad, spec)
    if (
        own is None
        or own.dtype is not local.dtype
        or own.dtype.is_complex
        or type(local) not in (torch.Tensor, FakeTensor)
        or not _PARTS.issuperset(map(type, spec.placements))
    ):
        return None
    made = local.detach()
    made.grad = own
    return made


def placed_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, after giving it the placements of that for good.

    That of a penalty on a sharded parameter may be replicated, or pending a sum. Its placements are
    the same on all ranks, so all of them redistribute it, or none.
    """
    grad = parameter.grad
    if not (isinstance(grad, DTensor) and isinstance(parameter, DTensor)):
        return grad
    if grad._spec is parameter._spec:  # as gradients of a model are
        return grad
    placed = redistributed_as(grad, parameter._spec)
    if placed is not grad:
        parameter.grad = placed
    return placed


def on_mesh(spec: DTensorSpec, mesh: DeviceMesh) -> DTensorSpec:
    """Return ``spec`` on another mesh of the same ranks."""
    meta = spec.tensor_meta
    assert meta is not None
    return make_spec(mesh, spec.placements, meta.shape, meta.stride, meta.dtype)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that produces ``tensor``, if one does, and return the result."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a subclass that keeps its values in other tensors."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    declared = bool(is_traceable_wrapper_subclass(tensor))
    if declared:
        return True
    try:  # not every wrapper declares itself as one
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def flatten(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Take a tensor subclass apart into the tensors in which it keeps its values, and a context.

    Its class puts it together: ``__tensor_unflatten__(parts, context, outer_size, outer_stride)``.

    Returns:
        The tensors by name, and the context; ``None`` of any other tensor.
    """
    wrapper: Any = tensor
    if type(tensor) in (torch.Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(wrapper):
        return None
    names, context = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, context


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not fake."""
    return not isinstance(tensor, FakeTensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a view of a single storage: not on meta, not a wrapper."""
    return not tensor.is_meta and not is_wrapper(tensor)


def has_own_memory(tensor: DTensor) -> bool:
    """Whether a plain tensor was assigned to ``tensor.data``, which leaves the shard as it was."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # it only wraps the shard
        return False
    return True


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor, or those of the tensors in which it keeps its values.

    None of a tensor that has neither: a sparse one, say.
    """
    found: Any = tensor
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(found):
        names, _ = found.__tensor_flatten__()
        kept = [getattr(found, name) for name in names]  # a DTensor names its mesh, too
        return [
            each for part in kept if isinstance(part, torch.Tensor) for each in storages_of(part)
        ]
    try:
        return [tensor.untyped_storage()]
    except (RuntimeError, NotImplementedError):
        return []


def memory_of(tensor: torch.Tensor) -> list[int]:
    """Return numbers that identify the storages of a tensor; see :func:`storages_of`."""
    return [int(each._cdata) for each in storages_of(tensor)]


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return a number that identifies the storage of a tensor among all that exist.

    ``None`` if it has no storage of its own, as a wrapper around other tensors does not.
    """
    local = plain(tensor)
    if is_wrapper(local):
        return None
    try:
        return int(local.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # inside a transform of torch.func
        return None


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return which storage a plain tensor is in, and where in it: also if there is no memory."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def real_tensors() -> AbstractContextManager[Any]:
    """Make tensors with values inside, also where others make fake ones: those of ranks, say."""
    return cast(AbstractContextManager[Any], unset_fake_temporarily())


def strided_shard(dim: int, pieces: int) -> Placement:
    """Return ``Shard(dim)`` for a tensor already split along ``dim`` into ``pieces`` by others."""
    return _StridedShard(dim, split_factor=pieces)


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that ``placement`` shards, or ``None``."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def split_factor(placement: Placement) -> int:
    """Return into how many pieces others split the tensor before ``placement`` splits each."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def describe_placement(placement: Placement) -> str:
    """Describe a placement: ``Shard(0)``, ``StridedShard(0, 2)``, ``Replicate`` or ``Partial``."""
    if isinstance(placement, _StridedShard):
        return f"StridedShard({placement.dim}, {placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return type(placement).__name__.lstrip("_")


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the dimensions of all ``meshes``, in order; all share a root."""
    with real_tensors():
        return DeviceMesh._concatenate(list(meshes)) if len(meshes) > 1 else meshes[0]


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the dimensions ``names`` of ``mesh`` as one dimension."""
    return mesh[names]._flatten("_".join(names))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from, or itself."""
    return mesh._get_root_mesh()


def sibling_meshes(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of all meshes sliced from the root as ``mesh`` is, ``(count, *mesh.shape)``.

    For a mesh (dp, tp), ``mesh["dp"]`` has one sibling for each position along ``tp``; its own
    ranks are among them.
    """
    layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is None or ranks is None:  # an older torch does not keep them
        return mesh.mesh.unsqueeze(0)
    return cast(torch.Tensor, layout.remap_to_tensor(ranks)).view(-1, *mesh.shape)


# -- operators of our own ---------------------------------------------------------------------

Operator = torch._ops.OpOverload
#: ``(operator, args, kwargs)`` to what it returns, as torch calls it for a ``DTensor`` among them.
Handler = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]


def handle(handlers: Mapping[Operator, Handler]) -> None:
    """Let ``handlers`` compute operators of ``DTensor``s, from now on and in this process."""
    DTensor._op_dispatcher._custom_op_handlers.update(handlers)


def compute(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator of ``DTensor``s as torch does if nobody handles it."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    found = dispatcher._propagate_op_sharding_dispatch_slow_path(operator, args, kwargs, info, True)
    if not isinstance(found, OutputSharding):
        return found
    info.output_sharding = found
    local = dispatcher._dispatch_get_local_results_slow_path(operator, args, info)
    written = operations.written_by(operator, args, kwargs)
    if written:
        return written[0]
    made = dispatcher.wrap(local, found.output_spec)
    return return_and_correct_aliasing(operator, args, kwargs, made)  # type: ignore[no-untyped-call]


# -- references to a tensor and its memory; if torch does not say, none counts as the only one ----


def is_only_reference(tensor: torch.Tensor) -> bool:
    """Whether only the calling function has a tensor, or another one with the same memory.

    No other reference in Python or C++, no view, no array of a library. The caller passes a local
    variable, and has the tensor nowhere else.
    """
    if type(tensor) is not torch.Tensor or tensor.requires_grad or not _counts():
        return False
    # What a program made of memory of its own, by from_numpy say, cannot be resized.
    if not tensor.untyped_storage().resizable():
        return False
    return _references(tensor) == _ALONE


def _references(tensor: torch.Tensor) -> tuple[int, ...]:
    """Count the references of Python and of C++ to a tensor, and those to its storage."""
    storage = tensor.untyped_storage()
    of_python = sys.getrefcount(tensor), sys.getrefcount(storage)
    of_cpp: tuple[int, int] = (
        tensor._use_count(),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(storage._cdata),
    )
    return of_python + of_cpp


def _counts() -> bool:
    return hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def _of_a_new_one() -> tuple[int, ...]:
    """Count those of a tensor that only a local variable of a caller refers to."""

    def through_a_call(tensor: torch.Tensor) -> tuple[int, ...]:
        return _references(tensor)

    made = torch.empty(1)
    return through_a_call(made)


_ALONE = _of_a_new_one() if _counts() else ()
