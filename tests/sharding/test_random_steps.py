"""Random programs around torch's optimizers: steps on local shards have the bits of all others.

The peer is a subclass of the same optimizer, which steps through ``DTensor``. Both live through the
same events in a random order, and are compared after each.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.nets import batches, loss_of
from tests.sharding.test_local_step import CASES, assert_alike, bits, peers
from tests.worlds import on_threads

EVENTS = 16


class Life:
    """One of the two optimizers, and what happens to it.

    Args:
        model: the sharded model.
        optimizer: its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.handles: list[Any] = []
        self.averages = [param.detach().clone() for param in model.parameters()]
        self.aside: dict[str, Any] | None = None

    @property
    def params(self) -> list[torch.Tensor]:
        """All that the optimizer has, in its order."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute gradients."""
        loss = loss_of(self.model, x)
        loss.backward()
        return loss


#: What may happen, from the life, this rank's batch and a number that both lives and all ranks get.
Event = Callable[[Life, torch.Tensor, int], object]


def _step(life: Life, x: torch.Tensor, number: int) -> None:
    life.backward(x)
    life.optimizer.step()
    life.optimizer.zero_grad(set_to_none=number % 2 == 0)


def _step_twice_on_a_gradient(life: Life, x: torch.Tensor, number: int) -> None:
    life.backward(x)
    life.optimizer.step()
    life.optimizer.step()


def _step_with_a_closure(life: Life, x: torch.Tensor, number: int) -> None:
    def closure() -> torch.Tensor:
        life.optimizer.zero_grad()
        return life.backward(x)

    life.optimizer.step(closure)


def _step_with_a_closure_that_raises(life: Life, x: torch.Tensor, number: int) -> None:
    def closure() -> torch.Tensor:
        life.backward(x)
        raise KeyError(number)

    with pytest.raises(KeyError):
        life.optimizer.step(closure)


def _step_without_a_gradient_of_one(life: Life, x: torch.Tensor, number: int) -> None:
    life.backward(x)
    life.params[number % len(life.params)].grad = None
    life.optimizer.step()


def _step_with_a_hook_that_writes(life: Life, x: torch.Tensor, number: int) -> None:
    def write(optimizer: torch.optim.Optimizer, *_: object) -> None:
        param = life.params[number % len(life.params)]
        with torch.no_grad():
            param.mul_(0.5)
            if param.grad is not None:
                param.grad.add_(0.25)

    life.backward(x)
    register = (
        life.optimizer.register_step_pre_hook
        if number % 2
        else life.optimizer.register_step_post_hook
    )
    handle = register(write)
    life.optimizer.step()
    handle.remove()


def _freeze_or_unfreeze(life: Life, x: torch.Tensor, number: int) -> None:
    module = list(life.model.children())[number % 2]
    for param in module.parameters():
        param.requires_grad_(not param.requires_grad)


def _load(life: Life, x: torch.Tensor, number: int) -> None:
    life.optimizer.load_state_dict(copy.deepcopy(life.optimizer.state_dict()))


def _put_aside_or_back(life: Life, x: torch.Tensor, number: int) -> None:
    if life.aside is None:
        life.aside = copy.deepcopy(life.optimizer.state_dict())
    elif len(life.aside["param_groups"]) == len(life.optimizer.param_groups):
        life.optimizer.load_state_dict(life.aside)
        life.aside = None


def _replace_states(life: Life, x: torch.Tensor, number: int) -> None:
    for state in life.optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _forget_a_state(life: Life, x: torch.Tensor, number: int) -> None:
    life.optimizer.state.pop(life.params[number % len(life.params)], None)


def _divide_a_group(life: Life, x: torch.Tensor, number: int) -> None:
    group = life.optimizer.param_groups[0]
    if len(group["params"]) > 1:
        moved, life.aside = group["params"].pop(), None
        options = {key: value for key, value in group.items() if key != "params"}
        life.optimizer.add_param_group({**options, "params": [moved], "weight_decay": 0.01})


def _reorder(life: Life, x: torch.Tensor, number: int) -> None:
    life.optimizer.param_groups[0]["params"].reverse()
    life.aside = None  # states are set aside by number


def _change_rate(life: Life, x: torch.Tensor, number: int) -> None:
    for group in life.optimizer.param_groups:
        group["lr"] = group["lr"] * (0.5 + number % 3 / 4)


def _average(life: Life, x: torch.Tensor, number: int) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(life.averages, list(life.model.parameters()), 0.5)


def _copy(life: Life, x: torch.Tensor, number: int) -> None:
    life.model, life.optimizer, life.averages = copy.deepcopy(
        (life.model, life.optimizer, life.averages)
    )


_EVENTS: list[Event] = [
    *(_step, _step, _step_twice_on_a_gradient, _step_with_a_closure),
    *(_step_with_a_closure_that_raises, _step_without_a_gradient_of_one),
    *(_step_with_a_hook_that_writes, _freeze_or_unfreeze, _load, _put_aside_or_back),
    *(_replace_states, _forget_a_state, _divide_a_group, _reorder, _change_rate, _average, _copy),
]


def _live(seed: int, rank: int) -> None:
    chance = random.Random(seed)
    kind, options = chance.choice(CASES).values
    models, optimizers = peers(kind, options)
    lives = [Life(*both) for both in zip(models, optimizers, strict=True)]
    past = [kind.__name__, str(options)]
    for at in range(EVENTS):
        event, number = chance.choice(_EVENTS), chance.randrange(1000)
        past.append(f"{event.__name__} {number}")
        try:
            for life in lives:
                event(life, batches(2, at)[rank], number)
            assert_alike(*(life.optimizer for life in lives))
            for mine, other in zip(lives[0].averages, lives[1].averages, strict=True):
                assert torch.equal(bits(mine), bits(other))
        except Exception as error:
            error.add_note(f"seed {seed}: {', '.join(past)}")
            raise


@pytest.mark.parametrize(
    "seeds",
    [
        range(12),
        *(pytest.param(range(at, at + 100), marks=pytest.mark.long) for at in range(12, 1012, 100)),
    ],
    ids=lambda seeds: f"from {seeds[0]}",
)
@on_threads(2)
def test_any_program_of_events_has_the_bits_of_steps_through_dtensor(
    rank: int, world_size: int, seeds: range
) -> None:
    for seed in seeds:
        _live(seed, rank)
