"""Give the tensors of a model that are on the meta device memory, module by module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from shardwise._torch import autograd, fsdp
from shardwise.sharding.attributes import carried
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.state import FSDPState, states_of


@dataclass(frozen=True)
class MetaTensors:
    """The parameters and buffers of one module that are on the meta device."""

    module: nn.Module
    fqn: str
    sharded: dict[str, ShardedParam]
    plain: list[str]
    buffers: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not (self.sharded or self.plain or self.buffers)

    def name_of(self, name: str) -> str:
        """The name in the model of one of the module's own tensors."""
        return f"{self.fqn}.{name}" if self.fqn else name


def allocate(model: nn.Module, names: Collection[str]) -> bool:
    """Give tensors on the meta device memory that the caller fills at once.

    A rank allocates its shards and no more.

    Args:
        model: the model, after all ``fully_shard`` calls, or not sharded.
        names: names of parameters and buffers. Those that have memory are left as they are.

    Returns:
        Whether anything was allocated.
    """
    states = list(states_of(model))
    device = compute_device(states)
    made: dict[torch.Tensor, torch.Tensor] = {}  # tensors that are not sharded may be tied, too
    forms: dict[ShardedParam, None] = {}
    wanted = frozenset(names)
    for visit in meta_tensors(model, states):
        forms.update(
            {form: None for name, form in visit.sharded.items() if visit.name_of(name) in wanted}
        )
        replace_plain(
            visit.module,
            [name for name in visit.plain if visit.name_of(name) in wanted],
            [name for name in visit.buffers if visit.name_of(name) in wanted],
            made,
            device,
        )
    for form in forms:
        form.allocate(device)
    refresh(states)
    return bool(forms or made)


class MetaMemory:
    """Memory for tensors of a model on the meta device, one by one, as they get their values.

    Args:
        model: the model, after all ``fully_shard`` calls, or not sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._states = list(states_of(model))
        self._device = compute_device(self._states)
        self._sharded: dict[tuple[nn.Module, str], ShardedParam] = {}
        self._plain: dict[torch.Tensor, list[tuple[nn.Module, list[str], list[str]]]] = {}
        for visit in meta_tensors(model, self._states):
            module = visit.module
            self._sharded.update({(module, name): form for name, form in visit.sharded.items()})
            for name in visit.plain:
                owner = fsdp.ParamOwner(module, name)
                self._plain.setdefault(owner.registered, []).append((module, [name], []))
            for name in visit.buffers:
                held = cast(torch.Tensor, fsdp.buffers_of(module)[name])
                self._plain.setdefault(held, []).append((module, [], [name]))

    def give(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Give a tensor memory, which the caller fills at once, under all its names.

        Args:
            module: a module that has it.
            name: its name there.
            tensor: the tensor.
        """
        form = self._sharded.get((module, name))
        if form is not None and form.local.is_meta:
            form.allocate(self._device)
        made: dict[torch.Tensor, torch.Tensor] = {}
        for owner, params, buffers in self._plain.pop(tensor, ()):
            replace_plain(owner, params, buffers, made, self._device)

    def end(self) -> None:
        """Let all groups adopt the shards that were made."""
        refresh(self._states)


def compute_device(states: list[FSDPState]) -> torch.device:
    """The device on which the shards compute, or torch's default without any."""
    return states[0].device if states else torch.get_default_device()


def refresh(states: list[FSDPState]) -> None:
    """Let all groups adopt the shards that were made."""
    for state in states:
        for group in state.groups:
            group.refresh()


def meta_tensors(model: nn.Module, states: list[FSDPState]) -> Iterator[MetaTensors]:
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

    def visit(module: nn.Module) -> Iterator[MetaTensors]:
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
        yield MetaTensors(module, names[module], sharded, plain, buffers)

    yield from visit(model)


def replace_plain(
    module: nn.Module,
    params: Iterable[str],
    names: Iterable[str],
    made: dict[torch.Tensor, torch.Tensor],
    device: torch.device,
    fill: Callable[[torch.Tensor], None] = lambda tensor: None,
) -> None:
    """Replace tensors that are not sharded. Those that were tied on the meta device stay tied."""

    def new(old: torch.Tensor) -> torch.Tensor:
        if old not in made:
            made[old] = torch.empty_like(old, device=device)
            if isinstance(old, nn.Parameter):
                made[old] = nn.Parameter(made[old], requires_grad=old.requires_grad)
                autograd.share_hooks(old, made[old])
            vars(made[old]).update(carried(old))
            fill(made[old])
        return made[old]

    for name in params:
        owner = fsdp.ParamOwner(module, name)
        owner.register(cast(nn.Parameter, new(owner.registered)))
    buffers = fsdp.buffers_of(module)
    for name in names:
        old = buffers[name]
        assert old is not None
        buffers[name] = new(old)
