"""A step of AdamW on this rank's shards, with the states of ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from shardwise._torch import dtensor
from shardwise.optim.checked import gradient, shard_of_state


@dataclass(frozen=True)
class AdamWStep:
    """The parameters of a group for AdamW in one step: this rank's part of each.

    Attributes:
        params: the parameters.
        grads: their gradients.
        averages: their ``exp_avg``.
        squares: their ``exp_avg_sq``.
        steps: the number of steps of each, 0-dim.
        settings: of the group.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    averages: list[torch.Tensor]
    squares: list[torch.Tensor]
    steps: list[torch.Tensor]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, torch.Tensor]],
        states: Mapping[torch.Tensor, dict[str, Any]],
        settings: Mapping[str, Any],
    ) -> AdamWStep:
        """Take what a step needs of parameters, and make their states before the first step.

        Raises:
            RuntimeError: a parameter is complex, or its gradient is sparse.
            ValueError: a state that was loaded does not lie as its parameter does.
        """
        found = cls([], [], [], [], [], settings)
        for name, param in named:
            grad, state = gradient(name, param), states[param]
            shard = dtensor.plain(param)
            if not state:
                device = shard.device if settings["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
            found.params.append(shard)
            found.grads.append(dtensor.plain(grad))
            found.averages.append(shard_of_state(name, param, "exp_avg", state["exp_avg"]))
            found.squares.append(shard_of_state(name, param, "exp_avg_sq", state["exp_avg_sq"]))
            found.steps.append(state["step"])
        return found

    def run(self) -> None:
        """Update the parameters."""
        beta1, beta2 = self.settings["betas"]
        adamw(
            self.params,
            self.grads,
            self.averages,
            self.squares,
            [],
            self.steps,
            fused=self.settings["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self.settings["lr"],
            weight_decay=self.settings["weight_decay"],
            eps=self.settings["eps"],
            maximize=False,
        )
