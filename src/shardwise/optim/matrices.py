"""A step of Muon on parameters that the same ranks share: what is sent, and what is done.

The Newton-Schulz iteration that orthogonalizes an update is that of Keller Jordan's Muon
(https://kellerjordan.github.io/posts/muon/), as ``torch.optim.Muon`` computes it. The scales of
learning rates are his, and that of "Muon is Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch import dtensor
from shardwise.base import observe
from shardwise.optim.checked import gradient, shard_of_state
from shardwise.optim.deal import Unit, UnitPart, deal, units_of
from shardwise.optim.pool import RankPool, parts_of
from shardwise.optim.shared_work import SharedWork, WorkPlan
from shardwise.sharding.part import full_part

observe.ALLOCATES[__file__] = observe.Memory.TRANSPORT

_MOMENTUM = "momentum_buffer"
#: The dtype of the iteration, and of updates on their way to it and back.
DTYPE = torch.bfloat16


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
        return cls(
            name=name,
            param=param,
            shard=dtensor.plain(param),
            grad=dtensor.plain(grad),
            momentum=shard_of_state(name, param, _MOMENTUM, state),
            settings=settings,
        )

    @property
    def ns_steps(self) -> int:
        """Iterations of each of its matrices."""
        return int(self.settings["ns_steps"])


class Orthogonalization(SharedWork):
    """The work on the matrices of a pool in a step.

    Args:
        plan: who does what.
        own: the parameters of the plan, in this step.
    """

    def __init__(self, plan: WorkPlan, own: Sequence[MatrixParam]) -> None:
        super().__init__(plan, "Muon", DTYPE, own[0].shard.device)
        self._own = own

    @staticmethod
    def planned(own: Sequence[MatrixParam], pool: RankPool | None) -> WorkPlan:
        """Deal out the matrices of parameters."""
        params = [each.param for each in own]
        matrices: list[Unit] = []
        for number, param in enumerate(params):
            parts = {0: full_part(param.shape)} if pool is None else parts_of(param)
            matrices += units_of(number, param.shape, parts, 2)
        if pool is None:
            return WorkPlan(params, alone=matrices)

        def cost(matrix: Unit) -> int:
            return flops(matrix.shape, own[matrix.param].ns_steps)

        named = [(each.name, each.param) for each in own]
        dealt = deal(matrices, len(pool.members), cost)
        return WorkPlan.shared(named, dealt, pool, lambda matrix: matrix.numel * DTYPE.itemsize)

    def run(self) -> None:
        """Update the parameters. All ranks of the pool call it."""
        if self.plan.all_to_all is not None:
            super().run()
        for matrix in self.plan.alone:
            piece = matrix.pieces[0]
            (update,) = self._prepare(matrix, piece)
            whole = update.to(DTYPE, copy=True).contiguous()
            self._apply(matrix, piece, self._compute({matrix: [whole]})[matrix])

    @observe.allocates(observe.Memory.OTHER)
    def _prepare(self, unit: Unit, piece: UnitPart) -> tuple[torch.Tensor]:
        """Move the momentum toward the gradient, and return the update."""
        param = self._own[unit.param]
        momentum = param.settings["momentum"]
        grad, average = param.grad[piece.at], param.momentum[piece.at]
        average.lerp_(grad, 1 - momentum)
        return (grad.lerp(average, momentum) if param.settings["nesterov"] else average,)

    def _compute(self, wholes: dict[Unit, list[torch.Tensor]]) -> dict[Unit, torch.Tensor]:
        """Orthogonalize updates."""
        results = {}
        for unit in list(wholes):
            settings = self._own[unit.param].settings
            how = (settings[name] for name in ("ns_coefficients", "ns_steps", "eps"))
            (whole,) = wholes.pop(unit)
            results[unit] = orthogonalize(whole, *how)
        return results

    @observe.allocates(observe.Memory.OTHER)
    def _apply(self, unit: Unit, piece: UnitPart, result: torch.Tensor) -> None:
        """Decay the weights, and add the orthogonal update."""
        param = self._own[unit.param]
        settings = param.settings
        lr = settings["lr"]
        if isinstance(lr, torch.Tensor):
            lr = lr.squeeze()
        shard = param.shard[piece.at]
        shard.mul_(1 - lr * settings["weight_decay"])
        shard.add_(result, alpha=-(lr * scale(settings["adjust_lr_fn"], unit.shape)))


@observe.allocates(observe.Memory.OTHER)
def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about the nearest semi-orthogonal matrix: singular values become about 1.

    The operations are those of ``torch.optim.Muon``, in their order, so that the bits are the same.

    Args:
        matrix: bfloat16, ``(m, n)``, contiguous. It is overwritten.
        coefficients: of the polynomial ``a X + b (X X') X + c (X X')^2 X``.
        steps: how often the polynomial is applied.
        eps: the smallest norm to divide by.

    Returns:
        bfloat16, ``(m, n)``; may be transposed in memory.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def flops(shape: tuple[int, ...], steps: int) -> int:
    """Return the floating-point operations of :func:`orthogonalize`."""
    short, long = sorted(shape)
    return steps * (4 * short**2 * long + 2 * short**3)


def scale(adjust_lr_fn: str | None, shape: tuple[int, ...]) -> float:
    """Return the factor of the learning rate of a matrix.

    Args:
        adjust_lr_fn: ``"original"`` or ``None``: ``sqrt(max(1, m / n))``; ``"match_rms_adamw"``:
            ``0.2 sqrt(max(m, n))``, so that updates are about as large as those of AdamW.
        shape: ``(m, n)``.
    """
    m, n = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))
