"""The hooks of a sharded module: what calls ``forward.py``, and by it ``backward.py``.

Several modules that were sharded together have one state: their forward begins with the first one
that runs, and ends with the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise._torch import autograd, fsdp
from shardwise.sharding.forward import fail_forward, hand_on, post_forward, pre_forward
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.module_state import ModuleState
from shardwise.sharding.root import Root


class FSDPState(ModuleState):
    """What one ``fully_shard`` call added to its module(s), with the hooks that work on it."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[ParamGroup],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        *,
        keep_if_root: bool,
    ) -> None:
        super().__init__(modules, groups, device, mp_policy, keep_if_root=keep_if_root)
        # The exceptions that were being handled when each forward under way began, to know a new
        # one by.
        self._handled: list[BaseException | None] = []
        for module in modules:
            fsdp.set_fsdp_state(module, self)
            module.register_forward_pre_hook(self._forward_pre_hook, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._forward_hook, always_call=True)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Copy for copied modules, outside of any forward."""
        made = super().__deepcopy__(memo)
        made._handled = []
        return made

    def run_as_forward(
        self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call ``method(*args, **kwargs)`` between the hooks of a forward."""
        args, kwargs = self._forward_pre_hook(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException as error:
            self._handled.pop()
            fail_forward(self, error)
            raise
        return self._forward_hook(module, args, output)

    # -- what torch's own code asks for --------------------------------------------------------

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return self.groups

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return self.groups[0] if self.groups else None

    @property
    def _state_ctx(self) -> Root[ModuleState]:
        return self.root

    def _root_post_backward_final_callback(self) -> None:
        self.root.end_backward()

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._forward_pre_hook(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._forward_hook(module, args, output)

    # -- hooks ---------------------------------------------------------------------------------

    @autograd.disable_compile
    def _forward_pre_hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._handled.append(sys.exc_info()[1])
        if len(self.modules) > 1 and not self.modules_to_run:
            self.modules_to_run.update(self.modules)
        return pre_forward(self, args, kwargs)

    @autograd.disable_compile
    def _forward_hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        raised = sys.exc_info()[1]
        handled = self._handled.pop() if self._handled else None
        if raised is not None and raised is not handled:
            fail_forward(self, raised)
            return None
        if len(self.modules) > 1:
            its_turn = module in self.modules_to_run
            self.modules_to_run.discard(module)
            if self.modules_to_run or not its_turn:
                # The group is still needed by the others, and freed after them.
                return hand_on(self, output)
        return post_forward(self, output)
