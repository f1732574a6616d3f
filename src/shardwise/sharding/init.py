"""Materialize a sharded model that was built on the meta device, module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shardwise._torch import fsdp
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.state import FSDPState, states_of


@dataclass(frozen=True)
class _Visit:
    """The parameters and buffers of one module that are on the meta device."""

    module: nn.Module
    fqn: str
    sharded: dict[str, ShardedParam]
    plain: list[str]
    buffers: list[str]

    @property
    def is_empty(self) -> bool:
        return not (self.sharded or self.plain or self.buffers)


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
        init: called with every module to set its parameters and buffers. The default calls
            ``reset_parameters()`` of every module that has tensors on the meta device.

    Returns:
        ``model``.

    Raises:
        ValueError: ``init`` is not given, and a module with tensors on the meta device has no
            ``reset_parameters``. Nothing was changed.
    """
    states = list(states_of(model))
    if device is None:
        device = states[0].device if states else torch.get_default_device()
    visits = list(_visits(model, states))
    if init is None:
        _check_resettable(visits)
    visits_left: dict[ShardedParam, int] = {}
    for visit in visits:
        for form in visit.sharded.values():
            visits_left[form] = visits_left.get(form, 0) + 1
    full: dict[ShardedParam, nn.Parameter] = {}  # a tied parameter stays until its last module
    with torch.no_grad():
        for visit in visits:
            _make_full(visit, full, torch.device(device))
            if init is not None:
                init(visit.module)
            elif not visit.is_empty:
                visit.module.reset_parameters()  # type: ignore[operator]
            for name, form in visit.sharded.items():
                visits_left[form] -= 1
                fsdp.ParamOwner(visit.module, name).register(form.parameter)
                if visits_left[form] == 0:
                    form.materialize(full.pop(form))
    for state in states:
        for group in state.groups:
            group.refresh()
    return model


def _visits(model: nn.Module, states: list[FSDPState]) -> Iterator[_Visit]:
    """Visit every module once, children first."""
    owned: dict[nn.Module, dict[str, ShardedParam]] = {}
    for state in states:
        for group in state.groups:
            group.reshard()
            for param in group.params:
                if param.local.is_meta:
                    for owner in param.owners:
                        owned.setdefault(owner.module, {})[owner.name] = param.form
    names = {module: name for name, module in model.named_modules()}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[_Visit]:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            yield from visit(child)
        sharded = owned.get(module, {})
        plain = [
            name
            for name, param in module.named_parameters(recurse=False)
            if param.is_meta and name not in sharded
        ]
        buffers = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        yield _Visit(module, names[module], sharded, plain, buffers)

    yield from visit(model)


def _make_full(visit: _Visit, full: dict[ShardedParam, nn.Parameter], device: torch.device) -> None:
    """Replace tensors on the meta device by full, uninitialized ones."""
    module = visit.module
    for name, form in visit.sharded.items():
        if form not in full:
            full[form] = form.empty_full(device)
        fsdp.ParamOwner(module, name).register(full[form])
    for name in visit.plain:
        owner = fsdp.ParamOwner(module, name)
        old = owner.registered
        new = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
        owner.register(new)
    for name in visit.buffers:
        buffers = fsdp.buffers_of(module)
        old_buffer = buffers[name]
        assert old_buffer is not None
        buffers[name] = torch.empty_like(old_buffer, device=device)


def _check_resettable(visits: list[_Visit]) -> None:
    for visit in visits:
        if not visit.is_empty and not hasattr(visit.module, "reset_parameters"):
            names = [*visit.sharded, *visit.plain, *visit.buffers]
            raise ValueError(
                f"{visit.fqn or 'the root'} ({type(visit.module).__name__}) has "
                f"{', '.join(names)} on the meta device and no reset_parameters(); pass init=, a "
                "function that initializes a module"
            )
