"""What one ``fully_shard`` call adds to its modules, and how the outermost call is found.

The outermost module that runs is the root. It is found at its first forward, when all nested calls
have been made.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.sharding.form import COPIED
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.order import WayBack
from shardwise.sharding.phase import Phase
from shardwise.sharding.precision import Precision
from shardwise.sharding.root import Root

_STATE = "_shardwise_state"


class ModuleState:
    """What one ``fully_shard`` call added to its module(s).

    Attributes:
        modules: the modules that were sharded together.
        groups: their parameter groups: one, or none if they had no parameters left.
        device: where they compute.
        precision: in which dtypes.
        phase: where in a step they are.
        root: what they share with the other states of the tree.
        modules_to_run: those of several modules whose forward has still to run in this pass.
        way_back: through the forward now running.
        forward_prefetch: states to unshard when this one's forward begins.
        backward_prefetch: states to unshard when this one's backward begins; empty means the
            one that ran before it.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[ParamGroup],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        *,
        keep_if_root: bool,
    ) -> None:
        self.modules = modules
        self.groups = groups
        self.device = device
        self.phase = Phase.IDLE
        self.root: Root[ModuleState] = Root()
        self.modules_to_run: set[nn.Module] = set()
        self.way_back: WayBack | None = None
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.precision = Precision(mp_policy)
        self._keep_if_root = keep_if_root
        self._is_root: bool | None = None
        for module in modules:
            module.__dict__[_STATE] = self

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Copy for copied modules, to be given a root anew."""
        made = copy.copy(self)
        memo[id(self)] = made
        copied: frozenset[nn.Module] = memo[COPIED]
        made.modules = tuple(copy.deepcopy(m, memo) for m in self.modules if m in copied)
        made.groups = copy.deepcopy(self.groups, memo)
        made.phase = Phase.IDLE
        made.root = copy.deepcopy(self.root, memo)
        made.modules_to_run = set()
        made.way_back = None
        for name in ("forward_prefetch", "backward_prefetch"):
            wanted = [s for s in getattr(self, name) if copied.issuperset(s.modules)]
            setattr(made, name, [copy.deepcopy(state, memo) for state in wanted])
        made._is_root = None
        return made

    @property
    def is_root(self) -> bool | None:
        """Whether this is the outermost state; ``None`` before the first forward."""
        return self._is_root

    def settle_reshard_after_forward(self, value: bool) -> None:
        """Set it for all groups, also if this is or becomes the root."""
        self._keep_if_root = False
        for group in self.groups:
            group.options.reshard_after_forward = value

    def lazy_init(self) -> None:
        """Make this state the root of its tree, unless that is settled.

        Raises:
            RuntimeError: a nested state has already run as a root of its own, or several modules
                sharded together would be the root.
        """
        if self._is_root is not None:
            return
        if len(self.modules) > 1:
            names = ", ".join(type(module).__name__ for module in self.modules)
            raise RuntimeError(
                f"fully_shard([{names}]) cannot be the root: expected one module that contains all "
                "others. Apply fully_shard to the whole model last, and run its forward"
            )
        top = self.modules[0]
        for name, module in top.named_modules():
            state = state_of(module)
            if state is None or state in self.root.states:
                continue
            if state is not self and state._is_root is not None:
                raise RuntimeError(
                    f"{name} has already run forward as a root of its own, before the module that "
                    "contains it. Run the forward of the outermost fully_shard module first"
                )
            self.root.states.append(state)
        self._name_everything(top)
        for state in self.root.states:
            state._is_root = state is self
            state.root = self.root
            for group in state.groups:
                group.refresh()
                group.post_backward = functools.partial(state.root.post_backward, group)
        if self._keep_if_root:
            # Its parameters are needed again as soon as backward begins.
            for group in self.groups:
                group.options.reshard_after_forward = False

    def _name_everything(self, top: nn.Module) -> None:
        names = {module: name for name, module in top.named_modules()}
        for state in self.root.states:
            fqn = ", ".join(names[module] for module in state.modules if module in names)
            for group in state.groups:
                group.fqn = fqn
                for param in group.params:
                    owner = param.form.owners[0]
                    prefix = names.get(owner.module)
                    if prefix is not None:
                        param.form.fqn = f"{prefix}.{owner.name}" if prefix else owner.name


def state_of(module: nn.Module) -> ModuleState | None:
    """The state that ``fully_shard`` put on ``module``, if it did."""
    return module.__dict__.get(_STATE)
