"""What becomes of a module before ``FullyShardedDataParallel`` wraps it.

The modules that become units are chosen, and prepared: values for what is on the meta device, the
first rank's values for all. And here are the parts of FSDP1's ``MixedPrecision`` that
``fully_shard``'s policy does not have: buffers, and classes that stay in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecision,
)
from torch.distributed.tensor import DTensor

from shardwise._torch import c10d, fsdp
from shardwise.frontends.fsdp2 import managed_modules
from shardwise.frontends.state_dict import WrapperModule
from shardwise.sharding.param import form_of
from shardwise.sharding.policy import cast_floating
from shardwise.sharding.state import state_of
from shardwise.transport.peers import Peers
from shardwise.wrap import Policy, apply_to, chosen_modules

#: Called with a module, to move its own tensors to a device and initialize them.
ParamInit = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Ignored:
    """The modules and parameters that a unit does not manage.

    Attributes:
        modules: the given modules and all modules inside them.
        parameters: the given parameters and all parameters of these modules.
    """

    modules: set[nn.Module]
    parameters: set[nn.Parameter]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        modules: Iterable[nn.Module] | None,
        states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    ) -> Ignored:
        """Read ``ignored_modules`` and ``ignored_states`` of a constructor.

        Raises:
            TypeError: an element is neither a module nor a parameter.
            ValueError: an element is ``module`` itself, or is wrapped already.
        """
        given: list[object] = [*(modules or ()), *(states or ())]
        wrong = [each for each in given if not isinstance(each, nn.Module | nn.Parameter)]
        if wrong:
            raise TypeError(
                "ignored_modules and ignored_states: expected modules or parameters, found "
                f"{type(wrong[0]).__name__}"
            )
        inside = {m for each in given if isinstance(each, nn.Module) for m in each.modules()}
        if module in inside:
            raise ValueError(
                f"ignored_modules: found the {type(module).__name__} that is to be wrapped, "
                "expected modules inside it"
            )
        wrapped = [each for each in inside if isinstance(each, WrapperModule)]
        if wrapped:
            raise ValueError(
                "ignored_modules: expected modules that are not wrapped yet, found a "
                f"FullyShardedDataParallel around a {type(wrapped[0].module).__name__}"
            )
        parameters = {each for each in given if isinstance(each, nn.Parameter)}
        parameters.update(p for each in inside for p in each.parameters(recurse=False))
        return cls(inside, parameters)


@dataclass(frozen=True)
class AutoWrap:
    """How to wrap the modules inside the one that is being wrapped.

    Attributes:
        policy: chooses the modules; see :mod:`shardwise.wrap`. ``None``: none are wrapped.
        wrapper: called as ``wrapper(module, **arguments)``.
        arguments: the arguments of the outer wrapper that inner ones get too. A policy may override
            them for a module.
        mixed_precision: the dtypes of the outer wrapper. Modules of classes that it ignores become
            units in full precision.
    """

    policy: Policy | None
    wrapper: Callable[..., nn.Module]
    arguments: Mapping[str, Any]
    mixed_precision: MixedPrecision | None = None

    def apply(self, module: nn.Module, ignored: Ignored) -> None:
        """Wrap the chosen modules in ``module`` in place, inner ones first."""
        if self.policy is None:
            return
        chosen = chosen_modules(module, self.policy, ignored_modules=ignored.modules)
        for each in modules_in_full_precision(module, self.mixed_precision):
            if each not in ignored.modules:
                chosen[each] = {**chosen.get(each, {}), "mixed_precision": None}
                keep_in_full_precision(each)
        unwrapped = {
            each: self._arguments_with(own)
            for each, own in chosen.items()
            if state_of(each) is None and not isinstance(each, WrapperModule)
        }
        apply_to(module, unwrapped, self.wrapper)

    def _arguments_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        mesh = {"device_mesh": None} if "process_group" in own else {}
        return {**self.arguments, **mesh, **own}


def cast_buffers(
    modules: Iterable[tuple[str, nn.Module]], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers to ``dtype`` in place; return their old dtypes by name."""
    before: dict[str, torch.dtype] = {}
    if dtype is None:
        return before
    for prefix, module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                before[f"{prefix}.{name}" if prefix else name] = buffer.dtype
                fsdp.buffers_of(module)[name] = buffer.to(dtype)
    return before


def modules_in_full_precision(
    model: nn.Module, mixed_precision: MixedPrecision | None
) -> list[nn.Module]:
    """The modules inside ``model`` whose classes mixed precision ignores."""
    if mixed_precision is None:
        return []
    classes = fsdp.module_classes_to_ignore(mixed_precision)
    return [each for each in model.modules() if isinstance(each, classes) and each is not model]


def keep_in_full_precision(module: nn.Module) -> None:
    """Have ``module`` compute in float32: cast its inputs, and its output back."""
    wanted: list[torch.dtype | None] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        wanted.append(next((each.dtype for each in found if each.is_floating_point()), None))
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        dtype = wanted.pop()
        return output if dtype is None else cast_floating(output, dtype)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


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
                # So that other holders of the old one have the new one.
                torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
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
    held = [tensor.detach() for tensor in tensors]
    sent = [each.to(device).resolve_conj().resolve_neg().contiguous() for each in held]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        with Peers(group).collective("the broadcast of module states"):
            from shardwise.transport.buckets import as_sendable

            c10d.broadcast_all([as_sendable(value) for value in sent], group)
    for tensor, value in zip(held, sent, strict=True):
        if value is not tensor:
            # Each place in memory once: several elements of what was expanded share one.
            once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
            tensor[once].copy_(value[once])


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
