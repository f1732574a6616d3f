"""Parameters that a model gets after ``fully_shard``: nobody averages their gradients.

Modules keep the names of the parameters that they had when they were sharded. A model is searched
for others only after a parameter or a module was registered anywhere, of which torch tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise._torch import autograd, fsdp
from shardwise.base.errors import MisuseError

_KNOWN = "_shardwise_parameters"


class _Registrations:
    """Counts parameters and modules that are registered in any module."""

    def __init__(self) -> None:
        self.count = 0
        self._is_registered = False

    def watch(self) -> None:
        """Count from now on."""
        if not self._is_registered:
            self._is_registered = True
            register_module_parameter_registration_hook(self._note_parameter)
            register_module_module_registration_hook(self._note_module)

    def _note_parameter(self, module: nn.Module, name: str, _: object) -> None:
        if name not in vars(module).get(_KNOWN, ()):  # some modules get full parameters this way
            self.count += 1

    def _note_module(self, module: nn.Module, name: str, _: object) -> None:
        self.count += 1


_registrations = _Registrations()


def note_parameters(modules: Iterable[nn.Module]) -> None:
    """Note that the parameters that ``modules`` have now are sharded, or ignored on purpose."""
    _registrations.watch()
    for module in modules:
        vars(module)[_KNOWN] = frozenset(name for name, _ in _own_parameters(module))


class Additions:
    """What was added to the modules of a root."""

    def __init__(self) -> None:
        self._searched_at = -1
        self._frozen: list[nn.Parameter] = []
        self._containers: list[tuple[nn.ModuleList | nn.Sequential, int]] = []

    def check(self, top: nn.Module) -> None:
        """Check that no parameter was added that the ranks would train apart.

        Args:
            top: the outermost module.

        Raises:
            MisuseError: a parameter that is neither a ``DTensor`` nor frozen was added, and has no
                hook on its gradient.
        """
        if (
            self._searched_at == _registrations.count
            and not any(param.requires_grad for param in self._frozen)
            # Of a module that is inserted between others, torch does not tell.
            and all(len(each) == length for each, length in self._containers)
        ):
            return
        added = list(_added_to(top, ""))
        trained = [(name, module, p) for name, module, p in added if p.requires_grad]
        if trained:
            raise _apart(trained)
        self._searched_at = _registrations.count
        self._frozen = [param for _, _, param in added]
        self._containers = [
            (each, len(each))
            for each in top.modules()
            if isinstance(each, nn.ModuleList | nn.Sequential)
        ]


_Added = tuple[str, nn.Module, nn.Parameter]


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


def _added_to(module: nn.Module, prefix: str) -> Iterator[_Added]:
    """Every added parameter whose gradient nobody averages, with its name and its module."""
    classes = {each.__name__ for each in type(module).__mro__}
    if "DistributedDataParallel" in classes or fsdp.is_replicated(module):
        return
    known = vars(module).get(_KNOWN, ())
    for name, param in _own_parameters(module):
        hooked = autograd.has_post_accumulate_hooks(param) or autograd.grad_hooks(param)
        if not (name in known or isinstance(param, DTensor) or hooked):
            yield prefix + name, module, param
    for name, child in fsdp.children_of(module):
        yield from _added_to(child, f"{prefix}{name}.")


def _apart(added: list[_Added]) -> MisuseError:
    name, module, param = added[0]
    path = f'model.get_submodule("{name.rpartition(".")[0]}")'
    more = f", and {len(added) - 1} more" if len(added) > 1 else ""
    if _KNOWN in vars(module):
        fix = "Register it before fully_shard, or in a module of its own and shard that"
    else:
        fix = (
            f"Call fully_shard(part), where part = {path}, with the arguments of the other calls, "
            "and make the optimizer after it; or fully_shard(part, "
            "ignored_params={*part.parameters()}), to average its gradients yourself"
        )
    return MisuseError(
        f"{name} of shape {tuple(param.shape)} on rank {dist.get_rank()}{more}: found a parameter "
        f"that was added to a {type(module).__name__} after fully_shard, whose gradient no rank "
        f"would average, so that each would train values of its own; expected it to be sharded, "
        f"ignored or frozen. {fix}. A parameter with a register_post_accumulate_grad_hook, which "
        "may average its gradient, is left alone"
    )
