"""Memory that was neither initialized nor loaded is found before a model trains on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwise import fully_shard, materialize
from shardwise.frontends.meta import is_marked, mark
from tests.harness import RanksFailedError, run_ranks
from tests.threads import run_threads

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_write_removes_a_mark(dtype: torch.dtype) -> None:
    tensor = torch.empty(5, 3, dtype=dtype)
    mark(tensor)
    assert is_marked(tensor)
    assert is_marked(tensor.clone())
    assert is_marked(tensor.t())
    tensor[1:] = 0
    assert is_marked(tensor)  # a row is left
    tensor[0] = 1
    assert not is_marked(tensor)


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.is_floating_point])
def test_a_mark_is_a_nan_and_no_nan_is_a_mark(dtype: torch.dtype) -> None:
    tensor = torch.empty(3, dtype=dtype)
    mark(tensor)
    assert tensor.isnan().all()
    assert not is_marked(torch.full((3,), float("nan"), dtype=dtype))
    assert not is_marked(torch.zeros(3, dtype=dtype) / 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8])
def test_small_numbers_have_no_value_to_spare(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    mark(tensor)
    assert tensor.eq(1).all()
    assert not is_marked(tensor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)  # with 2 ranks, one has no rows of its weight
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def _nothing(module: nn.Module) -> None:
    pass


def _is_named(rank: int, world_size: int) -> list[str]:
    with torch.device("meta"):
        model = Net()
    fully_shard(model.inner)
    fully_shard(model)
    materialize(model, init=_nothing)
    said = []
    for load in (
        lambda: None,
        lambda: model.load_state_dict(
            {name: torch.ones_like(value) for name, value in model.state_dict().items()}
        ),
        lambda: model.scale.fill_(2),
        lambda: None,
    ):
        load()
        try:
            assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 1), 8.0))
            said.append("")
        except RuntimeError as error:
            said.append(str(error).partition(":")[2].partition(":")[0].strip())
    return said


def test_what_is_left_is_named_on_every_rank_until_it_is_loaded() -> None:
    named = ["inner.weight, inner.bias, scale", "scale", "", ""]
    assert run_threads(_is_named, 2) == [named, named]


def test_a_model_that_is_not_sharded_is_checked_too() -> None:
    with torch.device("meta"):
        model = Net()
    materialize(model, init=_nothing)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with pytest.raises(RuntimeError, match=r"inner\.weight, inner\.bias, scale"):
            each(torch.ones(1, 3))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(1)
    assert model(torch.ones(1, 3)).item() == 4


def _differs(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = Net()
    fully_shard(model)
    materialize(model, init=_nothing)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.scale):
            if rank == 0:  # the other rank has rows of the bias or not, but not the scale
                tensor.fill_(1)
    model(torch.ones(1, 3))


def test_all_ranks_raise_if_one_has_something_left() -> None:
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(_differs, 2)
    assert "rank 0 of 2 raised" in str(raised.value)
    assert "scale: memory that was neither initialized" in str(raised.value)
