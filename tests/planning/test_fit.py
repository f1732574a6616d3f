"""What fits and is fastest, found from a measure whose answer is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.frontends.strategies import Checkpointing, Strategy, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.fit import Measured, NothingFitsError, fit, shortened
from shardwise.insight.planning.models import find_model
from shardwise.insight.planning.settings import Settings
from tests.inspect.plans import styles_of
from tests.sharding.nets import Block

GiB = 2**30


class Stack(nn.Module):
    """An embedding, equal blocks and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))


def _blueprint(layers: int = 10) -> Blueprint:
    with torch.device("meta"):
        model = Stack(layers)
    return Blueprint("stack", model, list(model.blocks), styles_of(model))


def _settings(mesh: str = "dp=8", **values: Any) -> Settings:
    return Settings(mesh=WantedMesh.parse(mesh), **values)


class World:
    """A model whose bytes and seconds are known, and a count of full rehearsals."""

    def __init__(self, layers: int = 10) -> None:
        self.layers = layers
        self.full: list[Settings] = []

    def __call__(self, blueprint: Blueprint, settings: Settings) -> Measured:
        layers = len(blueprint.blocks)
        if layers == self.layers:
            self.full.append(settings)
        sharded = settings.strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)
        states = layers * (1 if sharded else 4)
        kept = {
            Checkpointing.NONE: 4,
            Checkpointing.SELECTIVE: 2,
            Checkpointing.OPERATOR: 1.5,
            Checkpointing.FULL: 1,
            Checkpointing.OFFLOAD: 0.5,
        }
        again = {
            Checkpointing.NONE: 3,
            Checkpointing.SELECTIVE: 3.1,
            Checkpointing.OPERATOR: 3.5,
            Checkpointing.FULL: 4,
            Checkpointing.OFFLOAD: 4.5,
        }
        batch, cut = settings.batch_size, settings.mesh.tensor_parallel
        activations = layers * batch * kept[settings.activation_checkpointing] / cut
        sent = layers * (2 if sharded else 1) + (cut - 1) * layers * batch
        return Measured(
            peak=(states / cut + activations + 1) * GiB,
            seconds=layers * batch * again[settings.activation_checkpointing] / cut + sent,
        )


def test_every_nth_block_is_recomputed_where_any_is() -> None:
    settings = _settings(activation_checkpointing=Checkpointing.FULL, recompute_every=2)
    found = [fit(_blueprint(), settings, gib * GiB, World())[0] for gib in (10_000, 25)]
    modes = [(each.activation_checkpointing, each.recompute_every) for each in found]
    assert modes == [(Checkpointing.NONE, 1), (Checkpointing.FULL, 2)]


def test_with_much_memory_nothing_is_recomputed_and_little_is_sent() -> None:
    found, _ = fit(_blueprint(), _settings(), 10_000 * GiB, World())
    assert found.activation_checkpointing is Checkpointing.NONE
    assert found.strategy in (Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)
    assert found.batch_size == 64


def test_what_is_found_fits_and_nothing_that_fits_is_faster() -> None:
    world, blueprint, limit = World(), _blueprint(), 60 * GiB
    best, alternatives = fit(blueprint, _settings(), limit, world)
    exact = world(blueprint, best)
    assert exact.peak <= limit
    rate = best.samples / exact.seconds
    fitting = [each for each in alternatives if each.fits]
    assert fitting
    assert all(each.tokens_per_second <= rate * 1.0001 for each in fitting)
    faster = [each for each in alternatives if not each.fits]
    assert faster
    assert all(each.peak > limit for each in faster)


def test_few_are_rehearsed_in_full() -> None:
    world = World()
    best, _ = fit(_blueprint(), _settings(), 60 * GiB, world)
    assert len(world.full) == 2
    assert best in world.full


def test_an_estimate_that_was_too_low_leads_to_the_next() -> None:
    class Surprising(World):
        def __call__(self, blueprint: Blueprint, settings: Settings) -> Measured:
            measured = super().__call__(blueprint, settings)
            first = len(blueprint.blocks) == self.layers and len(self.full) == 1
            return Measured(peak=1e15, seconds=1.0) if first else measured

    world = Surprising()
    best, _ = fit(_blueprint(), _settings(), 60 * GiB, world)
    assert len(world.full) == 3
    assert best in world.full[1:]


def test_of_two_that_fit_the_faster_one_is_returned() -> None:
    class Slower(World):
        def __call__(self, blueprint: Blueprint, settings: Settings) -> Measured:
            measured = super().__call__(blueprint, settings)
            first = len(blueprint.blocks) == self.layers and len(self.full) == 1
            return Measured(peak=measured.peak, seconds=1e6) if first else measured

    world = Slower()
    assert fit(_blueprint(), _settings(), 60 * GiB, world)[0] == world.full[1]


def test_where_nothing_fits_the_least_is_named() -> None:
    with pytest.raises(NothingFitsError, match="full checkpointing needs the least") as raised:
        fit(_blueprint(), _settings(), GiB, World())
    assert raised.value.nearest.peak > GiB
    assert raised.value.nearest.batch_size == 1


@pytest.mark.parametrize(
    ("mesh", "values", "hybrid"),
    [("dp=8", {"ranks_per_host": 8}, False), ("dp=16", {"ranks_per_host": 4}, True)],
)
def test_hybrid_sharding_is_for_several_hosts(
    mesh: str, values: dict[str, Any], hybrid: bool
) -> None:
    seen: set[Strategy] = set()

    def measure(blueprint: Blueprint, settings: Settings) -> Measured:
        seen.add(settings.strategy)
        assert settings.world.size == settings.mesh.size == WantedMesh.parse(mesh).size
        return Measured(peak=1.0, seconds=1.0)

    fit(_blueprint(), _settings(mesh, **values), GiB, measure)
    assert (Strategy.HYBRID_SHARD in seen) is hybrid


@pytest.mark.parametrize("make", [lambda: find_model("llama-tiny"), _blueprint])
def test_a_model_with_fewer_layers_has_the_rest_of_the_model(
    make: Callable[[], Blueprint],
) -> None:
    blueprint = make()
    short = shortened(blueprint, 2)
    assert short is not None
    assert len(short.blocks) == 2

    def rest(of: Blueprint) -> int:
        inside = {id(p) for block in of.blocks for p in block.parameters()}
        return sum(p.numel() for p in of.model.parameters() if id(p) not in inside)

    assert rest(short) == rest(blueprint)
    assert len(blueprint.blocks) > 2  # the model itself is as it was
    assert shortened(short, 2) is None


def test_blocks_in_a_sequence_between_others_are_shortened() -> None:
    model = nn.Sequential(nn.Linear(6, 6), *(Block() for _ in range(4)), nn.Linear(6, 6))
    short = shortened(Blueprint("sequence", model, list(model)[1:5]), 1)
    assert short is not None
    kinds = [type(module).__name__ for module in short.model.children()]
    assert kinds == ["Linear", "Block", "Linear"]
    assert all(p.is_meta for p in short.model.parameters())
