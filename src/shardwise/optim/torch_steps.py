"""Groups of torch's own FSDP2 whose parameters step in backward.

Torch calls the hooks of ``register_post_accumulate_grad_hook`` when a gradient has been reduced. A
group steps once the next one is reduced, or backward ends: by then all of its gradients are there.
If backward has yet to reach another use of the group, or may have, it steps at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise._torch import autograd, fsdp
from shardwise.sharding.stepping import Stepper
from shardwise.sharding.tree import every_tensor_in
from shardwise.transport.base import Label


class TorchParam:
    """A sharded parameter of torch's FSDP2.

    Attributes:
        fqn: its name.
        steps_in_backward: how many it has made.
    """

    def __init__(self, group: fsdp.TorchGroup, number: int) -> None:
        self.fqn = group.params[number][0]
        self.steps_in_backward = 0
        self._group = group
        self._number = number

    @property
    def form(self) -> TorchParam:
        """Itself, as the sharded parameters of our runtime have one."""
        return self

    @property
    def parameter(self) -> torch.Tensor:
        """The sharded parameter that the group has now."""
        return self._group.held(self._number)


class TorchStepGroup:
    """A group of torch's FSDP2 that steps in backward.

    Args:
        group: the group.
        backward: what the groups of a model share.

    Attributes:
        fqn: name of its modules.
        label: of the group, for messages.
        params: its parameters.
    """

    def __init__(self, group: fsdp.TorchGroup, backward: _Backward) -> None:
        self.fqn = group.name
        self.label = Label.of_group(group.name, group.shapes)
        self.params = [TorchParam(group, number) for number in range(len(group.params))]
        self._group = group
        self._backward = backward
        self._stepper: Stepper | None = None
        self._handles: list[RemovableHandle] = []
        self._uses: set[object] = set()  # that backward has not reached
        # Forwards since the last step, with gradients and without: reentrant checkpointing runs
        # those of the second kind again, and no hook says when.
        self._forwards = self._unrecorded = 0

    @property
    def stepper(self) -> Stepper | None:
        """What updates the shards during backward, if anything does."""
        return self._stepper

    @stepper.setter
    def stepper(self, stepper: Stepper | None) -> None:
        self._stepper = stepper
        while self._handles:
            self._handles.pop().remove()
        if stepper is None:
            return
        for module in self._group.modules:
            self._handles.append(module.register_forward_pre_hook(self._before_forward))
            self._handles.append(module.register_forward_hook(self._after_forward))
        # What is unfrozen later steps with what is left, after backward.
        for param in (each for each in self.params if each.parameter.requires_grad):
            hook = functools.partial(self._reduced, param)
            handle = param.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._stepper is not None and not autograd.in_backward():
            self._backward.drop(self._stepper)
            if self._backward.first is self:  # it looks at the parameters of all groups
                self._stepper.check()
            self._stepper.check_whole()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if autograd.in_backward():  # activation checkpointing runs it again
            return
        self._forwards += 1
        self._unrecorded += not torch.is_grad_enabled()
        use = object()
        for tensor in every_tensor_in(output):
            if tensor.requires_grad:
                self._uses.add(use)
                tensor.register_hook(functools.partial(self._begin, use, self._steps))  # type: ignore[no-untyped-call]

    @property
    def _steps(self) -> list[int]:
        return [param.steps_in_backward for param in self.params]

    def _begin(self, use: object, steps: list[int], grad: torch.Tensor) -> None:
        if self._stepper is None:
            return
        self._uses.discard(use)
        if steps != self._steps:
            raise RuntimeError(
                f"{self.label.name} on rank {dist.get_rank()}: found a backward of a forward from "
                "before the last step, expected one backward after each forward: its parameters "
                "are others now. Run forward again, or step after backward"
            )
        self._backward.begin(self._stepper)

    def _reduced(self, param: TorchParam, _: torch.Tensor) -> None:
        if self._stepper is not None and self._group.completes:
            self._backward.add(self)

    @property
    def runs_again(self) -> bool:
        """Whether backward has yet to reach a use: torch reduces what was accumulated before."""
        return bool(self._uses) or (self._unrecorded > 0 and self._forwards > 1)

    def step(self) -> None:
        """Step with all gradients; a backward through another use since is refused."""
        self._uses.clear()
        self._forwards = self._unrecorded = 0
        if self._stepper is not None:
            self._stepper.step(self.label.name, self.params)


class _Backward:
    """The backward that runs: the group whose gradients are being reduced.

    Attributes:
        first: the first group of the model, the root if that is one.
    """

    def __init__(self) -> None:
        self.first: TorchStepGroup | None = None
        self._group: TorchStepGroup | None = None
        self._left: dict[TorchStepGroup, None] = {}  # to step at the end
        self._runs = False

    def begin(self, stepper: Stepper) -> None:
        """Note that backward has reached a group."""
        if not self._runs:
            self._runs = True
            # Modules without a common root reduce what is left in calls of their own, which torch
            # queues when backward reaches them: come after all of these.
            queue = autograd.queue_after_backward
            queue(functools.partial(queue, functools.partial(self._end, stepper)))

    def add(self, group: TorchStepGroup) -> None:
        """Note that a gradient of a group is reduced; step with the group before it.

        If backward has reached no group whose end is seen, as where reentrant checkpointing has all
        of them, the optimizer's own step is the one that makes it.
        """
        if not self._runs:
            return
        if group is not self._group:
            self._step()
        if group.runs_again:
            self._left[group] = None
        elif group not in self._left:
            self._group = group

    def drop(self, stepper: Stepper) -> None:
        """Forget a backward that an exception has ended."""
        if self._runs:
            stepper.interrupt()
        self._group, self._runs = None, False
        self._left.clear()

    def _step(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.step()

    def _end(self, stepper: Stepper) -> None:
        self._step()
        while self._left:
            self._left.popitem()[0].step()
        self._runs = False
        stepper.finish()


def torch_step_groups(model: nn.Module) -> Sequence[TorchStepGroup]:
    """Return the groups of torch's own FSDP2 in a model, to step in backward."""
    backward = _Backward()
    groups = [TorchStepGroup(group, backward) for group in fsdp.torch_groups(model)]
    backward.first = groups[0] if groups else None
    return groups
