"""Steps inside backward: each group of parameters steps as soon as its gradients are reduced.

``sharding/stepping.py`` says when groups step, and ``group_steps.py`` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise._torch import autograd
from shardwise.base.optim_names import names_in_order, parameters_in_order
from shardwise.optim.around import AroundOptimizer
from shardwise.optim.clipping import ClipBy, Clipping, NonFinite
from shardwise.optim.group_steps import GroupSteps
from shardwise.optim.offloaded.optimizer import OffloadedOptimizer
from shardwise.optim.partial_steps import needs_closure
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import groups_of

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

    Every rank calls this, after ``fully_shard`` and before the next forward.

    Args:
        model: a module that ``fully_shard`` was applied to, or that contains such modules.
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
    inner = make(list(model.parameters()))
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"in_backward: found that make returned {type(inner).__name__}, expected an optimizer"
        )
    clipping = Clipping(max_norm, clip_by, nonfinite)
    groups = list(groups_of(model))
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
        self, inner: torch.optim.Optimizer, groups: Sequence[ParamGroup], clipping: Clipping
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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


def _check(model: nn.Module, inner: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> None:
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
    if isinstance(inner, AroundOptimizer) and not isinstance(inner, OffloadedOptimizer):
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
    groups: Sequence[ParamGroup],
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
