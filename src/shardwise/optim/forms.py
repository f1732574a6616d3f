"""Optimizers whose states have shapes, dtypes or placements of their own.

They say what a state looks like before there is one, so that a checkpoint of another mesh can be
read into it, and take no state that looks different.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from shardwise._torch import dtensor
from shardwise._torch.dtensor import DTensorSpec
from shardwise.base.boxes import row_major
from shardwise.base.optim_names import STEP, keys_in_order, parameters_in_order
from shardwise.base.scratch import file
from shardwise.base.states_keeper import StatesKeeper
from shardwise.optim.checked import CheckedOptimizer


@dataclass(frozen=True)
class Form:
    """What a tensor of a state looks like.

    Attributes:
        shape: of this rank's part.
        stride: of this rank's part.
        dtype: of all parts.
        spec: mesh, placements and whole shape of a ``DTensor``; ``None`` of a plain tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: DTensorSpec | None

    @classmethod
    def beside(
        cls,
        param: Tensor,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        local: Sequence[int] | None = None,
        placements: Sequence[Placement] = (),
    ) -> Form:
        """The form of a contiguous tensor beside a parameter, by default one of its shape.

        Args:
            param: the parameter.
            dtype: of the tensor.
            shape: of the whole tensor.
            local: shape of this rank's part.
            placements: of a ``DTensor``.
        """
        shape = torch.Size(param.shape if shape is None else shape)
        local = tuple(dtensor.plain(param).shape if local is None else local)
        spec = None
        if isinstance(param, DTensor):
            placements = placements or param.placements
            spec = dtensor.make_spec(param.device_mesh, placements, shape, row_major(shape), dtype)
        return cls(local, row_major(local), dtype, spec)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part, rounded up to what direct I/O takes."""
        return file.aligned(math.prod(self.shape) * self.dtype.itemsize)

    def zeros(self, device: torch.device) -> Tensor:
        """Make the tensor."""
        return self._around(torch.zeros(self.shape, dtype=self.dtype, device=device))

    def over(self, memory: Tensor) -> Tensor:
        """Return a tensor of this form whose values are in ``memory``, from its beginning.

        Args:
            memory: bytes, ``nbytes`` of them or more.
        """
        used = memory[: math.prod(self.shape) * self.dtype.itemsize].view(self.dtype)
        return self._around(used.as_strided(self.shape, self.stride))

    def _around(self, local: Tensor) -> Tensor:
        return local if self.spec is None else dtensor.wrap_local(local, self.spec)

    def check(self, value: object, what: str) -> None:
        """Raise an error if a tensor is not of this form."""
        if not isinstance(value, Tensor):
            raise ValueError(f"{what}: found a {type(value).__name__}, expected a tensor")
        local, expected = dtensor.plain(value), self.shape if self.spec is None else self.spec.shape
        if value.dtype != self.dtype or value.shape != expected:
            raise ValueError(
                f"{what}: found {value.dtype} of shape {list(value.shape)}, expected {self.dtype} "
                f"of shape {list(expected)}; the state is of another optimizer or model"
            )
        if isinstance(value, DTensor) != (self.spec is not None) or local.shape != self.shape:
            found = "a DTensor" if isinstance(value, DTensor) else "a plain tensor"
            raise ValueError(
                f"{what}: found {found} with {list(local.shape)} on this rank, expected "
                f"{'a plain tensor' if self.spec is None else 'a DTensor'} with "
                f"{list(self.shape)}; load onto another mesh with shardwise.checkpoint or "
                "torch.distributed.checkpoint"
            )


@contextlib.contextmanager
def taking_states(
    optimizer: torch.optim.Optimizer,
    fit: Callable[[int, Tensor, Mapping[str, Any]], dict[str, Any]],
) -> Iterator[dict[Tensor, dict[str, Any]]]:
    """Take the states of parameters out of what an optimizer loads inside.

    The base class would convert them to the dtypes of parameters. What it is given is checked
    before anything is changed.

    Args:
        optimizer: the optimizer.
        fit: called with the number of a parameter in the order of the state dict, the parameter
            and its state; returns the state to use.

    Yields:
        The states by parameter, once the optimizer has begun to load.
    """
    found: dict[Tensor, dict[str, Any]] = {}

    def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        states = dict(given["state"])
        pairs = zip(keys_in_order(given), parameters_in_order(optimizer), strict=False)
        for number, (key, param) in enumerate(pairs):
            if key in states:
                found[param] = fit(number, param, states.pop(key))
        return {**given, "state": states}

    hook = optimizer.register_load_state_dict_pre_hook(take)  # after those of the user
    try:
        yield found
    finally:
        hook.remove()


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
            Tensors by name. Where the parameter is a ``DTensor``, all but ``step`` are, which is a
            0-dim tensor of fp32 on the host.
        """
        device = dtensor.plain(param).device
        made = {name: form.zeros(device) for name, form in self._forms(param).items()}
        return {STEP: torch.tensor(0.0), **made}

    def states_keeper(self) -> StatesKeeper:
        """Describe its states to checkpoints.

        Returns:
            A keeper that makes them as the optimizer does.
        """
        return StatesKeeper(self.new_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, for parameters that are sharded alike.

        Onto another mesh, load with ``shardwise.checkpoint`` or ``torch.distributed.checkpoint``.

        Args:
            state_dict: the state.

        Raises:
            ValueError: it is of another optimizer, or of parameters that are sharded in another
                way. Nothing has been changed.
        """

        def fit(number: int, param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
            self.check_state(number, param, state)
            device = dtensor.plain(param).device
            return {
                name: torch.as_tensor(value, dtype=torch.float32, device="cpu")
                if name == STEP
                else value.to(device)
                for name, value in state.items()
            }

        with taking_states(self, fit) as found:
            hook = self.register_load_state_dict_post_hook(
                lambda _: self.state.update(found), prepend=True
            )
            try:
                super().load_state_dict(state_dict)
            finally:
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
