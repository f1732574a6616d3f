"""Steps inside backward: each group of parameters steps as soon as its gradients are reduced.

``sharding/stepping.py`` says when groups step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch import autograd
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import StepInterruptedError
from shardwise.base.optim_names import names_in_order, parameters_in_order
from shardwise.base.states_keeper import KeepsStates
from shardwise.optim.around import AroundOptimizer, PartialSteps, needs_closure
from shardwise.optim.norms import ClipBy, Clipping, NonFinite
from shardwise.optim.torch_steps import TorchStepGroup, torch_step_groups
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import groups_of
from shardwise.sharding.stepping import Steppable

#: Parameters that are reduced together, by our runtime or by torch's own FSDP2.
Group = ParamGroup | TorchStepGroup
#: The key of ``param_groups`` under which state dicts carry the norm that clips the next step.
PREVIOUS_NORM = "previous_norm"


def in_backward(
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
    clip_by: ClipBy = ClipBy.PREVIOUS_NORM,
    nonfinite: NonFinite = NonFinite.STEP,
) -> OptimizerInBackward:
    """Let every group of ``model`` step during backward, as soon as its gradients are reduced.

    Sharded gradients never exist together: those of a group are dropped as soon as it has stepped.
    Without clipping, parameters and states are bit for bit those of a step after backward.

    A step is made by every backward that reduces gradients. Where several backwards make one step,
    call ``set_requires_gradient_sync(False)`` or ``set_is_last_backward(False)`` before all of them
    but the last.

    Every rank calls this, after ``fully_shard`` and before the next forward. With torch's own
    ``fully_shard``, a group steps when the next one is reduced, so gradients of two exist together.

    Args:
        model: a module that ``fully_shard``, ours or torch's, was applied to, or that contains such
            modules.
        make: makes the optimizer from ``list(model.parameters())``. It may leave some out, which
            then keep their gradients, or have several parameter groups.
        max_norm: the largest norm of gradients that is not clipped; ``math.inf`` to compute
            :attr:`OptimizerInBackward.grad_norm` alone. ``None`` for neither.
        clip_by: the norm that is compared with it.
        nonfinite: what to do with a group whose gradients are not finite.

    Returns:
        The optimizer. Pass it to schedulers, ``shardwise.checkpoint`` and torch's helpers for state
        dicts as if it were what ``make`` returned.

    Raises:
        TypeError: ``make`` returned no optimizer.
        ValueError: ``model`` has no groups; a group steps in backward already; the optimizer has
            parameters that the model does not have, or that no group has while gradients are
            clipped; or its ``step`` needs a closure.

    Sources: the API follows torch's ``_apply_optimizer_in_backward``. The idea is from Lv et al.,
    "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv 2306.09782.
    """
    check_arguments(in_backward, locals())
    clip_by, nonfinite = ClipBy(clip_by), NonFinite(nonfinite)
    inner = make(list(model.parameters()))
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"in_backward: found that make returned {type(inner).__name__}, expected an optimizer"
        )
    clipping = Clipping(max_norm, clip_by, nonfinite)
    groups: list[Group] = [*groups_of(model), *torch_step_groups(model)]
    _check(model, inner, groups)
    _check_clipping(model, inner, groups, clipping)
    return OptimizerInBackward(inner, groups, clipping)


class OptimizerInBackward(AroundOptimizer):
    """The optimizer of a model whose groups step during backward; see :func:`in_backward`.

    Args:
        inner: the optimizer of all parameters.
        groups: the groups that step in backward.
        clipping: how gradients are clipped.

    Attributes:
        inner: the optimizer.
    """

    #: Torch's ``GradScaler`` then sets :attr:`grad_scale`, which refuses it with a reason.
    _step_supports_amp_scaling = True

    def __init__(
        self, inner: torch.optim.Optimizer, groups: Sequence[Group], clipping: Clipping
    ) -> None:
        super().__init__(inner)
        self._clipping = clipping
        self._groups = groups
        self._steps = GroupSteps(inner, groups, clipping, self._end_step)
        for group in groups:
            group.stepper = self._steps

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The total norm of the gradients of the last step, before clipping: a 0-dim tensor.

        Over all ranks and all groups that stepped. ``None`` before the first step, and if
        ``max_norm`` is ``None``.
        """
        return self._clipping.norm

    @property
    def skipped(self) -> tuple[str, ...]:
        """The names of the groups that did not make the last step; see :class:`NonFinite`."""
        return self._clipping.skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients that are left, which is nothing after most backwards.

        These are gradients of parameters that no group has, and of backwards after
        ``set_is_last_backward(False)``. So a loop that calls this after backward, as loops do,
        makes the same steps as with an ordinary optimizer.

        Args:
            closure: computes the loss and runs backward, in which groups step.

        Returns:
            What ``closure`` returned, or ``None``.

        Raises:
            StepInterruptedError: an exception has interrupted a step in backward.
            PeerLostError: a peer died or stalled.
        """
        self._steps.check()
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._steps.step_rest()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that are left.

        Args:
            set_to_none: drop the gradients (``True``) or fill them with zeros (``False``). With
                zeros, parameters that the next backward does not reach step with zero gradients,
                as in a step after backward.
        """
        super().zero_grad(set_to_none)
        self._steps.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, which has all parameters.

        With ``ClipBy.PREVIOUS_NORM``, parameter groups have the norm that clips the next step,
        under ``"previous_norm"``.

        Returns:
            A dict of tensors, sharded as the parameters are, and plain values.

        Raises:
            StepInterruptedError: an exception has interrupted a step in backward.
        """
        self._steps.check_whole()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one that an ordinary optimizer of the same parameters has saved.

        It ends an interrupted step: load the state of the model, too.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self.inner.load_state_dict(state_dict)
        found = self.inner.param_groups[0].get(PREVIOUS_NORM)
        self._clipping.previous = None if found is None else float(found)
        self.accept_interrupted_step()

    def accept_interrupted_step(self) -> None:
        """Go on after a ``StepInterruptedError``, with parameters and states as they are.

        Some groups are a step ahead of the others. Every rank calls this.
        """
        self._steps.forget()

    def remove(self) -> None:
        """Step in backward no longer. :attr:`inner` may step after backward from now on.

        Raises:
            StepInterruptedError: an exception has interrupted a step in backward.
        """
        self._steps.check_whole()
        for group in self._groups:
            if group.stepper is self._steps:
                group.stepper = None

    @property
    def grad_scale(self) -> Any:
        """Not there: torch's ``GradScaler`` looks for it, and sets it.

        Raises:
            AttributeError: always.
        """
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        """Refuse a ``GradScaler``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "GradScaler with in_backward: groups step before the scaler can look for gradients "
            "that are not finite, so this step was made with scaled gradients. Train in bfloat16; "
            "or scale the loss by a constant S, and undo that by "
            "set_gradient_divide_factor(S * world_size); or step after backward"
        )

    def _end_step(self) -> None:
        """Note that a step is over, for schedulers and for the next step."""
        autograd.note_step(self)
        self._clipping.finish()
        if self._clipping.carries:
            for group in self.inner.param_groups:
                group[PREVIOUS_NORM] = self._clipping.previous


def _check(model: nn.Module, inner: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    """Check that ``inner`` can step with one group after the other.

    Raises:
        ValueError: it cannot, or the groups step in backward already, or there are none.
    """
    if not groups:
        raise ValueError(
            f"in_backward: found a {type(model).__name__} without groups, expected a module that "
            "fully_shard was applied to"
        )
    for group in groups:
        if group.stepper is not None:
            raise ValueError(
                f"in_backward: group {group.fqn!r} steps in backward already; call remove() on the "
                "optimizer that it steps with"
            )
    if isinstance(inner, AroundOptimizer) and not isinstance(inner, KeepsStates):
        kind = type(inner).__name__
        raise ValueError(
            f"in_backward: found a {kind}, expected an optimizer with states of its own; pass "
            f"what in_backward returns to {kind}"
        )
    if needs_closure(inner):
        raise ValueError(
            f"in_backward: the step of {type(inner).__name__} needs a closure, so it cannot be "
            "made by a backward; expected an optimizer that steps once for each backward"
        )
    names_in_order(inner, {param: name for name, param in model.named_parameters()}, "in_backward")


def _check_clipping(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    groups: Sequence[Group],
    clipping: Clipping,
) -> None:
    """Check that all trained parameters are in groups, if gradients are clipped.

    Raises:
        ValueError: one is not.
    """
    if not clipping.clips:
        return
    own = {param.form.parameter for group in groups for param in group.params}
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    for param in parameters_in_order(inner):
        if param.requires_grad and param not in own:
            raise ValueError(
                f"in_backward: {names[param]} belongs to no group (fully_shard ignores it), so its "
                "gradient is not reduced and cannot be clipped; expected max_norm=None, or "
                "parameters in groups"
            )


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
        groups: Sequence[Group],
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

    def step(self, name: str, forms: Sequence[Steppable]) -> None:
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
        if isinstance(self._inner, AroundOptimizer):
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
            step = inner.step_part if isinstance(inner, AroundOptimizer) else inner.step
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
