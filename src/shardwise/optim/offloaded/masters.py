"""Masters: copies of parameters in a wider dtype, which the optimizer updates in their place.

A master is part of the state of its parameter, under the name ``"master"``. The parameter is the
master, rounded. A write to the parameter between steps, as by loading it, changes the
master, too: where the two differ, the parameter counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor

#: The name of a master in the state of its parameter.
MASTER = "master"


#: What an optimizer is shown in place of a parameter, which has its gradient, and its master.
_Lent = tuple[nn.Parameter, torch.Tensor]


class Masters:
    """What an optimizer is shown in place of parameters.

    Args:
        dtype: of the masters; ``None`` if there are none.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        # Optimizers may keep something for each parameter, so a stand-in lives as long as it.
        self._stand_ins: dict[torch.Tensor, nn.Parameter] = {}

    def has(self, param: torch.Tensor) -> bool:
        """Whether a parameter has a master: it is of a floating-point dtype with fewer bytes."""
        if self.dtype is None or not param.dtype.is_floating_point:
            return False
        return param.dtype.itemsize < self.dtype.itemsize

    def fit(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state that was made with other masters, or without, as it is with these.

        What is like the parameter has the dtype of what the optimizer updates, as if torch's
        optimizers had loaded it for that.

        Args:
            param: the parameter.
            state: its state; it is not changed.
        """
        master, rest = state.get(MASTER), {k: v for k, v in state.items() if k != MASTER}
        before = param.dtype if master is None else master.dtype
        after = self.dtype if self.has(param) else param.dtype
        assert after is not None
        if before == after or not state:
            return state
        fitted = {
            key: _with_dtype(value, after)
            if key != "step"  # of torch's optimizers; it is like a parameter of one element
            and isinstance(value, torch.Tensor)
            and value.dtype == before
            and value.shape == param.shape
            else value
            for key, value in rest.items()
        }
        if master is not None and self.has(param):
            fitted[MASTER] = _with_dtype(master, after)
        return fitted

    def lend(
        self, params: Sequence[torch.Tensor], states: dict[torch.Tensor, dict[str, Any]]
    ) -> dict[torch.Tensor, _Lent]:
        """Let an optimizer update masters in place of parameters.

        Args:
            params: parameters, of which some have gradients.
            states: of the optimizer. The state of a parameter becomes that of its stand-in.

        Returns:
            Stand-ins and masters of those parameters that have one, and a gradient.
        """
        lent: dict[torch.Tensor, _Lent] = {}
        if self.dtype is None:
            return lent
        for param in params:
            if param.grad is None or not self.has(param):
                continue
            state = states.pop(param, {})
            master = state.pop(MASTER, None)
            if master is None:
                master = _with_dtype(param.detach(), self.dtype)
            else:
                _follow(dtensor.plain(master), dtensor.plain(param.detach()))
            stand_in = self._stand_in_for(param, master)
            stand_in.grad = _with_dtype(param.grad, self.dtype)
            if state:  # optimizers take an empty one for their sign to begin
                states[stand_in] = state
            lent[param] = stand_in, master
        return lent

    def take_back(
        self, lent: dict[torch.Tensor, _Lent], states: dict[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Round masters to their parameters, whose states are their own again.

        Args:
            lent: what :meth:`lend` returned.
            states: of the optimizer.
        """
        for param, (stand_in, master) in lent.items():
            local = dtensor.plain(master)
            dtensor.plain(param.detach()).copy_(local)
            states[param] = {**states.pop(stand_in, {}), MASTER: master}
            stand_in.grad = None
            _set_memory(stand_in, local.new_empty(0))  # let go of the master's

    def _stand_in_for(self, param: torch.Tensor, master: torch.Tensor) -> nn.Parameter:
        stand_in = self._stand_ins.get(param)
        if stand_in is not None:
            _set_memory(stand_in, dtensor.plain(master))
            return stand_in
        # A tensor object of its own: it changes its memory, and the master does not.
        local = dtensor.plain(master).detach()
        if isinstance(master, DTensor):
            made = dtensor.make_parameter(local, dtensor.spec_of(master), requires_grad=True)
        else:
            made = nn.Parameter(local)
        vars(made).update(vars(param))  # attributes, which an optimizer may read
        self._stand_ins[param] = made
        return made


def _with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy in another dtype."""
    return dtensor.placed_as(tensor, dtensor.plain(tensor).to(dtype, copy=True))


def _follow(master: torch.Tensor, param: torch.Tensor) -> None:
    """Change a master where its parameter was written to since the last step."""
    is_same = master.to(param.dtype) == param
    torch.where(is_same, master, param.to(master.dtype), out=master)


def _set_memory(param: nn.Parameter, memory: torch.Tensor) -> None:
    if isinstance(param, DTensor):
        dtensor.set_local_memory(param, memory)
    else:
        param.data = memory
