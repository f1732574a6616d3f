"""Every private torch name that Shardwise touches, each behind one small function.

Tried on torch 2.11 and 2.13. When a new torch moves one of these names, this is the only file to
mend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager
from torch.distributed.fsdp import _fully_shard
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.jit._script import RecursiveScriptModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["DTensorSpec", "DataParallelMeshDims", "ShardPlacementResult"]


if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
else:

    def _newer(home: Any, name: str) -> type:
        """A class that torch 2.11 may not have: then one of that name that nothing is made of."""
        return getattr(home, name, None) or type(name, (), {})

    DataParallelMeshDims = _newer(_fully_shard, "DataParallelMeshDims")
    ShardPlacementResult = _newer(_fully_shard._fsdp_common, "ShardPlacementResult")

# The function behind torch's own fully_shard, under which torch keeps a module's state; read now,
# because patch_torch() may have changed the name when it is needed.
_TORCHS: Any = vars(_fully_shard._fully_shard)["fully_shard"].__wrapped__

_P = ParamSpec("_P")
_R = TypeVar("_R")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``: not differentiable, not waited for, not copied."""
    return cast(DTensor, tensor)._local_tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``; any other as it is."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def set_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
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


def strided_shard(dim: int, pieces: int) -> Placement:
    """``Shard(dim)`` of a tensor that others have cut along ``dim`` into ``pieces`` before."""
    return _StridedShard(dim, split_factor=pieces)


def cuts(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts along ``dim``."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh with the dimensions of all ``meshes``, in order; they are parts of one mesh."""
    return DeviceMesh._concatenate(list(meshes)) if len(meshes) > 1 else meshes[0]


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The dimensions ``names`` of ``mesh`` as one."""
    return mesh[names]._flatten("_".join(names))


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` once the collective that makes it (if one does) is over."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Arrived(torch.autograd.Function):
    """The plain tensor that a collective under way makes, with the gradient of the wrapper."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor of its own: autograd marks what is returned, and the wrapper keeps what it has.
        return wait_tensor(tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """As :func:`wait_tensor` for what needs a gradient, and part of autograd's graph as it is.

    Compilers that trace backward wait for such an input past autograd, and then give it no
    gradient.
    """
    if not (isinstance(tensor, AsyncCollectiveTensor) and tensor.requires_grad):
        return tensor
    return cast(torch.Tensor, _Arrived.apply(tensor))  # type: ignore[no-untyped-call]


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Let two tensors change places, for all who hold them."""
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def store_of(group: dist.ProcessGroup) -> Any:
    """The store over which the ranks of ``group`` found each other."""
    return dist.distributed_c10d._get_process_group_store(group)


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows when ``tensor`` is written to; -1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def version_with_local(tensor: torch.Tensor) -> int:
    """A number that grows when ``tensor`` is written to, as ``DTensor`` or as what is in it."""
    version = version_of(tensor)
    return version + version_of(local_of(tensor)) if isinstance(tensor, DTensor) else version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set what :func:`version_of` returns; does nothing where that is not counted."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


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


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a collective of ``group`` may take."""
    types = group._device_types
    cpu = torch.device("cpu")
    options = group._get_backend(cpu if cpu in types else types[0]).options
    return float(options._timeout.total_seconds())


def writable_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """What ``tensor`` is a view of, if autograd lets the view be written to in place.

    What a custom function returned, ``DTensor.to_local()`` for one, it does not.
    """
    made = torch._C._autograd
    base = tensor._base
    if base is None or made._get_creation_meta(tensor) != made.CreationMeta.DEFAULT:
        return None
    return base


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


def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` under ``name``; skips ``nn.Module.__setattr__``'s checks where it can."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter now registered under ``name``."""
    return cast(nn.Parameter, module._parameters[name])


def holds_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> bool:
    """Whether ``parameter`` is what is registered under ``name``."""
    return module._parameters.get(name) is parameter


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module's own children by name, one that is registered twice twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers, by name, as the mutable dictionary that the module uses."""
    return module._buffers


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep ``torch.compile`` from tracing ``function``: it runs between graphs.

    ``torch.compiler.disable`` for functions that run thousands of times a step in programs that
    compile nothing: where no compiler listens, one question is all that it costs.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    # The question itself is not traced either: neither from a caller's frame nor as a frame.
    call.__dict__["_torchdynamo_disable"] = True
    set_code_exec_strategy(
        cast(Any, call).__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    )
    return call


def outside_transforms() -> AbstractContextManager[object]:
    """Leave the transforms of ``torch.func`` that are running, for as long as the context lasts.

    Inside of them every tensor that an operation makes is a wrapper, without memory of its own.
    """
    if peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that now runs has finished."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is inside a backward (activation checkpointing recomputes there)."""
    return torch._C._current_graph_task_id() != -1


def runs_in_this_backward(node: torch.autograd.graph.Node) -> bool:
    """Whether the backward that now runs goes, or went, through ``node`` of the graph."""
    runs: bool = torch._C._will_engine_execute_node(node)
    return runs


def backward_number() -> int:
    """A number of the backward that this thread is inside of."""
    return int(torch._C._current_graph_task_id())


def run_post_accumulate_hooks(parameter: torch.Tensor) -> None:
    """Run the hooks that ``register_post_accumulate_grad_hook`` put on ``parameter``."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for hook in (hooks or {}).values():
        hook(parameter)


def allow_grad_of_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Let ``parameter.grad`` have ``dtype``, which is not the parameter's."""
    parameter.grad_dtype = dtype


def has_post_accumulate_hooks(parameter: torch.Tensor) -> bool:
    """Whether someone reads ``parameter.grad`` as soon as it is there."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """What was registered with ``register_hook``, in order."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


def is_scripted(module: nn.Module) -> bool:
    """Whether ``torch.jit.script`` made ``module``; such ones take no hooks on state dicts."""
    return isinstance(module, RecursiveScriptModule)


def check_composable(module: nn.Module, name: str) -> None:
    """Check that torch's composable APIs, such as ``replicate``, leave room for ``name``.

    Raises:
        ValueError: ``name`` is already applied to ``module``, or an API is that excludes it.
    """
    registry: dict[str, Any] = module.__dict__.get(REGISTRY_KEY, {})
    if name in registry:
        raise ValueError(
            f"{name} has already been applied to this {type(module).__name__}; apply it once"
        )
    if "replicate" in registry:
        raise ValueError(
            f"{name} cannot be applied to this {type(module).__name__}: torch's replicate() "
            "already manages it"
        )


def mark_composable(module: nn.Module, name: str) -> None:
    """Enter ``name`` into the registry that torch's composable APIs (``replicate``) look at."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


class _Refusal:
    """Stands where ``distribute_module`` notes that it has run, and raises when it is asked."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __bool__(self) -> bool:
        raise self._error


def refuse_to_distribute(module: nn.Module, error: Exception) -> None:
    """Have ``distribute_module``, behind torch's tensor parallel plans, raise ``error``."""
    module.__dict__["_distribute_module_applied"] = _Refusal(error)


def answer_torch(module: nn.Module, state: object) -> None:
    """Let torch's own ``fully_shard.state(module)`` return ``state``; pipelining asks for it."""
    module.__dict__.setdefault(STATE_KEY, {})[_TORCHS] = state


def fsdp2_functions(names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Torch's own FSDP2 functions of those ``names`` that this torch has."""
    home = _fully_shard._fully_shard
    return {name: getattr(home, name) for name in names if hasattr(home, name)}


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's ``replicate`` manages ``module``."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


@contextmanager
def launched_together(group: dist.ProcessGroup) -> Iterator[_CoalescingManager]:
    """Launch the collectives called inside as one, at the end of the block.

    They must be of one kind and one dtype, each called with ``async_op=False``. What is yielded
    has a ``wait()`` for all of them.
    """
    with _coalescing_manager(group, async_ops=True) as manager:
        yield manager


def norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of every tensor, in float32 at least, in one pass for each dtype."""
    found: list[torch.Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        found += torch._foreach_norm(alike, order, dtype=wide)
    return found


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor in place by a 0-dim tensor."""
    torch._foreach_mul_(tensors, factor)


def without_memory() -> AbstractContextManager[Any]:
    """Tensors made inside have a dtype, a shape and a CPU storage without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # trainings need none of it

    return cast(AbstractContextManager[Any], FakeTensorMode())


def offset_in_file(storage: torch.UntypedStorage) -> int | None:
    """Where a storage lies in the file that it was loaded from, to the meta device, by torch."""
    return getattr(storage, "_checkpoint_offset", None)


def storage_info(file: str, offset: int, length: int) -> Any:
    """How the metadata of ``torch.distributed.checkpoint`` says where a chunk lies.

    It has the attributes ``relative_path``, ``offset``, ``length`` and ``transform_descriptors``.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def metadata_classes() -> dict[tuple[str, str], Any]:
    """What a pickle of that metadata may name, by module and name; none does more than hold values.

    ``_get_layout`` looks a word up in a table. Dtypes are missing: they are ``torch``'s own.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    names = (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
    classes: dict[tuple[str, str], Any] = {
        (metadata.__name__, name): getattr(metadata, name) for name in names
    }
    classes[filesystem.__name__, "_StorageInfo"] = filesystem._StorageInfo
    classes["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    classes["torch", "Size"] = torch.Size
    return classes


def is_wrap_policy(policy: object) -> bool:
    """Whether ``policy`` is one of torch's policy objects, which choose modules all at once."""
    return isinstance(policy, _Policy)


def run_wrap_policy(
    policy: object, model: nn.Module, ignored: set[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    """The modules that a policy object of torch's chooses, with their keyword arguments."""
    return cast(_Policy, policy)._run_policy(model, ignored, {})


def without_checkpointing(module: nn.Module) -> nn.Module:
    """The module inside torch's activation checkpointing wrapper; any other as it is."""
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    return module


def without_checkpoint_prefix(name: str) -> str:
    """A name without the parts that torch's activation checkpointing wrapper adds."""
    return ".".join(part for part in name.split(".") if part != _CHECKPOINT_WRAPPED_MODULE)


def module_classes_to_ignore(mixed_precision: object) -> tuple[type[nn.Module], ...]:
    """The classes that a ``MixedPrecision`` leaves in full precision: batch norms, by default."""
    return tuple(cast(Any, mixed_precision)._module_classes_to_ignore)


def dim_cut_by(placement: Placement) -> int | None:
    """The dimension of the tensor that ``placement`` cuts, ``None`` if it cuts none."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def pieces_cut_before(placement: Placement) -> int:
    """Into how many pieces others have cut the tensor before ``placement`` cuts each."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was taken from, or itself."""
    return mesh._get_root_mesh()


def meshes_like(mesh: DeviceMesh) -> torch.Tensor:
    """Ranks of all meshes that are cut from the root as ``mesh`` is, ``(count, *mesh.shape)``.

    Of a mesh (dp, tp), ``mesh["dp"]`` has one for each place along ``tp``; this rank's is among
    them.
    """
    layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is None or ranks is None:  # an older torch does not tell
        return mesh.mesh.unsqueeze(0)
    return cast(torch.Tensor, layout.remap_to_tensor(ranks)).view(-1, *mesh.shape)


@contextmanager
def pretended_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of a world that is not there: its collectives return at once and move nothing.

    Raises:
        RuntimeError: this process is part of a world.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"this process is rank {dist.get_rank()} of a world of {dist.get_world_size()}; "
            "pretend another in a process of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def describe_placement(placement: Placement) -> str:
    """``Shard(0)``, ``StridedShard(0, 2)``, ``Replicate`` or ``Partial``, for people."""
    if isinstance(placement, _StridedShard):
        return f"StridedShard({placement.dim}, {placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return type(placement).__name__.lstrip("_")
