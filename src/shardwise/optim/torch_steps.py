"""Groups of torch's own FSDP2 whose parameters step in backward.

Torch calls the hooks of ``register_post_accumulate_grad_hook`` when a gradient has been reduced. A
group steps once the next one is reduced, or backward ends: by then all of its gradients are there.
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
        for tensor in every_tensor_in(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._begin, self._steps))  # type: ignore[no-untyped-call]

    @property
    def _steps(self) -> list[int]:
        return [param.steps_in_backward for param in self.params]

    def _begin(self, steps: list[int], grad: torch.Tensor) -> None:
        if self._stepper is None:
            return
        if steps != self._steps:
            raise RuntimeError(
                f"{self.label.name} on rank {dist.get_rank()}: found a backward of a forward from "
                "before the last step, expected one backward after each forward: its parameters "
                "are others now. Run forward again, or step after backward"
            )
        self._backward.begin(self._stepper)

    def _reduced(self, param: TorchParam, _: torch.Tensor) -> None:
        if self._stepper is not None and self._group.completes:
            self._backward.add(self, param)


class _Backward:
    """The backward that runs: the group whose gradients are being reduced.

    Attributes:
        first: the first group of the model, the root if that is one.
    """

    def __init__(self) -> None:
        self.first: TorchStepGroup | None = None
        self._group: TorchStepGroup | None = None
        self._reduced: list[TorchParam] = []
        self._runs = False

    def begin(self, stepper: Stepper) -> None:
        """Note that backward has reached a group."""
        if not self._runs:
            self._runs = True
            autograd.queue_after_backward(functools.partial(self._end, stepper))

    def add(self, group: TorchStepGroup, param: TorchParam) -> None:
        """Note that the gradient of a parameter is reduced; step with the group before it."""
        if group is not self._group:
            self._step()
            self._group = group
        self._reduced.append(param)

    def drop(self, stepper: Stepper) -> None:
        """Forget a backward that an exception has ended."""
        if self._runs:
            stepper.interrupt()
        self._group, self._reduced, self._runs = None, [], False

    def _step(self) -> None:
        group, self._group = self._group, None
        reduced, self._reduced = self._reduced, []
        if group is not None and group.stepper is not None:
            group.stepper.step(group.label.name, reduced)

    def _end(self, stepper: Stepper) -> None:
        self._step()
        self._runs = False
        stepper.finish()


def torch_step_groups(model: nn.Module) -> Sequence[TorchStepGroup]:
    """Return the groups of torch's own FSDP2 in a model, to step in backward."""
    backward = _Backward()
    groups = [TorchStepGroup(group, backward) for group in fsdp.torch_groups(model)]
    backward.first = groups[0] if groups else None
    return groups
