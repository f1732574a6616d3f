"""Materialize a sharded model that was built on the meta device, module by module.

New memory is filled with one value: a NaN with a payload that no computation produces, or integers
of one byte pattern. Any write to a tensor removes this mark. A tensor that still has it when its
model runs would be trained on as it is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardwise._torch import dtensor, fsdp
from shardwise.base import devices
from shardwise.base.arguments import check_arguments
from shardwise.base.units import listed
from shardwise.frontends.summon import full_value
from shardwise.sharding.allocate import (
    MetaTensors,
    compute_device,
    meta_tensors,
    refresh,
    replace_plain,
)
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.state import states_of
from shardwise.transport.peers import Peers


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Allocate and initialize a model on the meta device, one module at a time.

    No rank ever holds more than its shards and the full parameters of one module. Modules are
    visited children first, as by ``model.apply(init)``, and initialized before they are sharded. So
    with the same random seed on every rank, the values are those of the unsharded model after
    ``model.to_empty(...)`` and ``model.apply(init)``.

    Args:
        model: the model, after all ``fully_shard`` calls. Tensors that are not on the meta device
            keep their values.
        device: the device for initialization, for buffers, and for parameters that are not sharded.
            The default is the device on which the shards compute.
        init: called with every module to set its parameters and buffers. The default is the
            model's own initialization of every module that has tensors on the meta device: that of
            the ``transformers`` model that the module belongs to, or else ``reset_parameters()``.
            What it leaves uninitialized must be loaded before the first forward, which raises
            otherwise and names it. An outer module may set the parameters of inner ones: it gets
            them in full.

    Returns:
        ``model``.

    Raises:
        ValueError: ``init`` is not given, and a module with tensors on the meta device has no
            initialization of its own. Nothing was changed.
    """
    check_arguments(materialize, locals())
    states = list(states_of(model))
    device = torch.device(compute_device(states) if device is None else device)
    visits = list(meta_tensors(model, states))
    if init is None:
        init = _OwnInitialization(model, visits)
    visits_left = Counter(form for visit in visits for form in visit.sharded.values())
    full: dict[ShardedParam, nn.Parameter] = {}  # a tied parameter stays until its last module
    plain: dict[torch.Tensor, torch.Tensor] = {}
    initializer = _Initializer(init, device)
    marked: list[str] = []
    with torch.no_grad():
        for visit in visits:
            for name, form in visit.sharded.items():
                if form not in full:
                    full[form] = form.empty_full(device)
                    mark(full[form])
                fsdp.ParamOwner(visit.module, name).register(full[form])
            replace_plain(visit.module, visit.plain, visit.buffers, plain, device, mark)
            initializer.run(visit.module)
            for name, form in visit.sharded.items():
                visits_left[form] -= 1
                fsdp.ParamOwner(visit.module, name).register(form.parameter)
                if visits_left[form] == 0:
                    made = full.pop(form)
                    if is_marked(made):
                        marked.append(visit.name_of(name))
                    form.materialize(made)
                    initializer.forms[id(form.parameter)] = form
        for visit in visits:
            names = (*visit.plain, *visit.buffers)
            marked += [visit.name_of(n) for n in names if is_marked(getattr(visit.module, n))]
    refresh(states)
    if marked:
        InitializationCheck(model, marked)
    return model


class _WritesShardError(Exception):
    """An initialization is about to use a parameter that is sharded by now."""

    def __init__(self, form: ShardedParam) -> None:
        super().__init__(form.fqn)
        self.form = form


class _NoticeShards(TorchFunctionMode):
    """Stop an initialization before it uses one of the parameters that are sharded by now."""

    def __init__(self, forms: Mapping[int, ShardedParam]) -> None:
        super().__init__()
        self._forms = forms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_data = getattr(func, "__self__", None) in _DATA
        if getattr(func, "__name__", "") not in _METADATA or is_data:
            for value in (*args, *kwargs.values()):
                form = self._forms.get(id(value)) if isinstance(value, DTensor) else None
                if form is not None:
                    raise _WritesShardError(form)
        return func(*args, **kwargs)


# What asks for anything but elements; all attributes are asked for by a "__get__".
_METADATA = frozenset(
    {"__get__", "__hash__", "__len__", "dim", "is_complex", "is_floating_point", "ndimension"}
    | {"nelement", "numel", "requires_grad_", "size", "stride"}
)


_DATA = (torch.Tensor.data, torch.Tensor.T, torch.Tensor.mT)  # attributes that have elements


class _Initializer:
    """Calls the initialization of modules.

    That of an outer module may set parameters of an inner one, which are sharded by then, as in
    GPT-2 and CLIP. It gets them in full: else each rank would draw the numbers of its rows alone.

    Args:
        init: called with a module.
        device: where full parameters are made.

    Attributes:
        forms: the parameters that are sharded by now, by the id of the sharded parameter.
    """

    def __init__(self, init: Callable[[nn.Module], object], device: torch.device) -> None:
        self._init = init
        self._device = device
        self.forms: dict[int, ShardedParam] = {}

    def run(self, module: nn.Module) -> None:
        """Initialize one module, all of whose own parameters are full."""
        if not (self.forms and next(module.children(), None) is not None):
            self._init(module)
            return
        used = dict.fromkeys([devices.CPU, self._device])
        states = {device: devices.random_state(device) for device in used}
        full: dict[ShardedParam, nn.Parameter] = {}
        while True:
            try:
                with _NoticeShards(self.forms):
                    self._init(module)
                break
            except _WritesShardError as error:
                form = error.form
            full[form] = self._gather(form)
            for device, state in states.items():  # it begins again, and draws the same numbers
                if state is not None:
                    devices.set_random_state(device, state)
        for form, made in full.items():
            form.materialize(made)
            self.forms[id(form.parameter)] = form

    def _gather(self, form: ShardedParam) -> nn.Parameter:
        del self.forms[id(form.parameter)]
        full = form.empty_full(self._device)
        dtensor.plain(full).copy_(full_value(form, form.parameter))
        for owner in form.owners:
            owner.register(full)
        return full


class _OwnInitialization:
    """The initialization that a model brings along.

    A module of a ``transformers`` model is initialized by the innermost such model that it belongs
    to, since nested models have rules of their own. Any other module is by ``reset_parameters()``.

    Args:
        model: the model.
        visits: its modules, children first.

    Raises:
        ValueError: a module with tensors on the meta device has no initialization.
    """

    def __init__(self, model: nn.Module, visits: list[MetaTensors]) -> None:
        # What is not imported has made no model.
        transformers = sys.modules.get("transformers.modeling_utils")
        self._owner: dict[nn.Module, Any] = {}
        if transformers is not None:
            for part in model.modules():
                if isinstance(part, transformers.PreTrainedModel):
                    self._owner.update(dict.fromkeys(part.modules(), part))
        self._own = {visit.module for visit in visits if not visit.is_empty}
        self._around = set(self._own)  # they may set the parameters of modules in them
        for visit in visits:
            if any(child in self._around for child in visit.module.children()):
                self._around.add(visit.module)
            if visit.module in self._own - self._owner.keys():
                _check_resettable(visit)

    def __call__(self, module: nn.Module) -> None:
        if module in self._owner:
            if module in self._around:
                self._owner[module]._init_weights(module)
        elif module in self._own:
            module.reset_parameters()  # type: ignore[operator]


def _check_resettable(visit: MetaTensors) -> None:
    if not hasattr(visit.module, "reset_parameters"):
        names = [*visit.sharded, *visit.plain, *visit.buffers]
        raise ValueError(
            f"{visit.fqn or 'the root'} ({type(visit.module).__name__}) has "
            f"{', '.join(names)} on the meta device and no reset_parameters(); pass init=, a "
            "function that initializes a module"
        )


# -- tensors that were not initialized -------------------------------------------------------------

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
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= model.named_buffers(remove_duplicate=False)
        left = [name for name in self._names if name in tensors and is_marked(tensors[name])]
        left = _on_any_rank(self._names, left, tensors)
        if left:
            raise RuntimeError(
                f"{type(model).__name__}: {listed(left, 5)}: memory that was neither "
                "initialized nor loaded, found before forward; expected init= of materialize() to "
                "initialize every parameter and buffer, or load_weights() to load them. Call "
                "materialize(model) without init= to initialize as the model itself does"
            )
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> InitializationCheck:
        return self  # the copy of a model has its own memory, and the same check


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
