"""Materializing a sharded model that was built on the meta device, module by module."""

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
    """What of one module is on the meta device."""

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
    """Give a model on the meta device its memory and initial values, one module at a time.

    No rank ever holds more than its shards and the parameters of one module. Modules are visited
    children first, as ``model.apply(init)`` visits them, and each is initialized whole before it
    is cut: with the same random seed on every rank the values are those of the unsharded model
    after ``model.to_empty(...)`` and ``model.apply(init)``.

    Args:
        model: the model, after all ``fully_shard`` calls. What is not on the meta device keeps its
            values.
        device: where whole parameters are initialized, and where parameters that are not sharded,
            and buffers, go; by default where the shards compute.
        init: called with every module to set its parameters and buffers. By default
            ``module.reset_parameters()`` of every module that has parameters or buffers on the
            meta device.

    Returns:
        ``model``.

    Raises:
        ValueError: a module has tensors on the meta device, no ``reset_parameters``, and ``init``
            is not given; nothing has been changed then.
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
    whole: dict[ShardedParam, nn.Parameter] = {}  # a tied one stays whole until its last module
    with torch.no_grad():
        for visit in visits:
            _make_full(visit, whole, torch.device(device))
            if init is not None:
                init(visit.module)
            elif not visit.is_empty:
                visit.module.reset_parameters()  # type: ignore[operator]
            for name, form in visit.sharded.items():
                visits_left[form] -= 1
                fsdp.register_parameter(visit.module, name, form.parameter)
                if visits_left[form] == 0:
                    form.materialize(whole.pop(form))
    for state in states:
        for group in state.groups:
            group.refresh()
    return model


def _visits(model: nn.Module, states: list[FSDPState]) -> Iterator[_Visit]:
    """Every module, children first, each once."""
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


def _make_full(
    visit: _Visit, whole: dict[ShardedParam, nn.Parameter], device: torch.device
) -> None:
    """Put whole, uninitialized tensors in the place of those on the meta device."""
    module = visit.module
    for name, form in visit.sharded.items():
        if form not in whole:
            whole[form] = form.empty_full(device)
        fsdp.register_parameter(module, name, whole[form])
    for name in visit.plain:
        old = fsdp.parameter_of(module, name)
        new = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
        fsdp.register_parameter(module, name, new)
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
