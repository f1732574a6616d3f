"""What optimizers have in common: they check options, gradients and states before a step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base.optim_names import named_in_group

#: The most elements that are computed with at a time, unless a single row has more. On CPUs, fewer
#: are hardly faster, and each piece costs a rehearsal and an accelerator as much as a whole tensor.
AT_ONCE = 1 << 21


class CheckedOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer that checks the options of its groups."""

    @abc.abstractmethod
    def _rules(self, options: Mapping[str, Any]) -> Iterable[tuple[str, bool, str]]:
        """Yield options by name, whether each is in range, and the range. NaN is in none.

        ``lr`` and ``weight_decay``, which all have, are left out.
        """

    def _check(self, where: str, param: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Raise an error if a parameter of a group with these options cannot be updated."""

    @abc.abstractmethod
    def _step(self) -> None:
        """Update all parameters that have a gradient. Nothing is differentiated."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own.

        Args:
            param_group: ``params``, and options.

        Raises:
            TypeError: a parameter has an unsupported dtype.
            ValueError: an option is out of range, or goes with other parameters.
        """
        options = {**self.defaults, **param_group}
        where, lr = f"{type(self).__name__}, group {len(self.param_groups)}", options["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"{where}: lr: found a tensor of {lr.numel()} elements, expected 1")
        of_all = [(name, options[name] >= 0, "0 or more") for name in ("lr", "weight_decay")]
        for name, is_right, expected in (*of_all, *self._rules(options)):
            if not is_right:
                raise ValueError(f"{where}: {name}: found {options[name]!r}, expected {expected}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for name, param in named_in_group(group, len(self.param_groups) - 1):
                self._check(f"{where}: {name}", param, group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient. All ranks call it.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            What ``closure`` returned, if there is one.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter complex. Nothing has been changed.
            ValueError: a state that was loaded does not lie as its parameter does. Nothing has been
                changed.
            RanksDivergedError: ranks have gradients of different parameters, or another rank
                failed before the step. Nothing was changed.
            PeerLostError: a peer is lost, or failed during the step. Other ranks may have made the
                step, and with ``Muon`` this one, too, in part: go on from the last checkpoint.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            self._step()
        return loss


def with_gradients(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]]:
    """Yield every group, and those of its parameters that have a gradient, with their names."""
    for number, group in enumerate(optimizer.param_groups):
        named = named_in_group(group, number)
        yield group, [(name, param) for name, param in named if param.grad is not None]


def gradient(name: str, param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, placed as the parameter is.

    Raises:
        RuntimeError: as in torch's optimizers: the parameter is complex, or its gradient is sparse
            or not a ``DTensor`` as the parameter is.
    """
    grad = param.grad
    assert grad is not None
    if torch.is_complex(param):
        raise RuntimeError(f"{name}: found {param.dtype}, expected real numbers")
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{name}: found a sparse gradient, expected a dense one, "
            "as of an embedding with sparse=False"
        )
    if isinstance(param, DTensor):
        if not isinstance(grad, DTensor):
            raise RuntimeError(f"{name}: found a plain gradient, expected a DTensor")
        if tuple(grad.placements) != tuple(param.placements):
            grad = grad.redistribute(param.device_mesh, param.placements)
    return grad


def shard_of_state(name: str, param: torch.Tensor, key: str, state: dict[str, Any]) -> torch.Tensor:
    """Return this rank's part of a tensor in a parameter's state, which begins with zeros.

    Raises:
        ValueError: it does not lie as its parameter does.
    """
    if key not in state:
        state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
    shard, mine = dtensor.plain(state[key]), dtensor.plain(param)
    if shard.shape != mine.shape or isinstance(state[key], DTensor) != isinstance(param, DTensor):
        raise ValueError(
            f"{name}: found a {key} of shape {tuple(shard.shape)} on this rank, expected "
            f"{tuple(mine.shape)}, as the parameter's; load it with shardwise.checkpoint or "
            "torch.distributed.checkpoint, which cut states as parameters are cut"
        )
    return shard
