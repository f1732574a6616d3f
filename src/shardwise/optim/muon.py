"""Muon on sharded parameters: each matrix is orthogonalized once over all ranks."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from shardwise._torch import dtensor
from shardwise.base.arguments import check_arguments
from shardwise.optim.checked import CheckedOptimizer, gradient, shard_of_state, with_gradients
from shardwise.optim.matrices import MatrixParam, Orthogonalization
from shardwise.optim.pool import Pools, RankPool
from shardwise.optim.shared_work import WorkPlan, WorkPlans

#: Keller Jordan's coefficients.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_DOING = "the step of Muon"


class Algorithm(enum.Enum):
    """What updates the parameters of a group."""

    MUON = "muon"
    ADAMW = "adamw"


class Muon(CheckedOptimizer):
    """Muon for matrices, and AdamW for the rest, on parameters sharded over any mesh.

    Arguments and results are those of ``torch.optim.Muon`` on the full matrices. Each matrix is
    orthogonalized by one rank of its mesh, replicas and tensor parallel ranks included. The ranks
    share the matrices out by cost, and the pieces travel while other matrices are computed.
    Momentum has the placements of its parameter.

    A group with ``algorithm="adamw"`` (or ``use_muon=False``, as Keller Jordan's optimizer names
    it) is updated by AdamW: :func:`shardwise.optim.muon_groups` makes such groups. It may have
    ``lr``, ``weight_decay``, ``betas`` (default 0.9 and 0.95) and ``eps`` (default 1e-8).

    A parameter of more than two dimensions is a stack of matrices, such as the weights of experts:
    each matrix of its last two dimensions is orthogonalized by itself. Plain tensors are updated by
    every rank on its own.

    Args:
        params: parameters, or groups, named or not.
        lr: learning rate of all groups that have none of their own.
        weight_decay: decoupled weight decay; likewise.
        momentum: of the moving average of gradients, 0 to 1.
        nesterov: whether an update looks ahead by one step of momentum.
        ns_coefficients: of the polynomial of the Newton-Schulz iteration.
        eps: the smallest norm that a matrix is divided by.
        ns_steps: iterations, below 100.
        adjust_lr_fn: how the learning rate depends on the shape of a matrix: ``"original"``
            (``None`` too), or ``"match_rms_adamw"``, with which one ``lr`` serves Muon and AdamW.

    Raises:
        ValueError: an argument is impossible, or a parameter for Muon is no matrix.

    Source: ``torch.optim.Muon``; Keller Jordan, https://kellerjordan.github.io/posts/muon/; and
    "Muon is Scalable for LLM Training" (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        check_arguments(Muon.__init__, locals())
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": Algorithm.MUON.value,
        }
        self._forget_plans()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what was pickled or copied."""
        super().__setstate__(state)
        for group in self.param_groups:  # those of torch.optim.Muon do not say it
            group.setdefault("algorithm", Algorithm.MUON.value)
        self._forget_plans()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Args:
            param_group: parameters, named or not, and settings; see the class.

        Raises:
            ValueError: a setting is impossible, or a parameter for Muon is no matrix.
        """
        if "use_muon" in param_group:
            param_group = dict(param_group)
            named = Algorithm.MUON if param_group.pop("use_muon") else Algorithm.ADAMW
            param_group.setdefault("algorithm", named.value)
        if param_group.get("algorithm", Algorithm.MUON.value) == Algorithm.ADAMW.value:
            param_group.setdefault("betas", (0.9, 0.95))
            param_group.setdefault("eps", 1e-8)
            param_group.setdefault("fused", True)
        super().add_param_group(param_group)

    def _rules(self, options: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
        yield "momentum", options["momentum"] >= 0, "0 or more"
        choices = {
            "adjust_lr_fn": (None, "original", "match_rms_adamw"),
            "algorithm": tuple(each.value for each in Algorithm),
        }
        for name, known in choices.items():
            yield name, options[name] in known, f"one of {known}"
        yield "ns_steps", 0 <= options["ns_steps"] < 100, "0 to 99"
        yield "ns_coefficients", len(options["ns_coefficients"]) == 3, "three numbers"

    def _check(self, where: str, param: torch.Tensor, options: Mapping[str, Any]) -> None:
        if options["algorithm"] != Algorithm.MUON.value:
            return
        if param.ndim < 2:
            raise ValueError(
                f"{where}: found shape {tuple(param.shape)}, expected a matrix, or a stack of "
                'matrices; put it into a group with algorithm="adamw", as muon_groups(model) does'
            )
        if isinstance(param, DTensor) and any(each.is_partial() for each in param.placements):
            raise ValueError(
                f"{where}: found placements {param.placements}, expected Shard or Replicate; "
                "redistribute it first"
            )

    def _step(self) -> None:
        matrices: list[MatrixParam] = []
        rest: list[Callable[[], None]] = []
        error: Exception | None = None
        try:
            for group, named in with_gradients(self):
                if Algorithm(group["algorithm"]) is Algorithm.ADAMW:
                    rest.append(_adamw_step(named, self.state, group))
                    continue
                for name, param in named:
                    matrices.append(MatrixParam.of(name, param, self.state[param], group))
        except Exception as raised:
            error = raised
        pools = self._agree(matrices, error)
        for pool, own in pools:
            Orthogonalization(self._plan(own, pool), own).run()
        for step in rest:
            step()

    # -- plans ------------------------------------------------------------------------------------

    def _forget_plans(self) -> None:
        self._pools = Pools()
        self._plans = WorkPlans()

    def _agree(
        self, matrices: Sequence[MatrixParam], error: Exception | None
    ) -> Iterator[tuple[RankPool | None, list[MatrixParam]]]:
        """Check that all ranks are about to do the same, and return who shares which parameters."""
        every = [
            param
            for group in self.param_groups
            if Algorithm(group["algorithm"]) is Algorithm.MUON
            for param in group["params"]
        ]
        self._pools.agree(every, [(each.name, each.param) for each in matrices], _DOING, error)
        found: dict[RankPool | None, list[MatrixParam]] = {}
        for each in matrices:
            found.setdefault(self._pools.of(each.param), []).append(each)
        return iter(found.items())

    def _plan(self, own: Sequence[MatrixParam], pool: RankPool | None) -> WorkPlan:
        """Return who does what, the same as in earlier steps with the same gradients."""
        key = (pool, *((id(each.param), each.ns_steps) for each in own))
        return self._plans.get(key, lambda: Orthogonalization.planned(own, pool))


def _adamw_step(
    named: Sequence[tuple[str, torch.Tensor]],
    states: Mapping[torch.Tensor, dict[str, Any]],
    settings: Mapping[str, Any],
) -> Callable[[], None]:
    """Take what a step of AdamW needs of this rank's part of parameters, and return the step.

    States are those of ``torch.optim.AdamW``, and are made before the first step.

    Raises:
        RuntimeError: a parameter is complex, or its gradient is sparse.
        ValueError: a state that was loaded does not lie as its parameter does.
    """
    params, grads, averages, squares, steps = (list[torch.Tensor]() for _ in range(5))
    for name, param in named:
        grads.append(dtensor.plain(gradient(name, param)))
        params.append(shard := dtensor.plain(param))
        state = states[param]
        if not state:
            device = shard.device if settings["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        averages.append(shard_of_state(name, param, "exp_avg", state))
        squares.append(shard_of_state(name, param, "exp_avg_sq", state))
        steps.append(state["step"])
    beta1, beta2 = settings["betas"]
    return functools.partial(
        adamw,
        *(params, grads, averages, squares, [], steps),
        **{name: settings[name] for name in ("fused", "lr", "weight_decay", "eps")},
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        maximize=False,
    )
