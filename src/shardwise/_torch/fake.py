"""Fake tensors: tensors with shapes, dtypes and storages, but without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise._torch import autograd

__all__ = ["UNTRACEABLE", "FakeTensorMode", "TorchDispatchMode"]

#: What is raised by an operation whose result depends on values.
UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not fake."""
    return not isinstance(tensor, FakeTensor)


def stands_for_memory(tensor: torch.Tensor, mode: FakeTensorMode) -> bool:
    """Whether a tensor of the same program with values, run without ``mode``, would have memory."""
    if not isinstance(tensor, FakeTensor):
        return False
    return tensor.fake_mode is mode and tensor.fake_device.type != "meta"


def device_of(function: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Return the device of a fake tensor if ``function`` only asks for that, which is often."""
    if function is _DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def grouped_product(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a grouped matrix product, or ``None`` for any other operation.

    The product exists in every dtype; torch's rule for its shape refuses all but bfloat16.
    """
    if function is not _GROUPED or args[0].dtype == torch.bfloat16:
        return None
    first, second = args[0], args[1]
    shape: tuple[int, ...]
    match first.ndim, second.ndim:
        case 2, 2:
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            shape = (offsets.shape[0], first.shape[0], second.shape[1])
        case 2, _:
            shape = (first.shape[0], second.shape[-1])
        case _, 2:
            shape = (first.shape[1], second.shape[1])
        case _:
            shape = (first.shape[0], first.shape[1], second.shape[-1])
    return first.new_empty(shape)


_GROUPED = torch.ops.aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default


def adopt(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of ``mode`` like any tensor; one of its own as it is."""
    known = isinstance(tensor, FakeTensor) and tensor.fake_mode is mode
    return tensor if known else mode.from_tensor(tensor)


def writes(function: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return bool(function._schema.is_mutable)


def only_views(function: Any) -> bool:
    """Whether all that an operation returns are views of its arguments."""
    returned = [each.alias_info for each in function._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of a call.

    Attributes:
        done: what is computed. A causal mask halves attention.
        needed: what counts for model FLOPs utilization: without a mask, and without the scores
            that the backward of attention computes again (PaLM, appendix B).
    """

    done: int
    needed: int


def flops_of(function: Any, args: Any, kwargs: Any, out: Any) -> Flops:
    """Return the floating-point operations of a matrix product or the like; 0 for the rest.

    Source: the formulas of ``torch.utils.flop_counter``, which leaves out attention on CPUs.
    """
    at = _CPU_ATTENTION.get(function)
    if at is not None:
        query, key = args[at.query], args[at.query + 1]
        product = 2 * query.numel() * key.shape[-2]
        causal = args[at.causal] if len(args) > at.causal else kwargs.get("is_causal", False)
        return Flops(at.done * product // (2 if causal else 1), at.needed * product)
    count: Callable[..., int] | None = flop_registry.get(function._overloadpacket)
    found = 0 if count is None else int(count(*args, **kwargs, out_val=out))
    return Flops(found, found)


@dataclass(frozen=True)
class _Attention:
    """Positions of arguments, and how many products of query and key it takes."""

    query: int
    causal: int
    done: int
    needed: int


_CPU_ATTENTION: Mapping[Any, _Attention] = {
    autograd.cpu_attention: _Attention(0, 4, 2, 2),
    autograd.cpu_attention_backward: _Attention(1, 7, 5, 4),
}


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and the buffers that a module holds itself, to be replaced."""
    return module._parameters, module._buffers


# -- results of fake operations, made again without asking torch for their shapes ------------------
#
# Torch finds out what a fake operation returns in Python, and keeps that, but even looking it up
# there takes longer than most operations take on values. The layers of a model repeat a few hundred
# calls: the first of each goes to torch, and the others get tensors like those it returned.

#: Values of arguments that compare equal only if they mean the same.
_VALUES = frozenset(
    {type(None), int, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
#: Values that may be equal to one of another type, such as 1.0 to 1.
_NUMBERS = frozenset({bool, float, complex})
#: Operations whose results follow from more than their arguments' shapes, or that change shapes.
_OTHERS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor with memory of its own, or a view of an argument.

    Attributes:
        of: position of the argument that it is a view of, among all tensors; ``None``: of none.
        attributes: what torch has set on the first one.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument that is returned, as by operations that write to it.

    Attributes:
        at: its position among all tensors.
    """

    at: int


_Part = _Made | _Given


@dataclass(eq=False, slots=True)
class ReplayedCall:
    """A call that was made before, or is like one.

    Attributes:
        parts: what it returns.
        several: makes a list or a tuple of the parts; ``None`` if there is only one; a function
            that returns ``None`` for operations without a result.
        facts: what a caller has found out about all calls like this one.
    """

    parts: tuple[_Part, ...]
    several: Callable[[list[torch.Tensor]], Any] | None
    facts: Any = None


class ReplayMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes fake tensors, and remembers which.

    A call is like an earlier one if operation, values and the shapes, strides, dtypes and keys of
    all tensors are equal. What an operation returns is made again only if it follows from those: a
    new tensor, an argument that is written to, or a view of the only tensor among the arguments.
    Everything else goes to torch every time: results that depend on values, tensors whose values
    torch knows, tensors of other classes or modes, and operations that are not torch's own.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._calls: dict[_Key, ReplayedCall | None] = {}
        self._mark_memory: Callable[[torch.Tensor], None] = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if self._allow_unsafe_data_ptr_access
            else torch._C._set_throw_on_mutable_data_ptr
        )

    def again(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ReplayedCall] | None:
        """Return the result of an operation, and the call that it is like.

        Returns:
            ``None`` if there was none, so that torch has to run the operation.
        """
        tensors: list[torch.Tensor] = []
        key = self._key(func, args, kwargs, tensors)
        call = None if key is None else self._calls.get(key)
        return None if call is None else (self._result(call, tensors), call)

    def _dispatch(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation."""
        if (device := device_of(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        key = self._key(func, args, kwargs, tensors)
        call = None if key is None else self._calls.get(key, _NEW)
        if call is not None and call is not _NEW:
            return self._result(call, tensors)
        out = FakeTensorMode.__torch_dispatch__(self, func, types, args, kwargs)
        if key is not None and call is _NEW and out is not NotImplemented:
            learned = self._learn(func, args, kwargs, tensors, out)
            # Some operations change their arguments.
            changed = self._key(func, args, kwargs, []) != key
            self._calls[key] = None if changed else learned
        return out

    # -- keys -------------------------------------------------------------------------------------

    def _key(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
    ) -> _Key | None:
        """Return what calls that are alike have in common, and add their tensors to a list.

        Returns:
            ``None`` if no other call is like this one.
        """
        if self.shape_env is not None:  # shapes may be symbols
            return None
        key: list[Any] = [
            func,
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._describe(args, key, tensors):
            return None
        if kwargs:
            key.append(tuple(kwargs))
            if not self._describe(tuple(kwargs.values()), key, tensors):
                return None
        return tuple(key)

    def _describe(self, values: Any, key: list[Any], tensors: list[torch.Tensor]) -> bool:
        """Add what tells calls apart to a key, and return whether nothing else does."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None:
                    return False
                tensors.append(value)
                try:
                    key += (
                        value.dtype,
                        value.shape,
                        value.stride(),
                        value.storage_offset(),
                        value.requires_grad,
                        value.fake_device,
                        torch._C._dispatch_keys(value).raw_repr(),
                    )
                except RuntimeError:  # it is sparse, or nested, and has no strides
                    return False
            elif kind in _VALUES:
                key.append(value)
            elif kind in _NUMBERS:
                key.append(kind)
                key.append(value)
            elif kind is list or kind is tuple:
                key.append((kind, len(value)))
                if not self._describe(value, key, tensors):
                    return False
            else:
                return False
        return True

    # -- the first call of its kind ----------------------------------------------------------------

    def _learn(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        out: Any,
    ) -> ReplayedCall | None:
        """Return how to make a result like ``out`` again; ``None`` if that is not known."""
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
            return None
        if any(tag in func.tags for tag in _OTHERS):
            return None
        if out is None:
            return ReplayedCall((), _nothing)
        if isinstance(out, list | tuple):  # decompositions return tuples with names
            results = list(out)
            several: type[list[Any] | tuple[Any, ...]] | None = (
                list if isinstance(out, list) else tuple
            )
        else:
            results, several = [out], None
        storages = Counter(_memory_of(each) for each in results if isinstance(each, torch.Tensor))
        given = _Arguments(
            tensors=tensors,
            positions={id(tensor): at for at, tensor in enumerate(tensors)},
            storages={_memory_of(tensor) for tensor in tensors},
            written=_written(func, args, kwargs),
        )
        parts: list[_Part] = []
        for result in results:
            part = self._part(result, given, storages)
            if part is None:
                return None
            parts.append(part)
        return ReplayedCall(tuple(parts), several)

    def _part(self, result: Any, given: _Arguments, storages: Mapping[int, int]) -> _Part | None:
        if type(result) is not FakeTensor or result.constant is not None:
            return None
        at = given.positions.get(id(result))
        if at is not None:
            # If it is several of the arguments, it is unknown which of them is meant.
            is_one = sum(tensor is result for tensor in given.tensors) == 1
            return _Given(at) if is_one and id(result) in given.written else None
        if result.layout is not torch.strided:
            return None
        storage = _memory_of(result)
        is_view = storage in given.storages
        if (len(given.tensors) if is_view else storages[storage]) != 1:
            return None
        made = _Made(
            shape=tuple(result.shape),
            stride=result.stride(),
            offset=int(result.storage_offset()),
            dtype=result.dtype,
            device=result.fake_device,
            of=0 if is_view else None,
            attributes=dict(vars(result)),
        )
        return made if _alike(self._make(made, given.tensors), result, made.of) else None

    # -- later ones --------------------------------------------------------------------------------

    def _result(self, call: ReplayedCall, tensors: list[torch.Tensor]) -> Any:
        several = call.several
        if several is None:
            part = call.parts[0]
            return tensors[part.at] if type(part) is _Given else self._make(part, tensors)
        return several(
            [
                tensors[part.at] if type(part) is _Given else self._make(part, tensors)
                for part in call.parts
            ]
        )

    def _make(self, made: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            if made.of is None:
                plain = torch.empty_strided(
                    made.shape, made.stride, dtype=made.dtype, device="meta"
                )
            else:
                plain = torch.empty(0, dtype=made.dtype, device="meta")
                storage: Any = tensors[made.of].untyped_storage()
                plain.set_(storage, made.offset, made.shape, made.stride)
            result: torch.Tensor = torch.Tensor._make_subclass(
                FakeTensor,
                plain,
                False,
                dispatch_device=True,
                device_for_backend_keys=made.device,
            )
        self._mark_memory(result)
        vars(result).update(made.attributes)
        return result


_NEW: Any = object()


def _nothing(results: list[torch.Tensor]) -> None:
    del results


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The tensors among the arguments of a call.

    Attributes:
        tensors: in order.
        positions: of the tensors, by their ids.
        storages: what tells their storages apart.
        written: ids of those that the operation writes to, by its schema.
    """

    tensors: list[torch.Tensor]
    positions: Mapping[int, int]
    storages: Set[int]
    written: Set[int]


def _memory_of(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor apart: its object in Python may be gone at once."""
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    written = set()
    for at, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            value = args[at] if at < len(args) and not each.kwarg_only else kwargs.get(each.name)
            written |= {id(one) for one in (value if isinstance(value, list | tuple) else [value])}
    return written


def _alike(one: torch.Tensor, other: torch.Tensor, of: int | None) -> bool:
    """Whether a tensor that was made again is like torch's."""
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and one.dtype == other.dtype
        and one.requires_grad is other.requires_grad is False
        and torch._C._dispatch_key_set(one) == torch._C._dispatch_key_set(other)
        and (of is not None or one.untyped_storage().nbytes() == other.untyped_storage().nbytes())
        and vars(one) == vars(other)
    )


# Assigned here, since torch wraps what stands in the class, which costs as much as an operation.
ReplayMode.__torch_dispatch__ = ReplayMode._dispatch  # type: ignore[method-assign, assignment]
