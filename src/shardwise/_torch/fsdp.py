"""Private names by which a module looks managed by FSDP2, and which FSDP needs of modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, _fully_shard
from torch.distributed.fsdp.wrap import _Policy
from torch.jit._script import RecursiveScriptModule

from shardwise._torch import dtensor

__all__ = ["DataParallelMeshDims", "ShardPlacementResult"]

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    class TorchGradientReductionHandle: ...

else:

    def _newer(home: Any, name: str) -> type:
        """The class ``name``, or an empty one of that name where this torch does not have it."""
        missing = {"__doc__": f"A stand-in for torch's {name}, which this torch does not have."}
        return getattr(home, name, None) or type(name, (), missing)

    DataParallelMeshDims = _newer(_fully_shard, "DataParallelMeshDims")
    ShardPlacementResult = _newer(_fully_shard._fsdp_common, "ShardPlacementResult")
    TorchGradientReductionHandle = _newer(_fully_shard._fully_shard, "GradientReductionHandle")

#: Whether a policy without a ``reduce_dtype`` means the dtype of the shard, as from torch 2.15 on.
#: It meant the dtype of forward and backward before.
REDUCES_AS_STORED = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")


@dataclass(frozen=True)
class _WithOverride(MixedPrecisionPolicy):
    """A policy with what torch 2.15 added, on an older torch; only our runtime knows of it."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


def has_extension(tensor: torch.Tensor) -> bool:
    """Whether the class of ``tensor`` has an all-gather of its own."""
    return hasattr(tensor, "fsdp_pre_all_gather")


def with_own_dtypes(
    policy: MixedPrecisionPolicy, params: Collection[nn.Parameter]
) -> MixedPrecisionPolicy:
    """Return a policy with which some parameters compute in the dtype in which they are stored.

    Args:
        policy: the policy of the others.
        params: these parameters, before they are sharded.
    """
    kept = frozenset(params)
    cls: Any = type(policy) if REDUCES_AS_STORED else _WithOverride
    given = {each.name: getattr(policy, each.name) for each in fields(policy)}

    def override(param: nn.Parameter) -> torch.dtype | None:
        return param.dtype if param in kept else None

    return cast(MixedPrecisionPolicy, cls(**{**given, "param_dtype_override_fn": override}))


def dtype_override(policy: MixedPrecisionPolicy, param: nn.Parameter) -> torch.dtype | None:
    """Return the dtype that a policy has for one parameter alone."""
    override = getattr(policy, "param_dtype_override_fn", None)
    return None if override is None else cast(torch.dtype | None, override(param))


def without_override(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return a policy without dtypes of single parameters."""
    if getattr(policy, "param_dtype_override_fn", None) is None:
        return policy
    changed: Any = policy
    return cast(MixedPrecisionPolicy, replace(changed, param_dtype_override_fn=None))


# torch keeps a module's state under the function behind its own fully_shard. Read it now:
# patch_torch() may have replaced the name by the time it is needed.
_FSDPState: Any = _fully_shard._fsdp_state.FSDPState
_FULLY_SHARD: Any = vars(_fully_shard._fully_shard)["fully_shard"].__wrapped__


def fsdp2_functions(names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Return torch's own FSDP2 functions of the given names, as far as this torch has them."""
    home = _fully_shard._fully_shard
    return {name: getattr(home, name) for name in names if hasattr(home, name)}


def set_fsdp_state(module: nn.Module, state: object) -> None:
    """Let torch's own ``fully_shard.state(module)`` return ``state``, as pipelining needs."""
    module.__dict__.setdefault(STATE_KEY, {})[_FULLY_SHARD] = state


@dataclass(eq=False)
class TorchGroup:
    """Parameters that torch's own FSDP2 gathers and reduces together.

    Attributes:
        name: of its modules, from the model on.
        modules: what the group computes.
        params: the sharded parameters, ``DTensor``s, each with its name.
    """

    name: str
    modules: tuple[nn.Module, ...]
    params: list[tuple[str, Any]]
    _group: Any
    _state: Any

    def held(self, number: int) -> torch.Tensor:
        """Return the sharded parameter that it has now in this place of ``params``."""
        found: torch.Tensor = self._group.fsdp_params[number].sharded_param
        return found

    @property
    def shapes(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """Name, shape and dtype of each parameter, for labels."""
        return [(name, param.shape, param.dtype) for name, param in self.params]

    @property
    def completes(self) -> bool:
        """Whether this backward completes gradients; see ``set_is_last_backward``."""
        return self._state._state_ctx.is_last_backward and self.all_reduces

    @property
    def collectives(self) -> tuple[Any, Any, Any]:
        """What it gathers with, what it reduces with, and what is called after an all-reduce."""
        group = self._group
        return group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook

    @collectives.setter
    def collectives(self, found: tuple[Any, Any, Any]) -> None:
        group = self._group
        group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook = found

    def full_parameters(self) -> list[nn.Parameter]:
        """Return the full parameters, once they have been gathered."""
        params = self._group.fsdp_params
        return [each._unsharded_param for each in params if hasattr(each, "_unsharded_param")]

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The process group that gradients are all-reduced over, if there is one."""
        info = self._group.mesh_info
        found: dist.ProcessGroup | None = getattr(info, "replicate_process_group", None)
        return found

    @property
    def all_reduces(self) -> bool:
        """Whether reductions reach the replicas; see ``set_requires_all_reduce``."""
        return bool(self._group.all_reduce_grads)


def torch_groups(model: nn.Module) -> list[TorchGroup]:
    """Return the groups of torch's own FSDP2 in a model; none if it shards nothing there."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[Any, TorchGroup] = {}
    for module_name, module in model.named_modules():
        state = vars(module).get(STATE_KEY, {}).get(_FULLY_SHARD)
        if not isinstance(state, _FSDPState):
            continue
        groups: Any = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12 has one for each module
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if group is None or group in found:
                continue
            held = (each.sharded_param for each in group.fsdp_params)
            params = [(names.get(id(param), ""), param) for param in held]
            found[group] = TorchGroup(module_name, tuple(group.modules), params, group, state)
    return list(found.values())


def name_state(cls: Any) -> None:
    """Give a class of states the names for which torch's pipelining and checkpointing ask."""
    cls._fsdp_param_groups = property(lambda state: state.groups)
    cls._fsdp_param_group = property(lambda state: next(iter(state.groups), None))
    cls._state_ctx = property(lambda state: state.root)
    cls._root_post_backward_final_callback = lambda state: state.root.end_backward()
    cls._pre_forward = lambda state, *args: state.before_forward(*args)
    cls._post_forward = lambda state, *args: state.after_forward(*args)


def name_module(cls: Any, state_of: Callable[[Any], Any]) -> None:
    """Give a class of modules, of which each has a state, the names for which torch asks."""

    def apply(module: Any, *args: Any, **kwargs: Any) -> Any:  # of to(), cuda(), to_empty(), ...
        module.reshard()
        # Past torch's own FSDPModule, which would look for torch's state.
        result = super(FSDPModule, module)._apply(*args, **kwargs)
        for group in state_of(module).groups:
            group.refresh()
        return result

    cls._apply = apply
    cls._get_fsdp_state = lambda module: state_of(module)
    cls._set_unshard_async_op = lambda module, async_op: None  # all gathers are asynchronous


def mark_managed(module: nn.Module) -> None:
    """Tell ``torch.compile`` that hooks outside of its graphs exchange the parameters."""
    vars(module).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def check_composable(module: nn.Module, name: str) -> None:
    """Check that torch's composable APIs, such as ``replicate``, allow ``name`` on ``module``.

    Raises:
        ValueError: ``name``, or an API that excludes it, is already applied to ``module``.
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
    """Add ``name`` to the registry that torch's composable APIs (``replicate``) check."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's ``replicate`` manages ``module``."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


class _Refusal:
    """Flag in place of the one ``distribute_module`` sets, which raises when it is read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __bool__(self) -> bool:
        raise self._error


def refuse_to_distribute(module: nn.Module, error: Exception) -> None:
    """Make ``distribute_module``, behind torch's tensor parallel plans, raise ``error``."""
    module.__dict__["_distribute_module_applied"] = _Refusal(error)


def is_wrap_policy(policy: object) -> bool:
    """Whether ``policy`` is a policy object of torch's, which chooses all modules at once."""
    return isinstance(policy, _Policy)


def run_wrap_policy(
    policy: object, model: nn.Module, ignored: set[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy object of torch's chooses, with their arguments."""
    return cast(_Policy, policy)._run_policy(model, ignored, {})


def module_classes_to_ignore(mixed_precision: object) -> tuple[type[nn.Module], ...]:
    """Return the classes that a ``MixedPrecision`` keeps in full precision."""
    return tuple(cast(Any, mixed_precision)._module_classes_to_ignore)


def without_checkpointing(module: nn.Module) -> nn.Module:
    """Return the module inside torch's activation checkpointing wrapper, if it is one."""
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    return module


def without_checkpoint_prefix(name: str) -> str:
    """Remove the name parts that torch's activation checkpointing wrapper adds."""
    return ".".join(part for part in name.split(".") if part != _CHECKPOINT_WRAPPED_MODULE)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return all of a ``ShardedTensor``, in which torch reads the optimizer state of FSDP1.

    A collective then. Any other tensor is returned as it is.
    """
    if not isinstance(value, ShardedTensor):
        return value
    full = torch.empty(value.size(), dtype=value.dtype, device=value.device)
    value.gather(out=full if dist.get_rank() == 0 else None)
    dist.broadcast(full, 0)
    return full


def is_scripted(module: nn.Module) -> bool:
    """Whether ``torch.jit.script`` made ``module``, which then takes no state dict hooks."""
    return isinstance(module, RecursiveScriptModule)


def original_class(module: nn.Module) -> type[Any]:
    """Return the class of a module, without the one that ``fully_shard`` mixes in."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


@dataclass(frozen=True)
class ParamOwner:
    """A module and the name under which it holds a parameter."""

    module: nn.Module
    name: str

    @property
    def registered(self) -> nn.Parameter:
        """The parameter that the module holds now."""
        return cast(nn.Parameter, self.module._parameters[self.name])

    def holds(self, parameter: nn.Parameter | None) -> bool:
        """Whether the module holds ``parameter`` now."""
        return self.module._parameters.get(self.name) is parameter

    def register(self, parameter: nn.Parameter | None, before: nn.Parameter | None = None) -> bool:
        """Put ``parameter`` into the module.

        Returns:
            Whether the module held ``before`` until now.
        """
        module, name = self.module, self.name
        held = module._parameters.get(name) is before
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[name] = parameter  # without the checks of __setattr__
        else:
            setattr(module, name, parameter)
        return held


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the module's children by name; one registered twice is listed twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own buffers by name: the mutable dictionary that the module uses."""
    return module._buffers


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor to ``device`` for everyone who holds the object.

    Its data cannot be set if it is a wrapper around other tensors, or if the device needs another
    kind of tensor than the one before, as backends of PrivateUse1 do.
    """
    with torch.no_grad():
        moved = tensor.to(device)
        is_compatible = torch._has_compatible_shallow_copy_type(tensor, moved)
        if is_compatible and not dtensor.is_wrapper(tensor):
            tensor.data = moved
            return
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        moved.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
