"""What steps with one group of parameters after the other, during a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from shardwise._torch import autograd
from shardwise.base.errors import StepInterruptedError
from shardwise.base.optim_names import parameters_in_order
from shardwise.optim.clipping import Clipping
from shardwise.optim.offloaded.optimizer import OffloadedOptimizer
from shardwise.optim.partial_steps import PartialSteps
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.param import ShardedParam

_MOST_NAMES = 4  # of groups, in a message


class GroupSteps:
    """Steps of an optimizer, group by group; a :class:`~shardwise.sharding.stepping.Stepper`.

    Args:
        inner: the optimizer of all parameters.
        groups: the groups that step in backward.
        clipping: how gradients are clipped.
        ended: what to call when a step is over.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: Sequence[ParamGroup],
        clipping: Clipping,
        ended: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._groups = groups
        self._clipping = clipping
        self._ended = ended
        # The sharded parameters, and the objects that the optimizer has.
        self._forms = {
            param.form: param.form.parameter for group in groups for param in group.params
        }
        # The step that has begun: the groups that have stepped, and their parameters.
        self._names: dict[str, None] = {}
        self._stepped: set[torch.Tensor] = set()
        self._parts: PartialSteps | None = None
        self._is_interrupted = False
        # Parameters that would have a gradient, had it not been dropped, and those of them whose
        # gradient the program has filled with zeros since.
        self._dropped: set[torch.Tensor] = set()
        self._zeroed: set[torch.Tensor] = set()

    def zero_grad(self, set_to_none: bool) -> None:
        """Note that the program clears the gradients, which have been dropped already.

        Args:
            set_to_none: whether it drops them, or fills them with zeros, with which optimizers
                step, too.
        """
        if set_to_none:
            self._dropped.clear()
        self._zeroed = set(self._dropped)

    def check_whole(self) -> None:
        """Check that no step was interrupted.

        Raises:
            StepInterruptedError: an exception ended a backward in which some groups have stepped.
        """
        if self._is_interrupted or (self._names and not autograd.in_backward()):
            self._refuse_interrupted()

    def check(self) -> None:
        """Check that no step was interrupted, and that the model still has the same parameters.

        Raises:
            StepInterruptedError: an exception ended a backward in which some groups have stepped.
            RuntimeError: parameters were replaced.
        """
        self.check_whole()
        for form, parameter in self._forms.items():
            if form.parameter is not parameter:
                raise RuntimeError(
                    f"{form.fqn} on rank {dist.get_rank()}: the parameter was replaced (by "
                    "load_state_dict(assign=True), to(), to_empty() or materialize()) after "
                    "in_backward made its optimizer, which has the old one. Call in_backward after "
                    "that"
                )

    def step(self, name: str, forms: Sequence[ShardedParam]) -> None:
        """Step with the gradients of a group, and drop them.

        Raises:
            RuntimeError: a parameter has stepped in this backward before.
            StepInterruptedError: an exception has interrupted the last step.
            PeerLostError: a peer died or stalled, while norms were added up.
        """
        if self._is_interrupted:
            self._refuse_interrupted()
        for form in forms:
            if form.parameter in self._stepped and form.parameter.grad is not None:
                raise RuntimeError(
                    f"{form.fqn} on rank {dist.get_rank()}: got another gradient in the backward "
                    "in which it has stepped already, as by a backward inside of that backward. "
                    "Step after backward"
                )
        stepped = self._step(name, [form.parameter for form in forms])
        for form in forms:
            if form.parameter in stepped:
                form.steps_in_backward += 1

    def step_rest(self) -> None:
        """Step with all gradients that there are, outside of backward.

        Raises:
            PeerLostError: a peer died or stalled, while norms were added up.
        """
        for group in self._groups:
            forms = [param.form for param in group.params]
            if any(form.parameter.grad is not None for form in forms):
                self.step(group.label.name, forms)
        self._step("the parameters outside of groups", parameters_in_order(self._inner))
        self.finish()

    def finish(self) -> None:
        """End the step: keep the hyperparameters that it has changed.

        Raises:
            PeerLostError: a peer died or stalled, while norms were added up.
        """
        self._step_zeroed()
        if not self._names:
            return
        if self._parts is not None:
            self._parts.finish()
        if isinstance(self._inner, OffloadedOptimizer):
            self._inner.settle()
        self._forget_step()
        self._ended()

    def interrupt(self) -> None:
        """Note that an exception has ended the backward, perhaps before any group has stepped."""
        if self._names:
            self._is_interrupted = True
        else:
            self._clipping.drop()

    def forget(self) -> None:
        """Go on as if no step was interrupted."""
        self._is_interrupted = False
        self._clipping.drop()
        self._forget_step()

    def _step_zeroed(self) -> None:
        """Step with the zeros that ``zero_grad`` has left of gradients that got no others."""
        zeroed, self._zeroed = self._zeroed, set()
        for group in self._groups:
            forms = {param.form: None for param in group.params if param.form.parameter in zeroed}
            for form in forms:
                form.parameter.grad = torch.zeros_like(form.parameter)
                self._stepped.discard(form.parameter)
            if forms:
                self.step(group.label.name, list(forms))
            zeroed.difference_update(form.parameter for form in forms)

    def _step(self, name: str, params: Sequence[torch.Tensor]) -> frozenset[torch.Tensor]:
        """Step with those of ``params`` that the optimizer has, and return them."""
        if self._parts is None or not self._names:
            inner = self._inner
            step = inner.step_part if isinstance(inner, OffloadedOptimizer) else inner.step
            self._parts = PartialSteps(inner, step)
        parts = self._parts
        own = [param for param in params if param in parts]
        if all(param.grad is None for param in own):
            return frozenset()
        with autograd.no_grad():
            steps = self._clipping.clip(name, own)
            # From here on, an exception leaves this group in an unknown state.
            self._names[name] = None
            self._stepped.update(own)
            if steps:
                parts.run(own)
            for param in own:
                if param.grad is not None:
                    self._dropped.add(param)
                    self._zeroed.discard(param)
                param.grad = None
        return frozenset(own)

    def _forget_step(self) -> None:
        self._names, self._stepped, self._parts = {}, set(), None

    def _refuse_interrupted(self) -> NoReturn:
        done = list(self._names)[-_MOST_NAMES:]
        more = len(self._names) - len(done)
        rest = f" and {more} before them" if more else ""
        raise StepInterruptedError(
            f"rank {dist.get_rank()}: an exception ended a backward in which {len(self._names)} of "
            f"{len(self._groups)} groups had stepped: {', '.join(map(repr, done))}{rest} (the last "
            "one perhaps in part). They are a step ahead of the others. Load the last checkpoint "
            "into model and optimizer, or call accept_interrupted_step() on the optimizer, on "
            "every rank, to go on with parameters and states as they are"
        )
