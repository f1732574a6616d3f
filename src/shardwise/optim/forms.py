"""Optimizers whose states have shapes, dtypes or placements of their own.

They say what a state looks like before there is one, so that a checkpoint of another mesh can be
read into it, and take no state that looks different.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwise._torch import dtensor
from shardwise.base.optim_names import keys_in_order, parameters_in_order
from shardwise.optim.checked import CheckedOptimizer

#: The number of steps of a parameter, in its state: a 0-dim tensor of fp32 on the host.
STEP = "step"


@dataclass(frozen=True)
class Form:
    """What a tensor of a state looks like.

    Attributes:
        shape: of the whole tensor.
        local: of this rank's part.
        dtype: of both.
        mesh: of a ``DTensor``.
        placements: of a ``DTensor``.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    def zeros(self, device: torch.device) -> Tensor:
        """Make the tensor."""
        local = torch.zeros(self.local, dtype=self.dtype, device=device)
        if self.mesh is None:
            return local
        shape = torch.Size(self.shape)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        spec = dtensor.make_spec(self.mesh, self.placements, shape, strides, self.dtype)
        return dtensor.wrap_local(local, spec)

    def check(self, value: object, what: str) -> None:
        """Raise an error if a tensor is not of this form."""
        if not isinstance(value, Tensor):
            raise ValueError(f"{what}: found a {type(value).__name__}, expected a tensor")
        local = dtensor.plain(value)
        if value.dtype != self.dtype or tuple(value.shape) != self.shape:
            raise ValueError(
                f"{what}: found {value.dtype} of shape {list(value.shape)}, expected {self.dtype} "
                f"of shape {list(self.shape)}; the state is of another optimizer or model"
            )
        if isinstance(value, DTensor) != (self.mesh is not None) or (
            tuple(local.shape) != self.local
        ):
            found = "a DTensor" if isinstance(value, DTensor) else "a plain tensor"
            raise ValueError(
                f"{what}: found {found} with {list(local.shape)} on this rank, expected "
                f"{'a plain tensor' if self.mesh is None else 'a DTensor'} with "
                f"{list(self.local)}; load onto another mesh with shardwise.checkpoint or "
                "torch.distributed.checkpoint"
            )


class OwnStates(CheckedOptimizer):
    """An optimizer that knows what its states look like before it has any.

    States of most others have the shape, the dtype and the placements of their parameter.
    """

    @abc.abstractmethod
    def _forms(self, param: Tensor) -> Mapping[str, Form]:
        """What the tensors of a parameter's state look like, by name, ``step`` left out."""

    def new_state(self, param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step.

        Args:
            param: a parameter of this optimizer.

        Returns:
            Tensors by name. Where the parameter is a ``DTensor``, all but ``step`` are.
        """
        device = dtensor.plain(param).device
        made = {name: form.zeros(device) for name, form in self._forms(param).items()}
        return {STEP: torch.tensor(0.0), **made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, for parameters that are sharded alike.

        Onto another mesh, load with ``shardwise.checkpoint`` or ``torch.distributed.checkpoint``.

        Args:
            state_dict: the state.

        Raises:
            ValueError: it is of another optimizer, or of parameters that are sharded in another
                way. Nothing has been changed.
        """
        found: dict[Tensor, dict[str, Tensor]] = {}

        # The base class would convert states to the dtype of the parameter.
        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            states = dict(given["state"])
            pairs = zip(keys_in_order(given), parameters_in_order(self), strict=False)
            for number, (key, param) in enumerate(pairs):
                if key in states:
                    state = states.pop(key)
                    self.check_state(number, param, state)
                    found[param] = self._placed(param, state)
            return {**given, "state": states}

        def give(_: torch.optim.Optimizer) -> None:
            self.state.update(found)

        hooks = (
            self.register_load_state_dict_pre_hook(take),  # after those of the user
            self.register_load_state_dict_post_hook(give, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def check_state(self, number: int, param: Tensor, state: Mapping[str, Any]) -> None:
        """Check that a state that is to be loaded looks as the states of this optimizer do.

        Args:
            number: of the parameter, in the order of the state dict.
            param: the parameter.
            state: its state; empty if it never had a gradient.

        Raises:
            ValueError: it is of another optimizer, or of a parameter that is sharded otherwise.
        """
        if not state:
            return
        forms = self._forms(param)
        where = f"state of parameter {number}, of shape {list(param.shape)}"
        if dist.is_initialized():
            where += f", on rank {dist.get_rank()}"
        if state.keys() != {STEP, *forms}:
            raise ValueError(
                f"{where}: found {sorted(state)}, expected {sorted([STEP, *forms])}; the state of "
                f"another optimizer cannot be loaded into {type(self).__name__}"
            )
        for name, form in forms.items():
            form.check(state[name], f"{where}: {name}")

    def _placed(self, param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """A state that was loaded, on the device of its parameter, and its step on the host."""
        device = dtensor.plain(param).device
        return {
            name: torch.as_tensor(value, dtype=torch.float32, device="cpu")
            if name == STEP
            else value.to(device)
            for name, value in state.items()
        }
