"""What steps with one group of parameters after the other, during a backward.

One ordinary optimizer has all parameters. To step with a group, it is shown the parameters of that
group alone, so everything else about it (states, hyperparameters, state dicts) is as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise._torch import autograd
from shardwise.errors import StepInterruptedError
from shardwise.optim.clipping import Clipping
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.param import ShardedParam

_PARAMS = "params"
_PARAM_NAMES = "param_names"  # torch keeps them beside named parameters
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
        # The number of the parameter group that each parameter is in, and the hyperparameters of
        # parameter groups before and after the step.
        self._number_of: dict[torch.Tensor, int] = {}
        self._name_of: dict[torch.Tensor, str] = {}
        self._before: list[dict[str, Any]] = []
        self._after: dict[int, dict[str, Any]] = {}
        self._is_interrupted = False

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
        self._step("the parameters outside of groups", self._all_parameters())
        self.finish()

    def finish(self) -> None:
        """End the step: keep the hyperparameters that it has changed.

        Raises:
            PeerLostError: a peer died or stalled, while norms were added up.
        """
        if not self._names:
            return
        for number, values in self._after.items():
            before = self._before[number]
            self._inner.param_groups[number].update(
                {key: value for key, value in values.items() if before.get(key) is not value}
            )
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

    def _step(self, name: str, params: Sequence[torch.Tensor]) -> frozenset[torch.Tensor]:
        """Step with those of ``params`` that the optimizer has, and return them."""
        if not self._names:
            self._begin()
        own = [param for param in params if param in self._number_of]
        if all(param.grad is None for param in own):
            return frozenset()
        with autograd.no_grad():
            steps = self._clipping.clip(name, own)
            # From here on, an exception leaves this group in an unknown state.
            self._names[name] = None
            self._stepped.update(own)
            if steps:
                self._step_alone(own)
            for param in own:
                param.grad = None
        return frozenset(own)

    def _begin(self) -> None:
        groups = self._inner.param_groups
        self._number_of = {
            param: number for number, group in enumerate(groups) for param in group[_PARAMS]
        }
        self._name_of = {
            param: name
            for group in groups
            for param, name in zip(group[_PARAMS], group.get(_PARAM_NAMES) or (), strict=False)
        }
        self._before = [_hyperparameters(group) for group in groups]

    def _step_alone(self, params: Sequence[torch.Tensor]) -> None:
        """Step with ``params`` as if the optimizer had no others.

        Every group of parameters starts with the hyperparameters of before the step, so that an
        optimizer that counts steps there counts each step once.
        """
        parts: dict[int, list[torch.Tensor]] = {}
        for param in params:
            parts.setdefault(self._number_of[param], []).append(param)
        shown = {number: {_PARAMS: part, **self._before[number]} for number, part in parts.items()}
        for group in shown.values():
            if all(param in self._name_of for param in group[_PARAMS]):
                group[_PARAM_NAMES] = [self._name_of[param] for param in group[_PARAMS]]
        every = self._inner.param_groups
        self._inner.param_groups = list(shown.values())
        try:
            with autograd.outside_autocast(params[0].device):
                self._inner.step()
        finally:
            self._inner.param_groups = every
        for number, group in shown.items():
            self._after[number] = _hyperparameters(group)

    def _forget_step(self) -> None:
        self._names, self._stepped = {}, set()
        self._number_of, self._name_of, self._before, self._after = {}, {}, [], {}

    def _all_parameters(self) -> list[torch.Tensor]:
        return [param for group in self._inner.param_groups for param in group[_PARAMS]]

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


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in (_PARAMS, _PARAM_NAMES)}
