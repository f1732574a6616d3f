"""A step of Muon on parameters that the same ranks share: who does what, and what is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.optim import newton_schulz
from shardwise.optim.checked import gradient, shard_of_state
from shardwise.optim.deal import DealtRows, Matrix, deal, matrices_of, rounds
from shardwise.optim.part import full_part
from shardwise.optim.pool import RankPool
from shardwise.optim.whole import Together, compute_alone

_MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class MatrixParam:
    """A parameter for Muon in one step.

    Attributes:
        name: its name, for messages.
        param: the parameter.
        shard: this rank's part of it.
        grad: the same part of its gradient.
        momentum: the same part of its momentum.
        settings: of its group.
    """

    name: str
    param: torch.Tensor
    shard: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, name: str, param: torch.Tensor, state: dict[str, Any], settings: Mapping[str, Any]
    ) -> MatrixParam:
        """Take what a step needs of a parameter, and make its momentum before the first step.

        Raises:
            RuntimeError: as in ``torch.optim.Muon``: it is complex, or its gradient is sparse.
            ValueError: the momentum that was loaded does not lie as the parameter does.
        """
        grad = gradient(name, param)
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        return cls(
            name=name,
            param=param,
            shard=dtensor.plain(param),
            grad=dtensor.plain(grad),
            momentum=shard_of_state(name, param, _MOMENTUM, state[_MOMENTUM]),
            settings=settings,
        )

    @property
    def ns_steps(self) -> int:
        """Iterations of each of its matrices."""
        return int(self.settings["ns_steps"])


class MatrixPlan:
    """Who does what for one set of parameters.

    Args:
        params: the parameters, which live as long as the plan.
        alone: the matrices, if this rank does everything.
        together: the work, if several ranks do.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        alone: Sequence[Matrix] = (),
        together: Together | None = None,
    ) -> None:
        self._params = list(params)  # or other parameters could get their ids
        self.alone = alone
        self.together = together

    @classmethod
    def of(cls, own: Sequence[MatrixParam], pool: RankPool | None) -> MatrixPlan:
        """Deal out the matrices of parameters."""
        params = [each.param for each in own]
        matrices: list[Matrix] = []
        for number, param in enumerate(params):
            if pool is None:
                parts = {0: full_part(param.shape)}
            else:
                assert isinstance(param, DTensor)
                parts = pool.parts(param)
            matrices += matrices_of(number, param.shape, parts)
        if pool is None:
            return cls(params, alone=matrices)

        def cost(matrix: Matrix) -> int:
            return newton_schulz.flops(matrix.shape, own[matrix.param].ns_steps)

        dealt = deal(matrices, len(pool.members), cost)
        in_rounds = rounds(dealt, lambda matrix: matrix.numel * newton_schulz.DTYPE.itemsize)
        detail = ", ".join(f"{each.name}: {tuple(each.param.shape)}" for each in own)
        return cls(params, together=Together(in_rounds, pool.all_to_all, detail))


class Orthogonalization:
    """The work on the matrices of a pool in a step; see :mod:`shardwise.optim.whole`."""

    dtype = newton_schulz.DTYPE

    def __init__(self, plan: MatrixPlan, own: Sequence[MatrixParam]) -> None:
        self._plan = plan
        self._own = own
        self.device = own[0].shard.device

    def run(self) -> None:
        """Update the parameters.

        Raises:
            PeerLostError: a peer is lost.
        """
        if self._plan.together is None:
            compute_alone(self._plan.alone, self)
        else:
            self._plan.together.run(self)

    def prepare(self, matrix: Matrix, piece: DealtRows) -> torch.Tensor:
        """Move the momentum toward the gradient, and return the update."""
        param = self._own[matrix.param]
        momentum = param.settings["momentum"]
        grad, average = param.grad[piece.at], param.momentum[piece.at]
        average.lerp_(grad, 1 - momentum)
        return grad.lerp(average, momentum) if param.settings["nesterov"] else average

    def compute(self, matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
        """Orthogonalize the update."""
        settings = self._own[matrix.param].settings
        return newton_schulz.orthogonalize(
            whole, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
        )

    def apply(self, matrix: Matrix, piece: DealtRows, result: torch.Tensor) -> None:
        """Decay the weights, and add the orthogonal update."""
        param = self._own[matrix.param]
        settings = param.settings
        lr = settings["lr"]
        if isinstance(lr, torch.Tensor):
            lr = lr.squeeze()
        shard = param.shard[piece.at]
        shard.mul_(1 - lr * settings["weight_decay"])
        scale = newton_schulz.scale(settings["adjust_lr_fn"], matrix.shape)
        shard.add_(result, alpha=-(lr * scale))
