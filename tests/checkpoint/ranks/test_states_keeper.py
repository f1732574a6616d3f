"""A new optimizer is one file: it says how it keeps its states, and no checkpoint knows its class.

The fake here has sums over columns, which are whole on every rank although parameters are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, zeros

from shardwise import checkpoint, fully_shard, relayout
from shardwise.base.errors import CheckpointError
from shardwise.base.states_keeper import StatesKeeper, drop_states, inside_of, keeper_of
from shardwise.optim import AdamW8bit, in_backward, offload, whole
from shardwise.optim.around import AroundOptimizer
from tests.worlds import on_threads


class Columns(torch.optim.SGD):
    """Keeps the sums of columns of each matrix."""

    def states_keeper(self) -> StatesKeeper:
        return StatesKeeper(self.new_state)

    def new_state(self, param: Tensor) -> Mapping[str, Tensor]:
        mesh = param.device_mesh  # type: ignore[attr-defined]
        return {"columns": zeros(param.shape[1], device_mesh=mesh, placements=[Replicate()])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param] = dict(self.new_state(param))
            state["columns"].to_local().add_(param.full_tensor().sum(0))


@pytest.mark.parametrize("how", ["from a checkpoint", "in memory"])
def test_sgd_of_torch_takes_no_moments_of_adamw(how: str, tmp_path: Path) -> None:
    """Torch would only fail at the next step, which lacks the momentum."""
    model = nn.Linear(2, 2)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    adamw.step()
    adamw.zero_grad()
    checkpoint.save(tmp_path / "saved", model, adamw)
    again = nn.Linear(2, 2)
    sgd = torch.optim.SGD(again.parameters(), momentum=0.9)
    loads = {
        "from a checkpoint": lambda: checkpoint.load(tmp_path / "saved", again, sgd),
        "in memory": lambda: checkpoint.transfer((model, adamw), (again, sgd)),
    }
    with pytest.raises(CheckpointError, match=r"found \w+, a state of .* from which torch's SGD"):
        loads[how]()
    assert not sgd.state


@on_threads(3)
def test_states_of_a_form_of_their_own_load_as_their_optimizer_says(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 7, bias=False), mesh=init_device_mesh("cpu", (3,)))
    optimizer = Columns(model.parameters())
    optimizer.step()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    again = fully_shard(nn.Linear(6, 7, bias=False), mesh=init_device_mesh("cpu", (3,)))
    other = Columns(again.parameters())
    checkpoint.load(tmp_path / "saved", again, other)
    (found,) = (state["columns"] for state in other.state.values())
    (expected,) = (state["columns"] for state in optimizer.state.values())
    assert found.placements == (Replicate(),)
    assert torch.equal(found.to_local(), expected.to_local())


class Wrapper(torch.optim.SGD):
    """An optimizer of somebody else around another one, with states of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups)
        self.inner = inner


def test_an_optimizer_inside_of_itself_is_found_once() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    around = Wrapper(optimizer)
    assert [*inside_of(around)] == [around, optimizer]
    optimizer.inner = around  # type: ignore[attr-defined]
    assert [*inside_of(around)] == [around, optimizer]


@on_threads(2)
def test_what_is_inside_need_not_be_an_optimizer(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.inner = "adamw"  # type: ignore[attr-defined]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    relayout(model, optimizer, strategy="no-shard")
    assert optimizer.state[model.weight]["exp_avg"].to_local().shape == (4, 4)


@on_threads(2)
def test_states_that_no_state_dict_has_are_not_dropped(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = Wrapper(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.inner.step()
    optimizer.zero_grad()
    with pytest.raises(CheckpointError, match=r"exp_avg.* in the AdamW inside of a Wrapper"):
        relayout(model, optimizer, strategy="no-shard")
    assert "exp_avg" in optimizer.inner.state[model.weight]


def test_the_keeper_is_the_first_optimizer_that_says_something() -> None:
    model = nn.Linear(64, 64)
    plain = torch.optim.AdamW(model.parameters())
    own = AdamW8bit(model.parameters())
    offloaded = offload(AdamW8bit(model.parameters()), "host")
    for says in (own, AroundOptimizer(own), Wrapper(own), offloaded, AroundOptimizer(offloaded)):
        state = keeper_of(says).new_state(model.weight)
        assert state.keys() == own.new_state(model.weight).keys()
    assert keeper_of(AroundOptimizer(offloaded)).home_like == offloaded.home_like
    for says_nothing in (plain, Wrapper(plain), None):
        assert keeper_of(says_nothing) == StatesKeeper()
    assert StatesKeeper().new_state(model.weight) == {}
    assert StatesKeeper().home_like(model.weight) is model.weight


def test_dropping_states_reaches_those_of_every_optimizer_inside() -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    outer = Wrapper(AroundOptimizer(inner))
    for each in (inner, outer):
        each.state[model.weight] = {"exp_avg": torch.ones(4, 4)}
    drop_states(outer)
    assert not inner.state
    assert not outer.state


@on_threads(2)
def test_whose_states_a_rank_has_is_seen_through_a_step_in_backward(
    rank: int, world_size: int
) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = in_backward(model, lambda params: whole(torch.optim.AdamW, params))
    kept: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(kept, len(keeper_of(optimizer).kept() or ()))
    assert sum(kept) == 2
