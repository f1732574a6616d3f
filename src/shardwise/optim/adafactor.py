"""``Adafactor``: the update of ``torch.optim.Adafactor`` on parameters cut over any mesh.

    step       fp32   a scalar
    row_var    fp32   the means of rows, for parameters of two or more dimensions
    col_var    fp32   the means of columns
    variance   fp32   for all others

``factored.py`` has the step of one parameter. Here all parameters take each part of it together, so
that ranks add up what all of them need at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwise._torch import dtensor
from shardwise.base.optim_names import named_in_group, parameters_in_order
from shardwise.optim.checked import gradient
from shardwise.optim.factored import COLUMNS, ELEMENTS, ROWS, FactoredRates, FactoredUpdate
from shardwise.optim.forms import STEP, Form, OwnStates
from shardwise.optim.pool import Pools
from shardwise.optim.reductions import Reductions, abandon

_DOING = "the step of Adafactor"


class Adafactor(OwnStates):
    """Adafactor, of Shazeer and Stern (arXiv 1804.04235), on parameters cut over any mesh.

    Arguments and update are those of ``torch.optim.Adafactor`` on full tensors, up to the rounding
    of fp32: means of rows and columns, and norms, are those of the whole parameter. Ranks add up
    what they need for all parameters at once, so a step takes two small all-reduces for each mesh
    dimension that cuts parameters, however many these are. All ranks have to call :meth:`step`.

    Averages have the dtype fp32 (fp64 for parameters of fp64), and everything is computed in it:
    parameters of bf16 and fp16 are updated as fp32 ones would be, and rounded.

    Args:
        params: parameters, or groups of them, named or not; sharded or not.
        lr: the largest step, relative to the root of the mean square of a parameter; weight decay
            is multiplied by it.
        beta2_decay: exponent that the share of old squares follows; 0 or less.
        eps: the least root of a second moment (``None``: the resolution of the dtype that it is
            computed in), and the least root of the mean square of a parameter.
        d: the root of the mean square of an update above which it is scaled down; 1 or more.
        weight_decay: share of a parameter that is taken off, times ``lr``.
        maximize: ascend.

    Raises:
        ValueError: an argument is out of range.

    Source: ``torch.optim.Adafactor``, of which ``foreach`` is left out.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        self._pools = Pools()
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what was pickled or copied."""
        self._pools = Pools()
        super().__setstate__(state)

    def _rules(self, options: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
        eps, floor = options["eps"]
        yield "lr", options["lr"] >= 0, "0 or more"
        yield "beta2_decay", options["beta2_decay"] <= 0, "0 or less"
        eps_is_right = (eps is None or eps >= 0) and floor >= 0
        yield "eps", eps_is_right, "None or 0 or more, and 0 or more"
        yield "d", options["d"] >= 1, "1 or more"
        yield "weight_decay", options["weight_decay"] >= 0, "0 or more"

    def _forms(self, param: Tensor) -> Mapping[str, Form]:
        """What the averages of a parameter look like."""
        if param.ndim < 2:
            return {ELEMENTS: _form(param, ())}
        return {ROWS: _form(param, (param.ndim - 1,)), COLUMNS: _form(param, (param.ndim - 2,))}

    def _step(self) -> None:
        updates: list[FactoredUpdate] = []
        steps: list[Tensor] = []
        names: list[tuple[str, Tensor]] = []
        error: Exception | None = None
        try:
            for number, group in enumerate(self.param_groups):
                settings = {**group, "lr": float(group["lr"])}  # a tensor is waited for once
                for name, param in named_in_group(group, number):
                    if param.grad is not None:
                        updates.append(self._update_of(name, param, settings))
                        steps.append(self.state[param][STEP])
                        names.append((name, param))
        except Exception as raised:
            error = raised
        self._pools.agree(parameters_in_order(self), names, _DOING, error)
        try:
            for part in (FactoredUpdate.measure, FactoredUpdate.compute):
                sums = Reductions("the means and norms of Adafactor")
                for update in updates:
                    part(update, sums)
                sums.run()
        except BaseException:
            for device in {update.device for update in updates}:
                own = (update.groups for update in updates if update.device == device)
                abandon(set().union(*own), device)
            raise
        for update, step in zip(updates, steps, strict=True):
            update.apply()
            step += 1

    def _update_of(self, name: str, param: Tensor, settings: Mapping[str, Any]) -> FactoredUpdate:
        grad, state, shard = gradient(name, param), self.state[param], dtensor.plain(param)
        forms = self._forms(param)
        if not state:
            state.update(self.new_state(param))
        for key, form in forms.items():
            form.check(state.get(key), f"{name}: {key}")
        dtype = next(iter(forms.values())).dtype
        return FactoredUpdate(
            param, grad, state, FactoredRates.of(settings, state[STEP] + 1, dtype, shard.device)
        )


def _form(param: Tensor, reduced: tuple[int, ...]) -> Form:
    """What an average looks like that has one element along some dimensions of a parameter."""
    shape, local = list(param.shape), list(dtensor.plain(param).shape)
    for dim in reduced:
        shape[dim] = local[dim] = 1
    placements: tuple[Placement, ...] = ()
    if isinstance(param, DTensor):
        placements = tuple(
            Replicate() if dtensor.sharded_dim(each) in reduced else each
            for each in param.placements
        )
    dtype = torch.promote_types(param.dtype, torch.float32)
    return Form.beside(param, dtype, shape, local, placements)
