"""A model is born sharded: from the meta device, module by module, with the unsharded values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard, materialize
from tests.corpus.models import Tied
from tests.worlds import Ranks, on_threads


def _bounded(rank: int, world_size: int) -> int:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(6)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    alive: list[int] = []

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            alive.append(sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor)))
            assert not isinstance(module.weight, DTensor)
            nn.init.ones_(module.weight)

    materialize(model, init=init)
    return max(alive)


def test_one_module_at_a_time_is_whole(threads: Ranks) -> None:
    assert threads(_bounded, 2) == [1600, 1600]


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))


@on_threads(1)
def test_a_module_without_reset_parameters_needs_init(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), _Bare())
    fully_shard(model)
    with pytest.raises(ValueError, match=r"1 \(_Bare\) has weight on the meta device.*pass init="):
        materialize(model)
    assert all(param.is_meta for param in model.parameters()), "nothing has been changed"


@on_threads(2)
def test_what_is_not_on_the_meta_device_keeps_its_values(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    ready = nn.Linear(3, 3)
    nn.init.ones_(ready.weight)
    model = fully_shard(nn.Sequential(ready, meta))
    materialize(model)
    assert torch.equal(model[0].weight.full_tensor(), torch.ones(3, 3))
    assert not model[1].weight.is_meta


class Outer(nn.Module):
    """Sets a parameter of an inner module, as the attention of GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _from_outside(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    elif isinstance(module, Outer):
        assert module.first.weight.numel() == 35  # asking for a shape needs no values
        nn.init.normal_(module.first.weight)
        module.second.weight.data[1:].mul_(3)


@pytest.mark.parametrize("world_size", [1, 3])
@on_threads()
def test_an_outer_module_may_initialize_an_inner_one(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    reference = nn.Sequential(Outer(), Outer())
    torch.manual_seed(5)
    reference.apply(_from_outside)
    with torch.device("meta"):
        model = nn.Sequential(Outer(), Outer())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(5)
    materialize(model, init=_from_outside)
    for name, full in reference.state_dict().items():
        found = model.state_dict()[name]
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), full), name
    assert torch.equal(model(torch.ones(2, 5)), reference(torch.ones(2, 5)))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=_after(reference)))


def _after(reference: nn.Module) -> torch.Generator:
    """The generator after the initialization of ``reference``."""
    torch.manual_seed(5)
    reference.apply(_from_outside)
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


def test_tensors_that_are_not_sharded_stay_tied() -> None:
    with torch.device("meta"):
        model = Tied()
    assert materialize(model) is model
    assert model.last.weight is model.first.weight
    assert not model.last.weight.is_meta
