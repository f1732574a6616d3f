"""Whatever a training is asked for, its plan sends what its steps send: the same program."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import materialize
from shardwise.app.recipes.core.build import program_of, shard
from shardwise.app.recipes.core.plan import settings_for
from shardwise.app.recipes.core.recipe import Example
from shardwise.app.recipes.core.training import place_for
from shardwise.app.recipes.text.published import Frozen
from shardwise.base import observe
from shardwise.base.errors import NotPossibleError
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Checkpointing, Strategy
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.events import Op, Start, StepPhase
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.program import TrainingStep
from shardwise.insight.schema.option import Config, OptionError
from shardwise.insight.schema.sharding import (
    Gathers,
    PrecisionName,
    ShardingConfig,
    Stepping,
    TransportName,
    resolve_sharding,
)
from shardwise.insight.schema.training import (
    DilocoConfig,
    OptimizerConfig,
    OptimizerName,
    OutputConfig,
    TrainConfig,
)
from tests.planning.counted import Block, Counts
from tests.recipes.small import ONE_BLOCK, RECIPES, train_config
from tests.worlds import Ranks

# Replicas that train apart are what DiLoCo is for.
pytestmark = pytest.mark.filterwarnings("ignore:nothing is averaged over")

#: Options that change what a step computes or sends, and values of each. The first is usual.
VARIED: Mapping[str, Sequence[Any]] = {
    "strategy": tuple(Strategy),
    "reshard_after_forward": (None, 2),
    "frozen": (Frozen.GATHER, Frozen.KEEP),
    "shard_dtype": (PrecisionName.FP32, PrecisionName.BF16),
    "param_dtype": (None, PrecisionName.BF16),
    "reduce_dtype": (PrecisionName.FP32, PrecisionName.BF16),
    # Inputs on a disk are memory that no transport and no allocator counts.
    "activation_checkpointing": tuple(each for each in Checkpointing if each.value != "offload"),
    "recompute_every": (1, 2),
    "offload": (None, "host"),
    "offload_parameters": (None, "host"),
    "master_dtype": (None, PrecisionName.FP32),
    "accumulate": (1, 2),
    "stepping": tuple(Stepping),
    "algorithm": tuple(OptimizerName),
    "momentum": (None, 0.0),
    "param_groups": ((), ("*first.weight:lr=0.1", "*bias:weight_decay=0.5")),
    "clip_grad": (1.0, 0.0),
}
#: Options of which messages between processes depend, or more memory than that of a step:
#: ``tests/recipes/test_planned_steps.py`` has those.
SENT_OTHERWISE = {
    *("transport", "collective_wire", "replicas", "mesh", "diloco", "compile"),
    "offload_activations",
} | {field.name for field in dataclasses.fields(DilocoConfig)}
#: Options that choose the model and its batches, which a plan takes from the recipe.
MODELS_AND_BATCHES = {
    *("model", "pretrained", "tokenizer", "seq_length", "image_size", "patch_size", "layers"),
    *("nested", "lora", "base", "packing", "batch_size", "fake_data", "logits"),
}
#: Options on which no step depends.
BESIDE = {
    *("data", "eval_data", "data_dir", "chat", "streams", "shuffle_buffer", "batch_tokens"),
    *("threads", "eval_batch_size", "prompt", "sample_tokens", "temperature", "merge"),
    *("steps", "epochs", "seed", "device", "peak_flops", "peer_timeout", "over_hosts"),
    *("warmup_epochs", "drop_epochs", "drop_factor"),
    *("lr", "warmup", "schedule", "decay_steps", "min_lr", "beta1", "beta2", "weight_decay"),
} | {field.name for field in dataclasses.fields(OutputConfig)}


def _options(config: Config) -> Iterator[str]:
    """The names of all options, those of the configurations inside too."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        yield from _options(value) if isinstance(value, Config) else [field.name]


def test_every_option_of_a_training_is_known_here() -> None:
    found = {option for config in RECIPES.values() for option in _options(config)}
    known = VARIED.keys() | SENT_OTHERWISE | MODELS_AND_BATCHES | BESIDE
    new = sorted(found - known)
    assert not new, f"say in one of the tables whether a step depends on {', '.join(new)}"


#: Names of options, and what each is given.
Given = Mapping[str, Any]
#: How often each collective is called: what it is, its dimension and ranks, its group and bytes.
Calls = Counter[tuple[str, str, int, str, int]]

RANKS = 4
_COUNTED = 3  # steps, of which the last one counts: then optimizers have their states


def _train(given: Given) -> TrainConfig:
    settings = {name: value for name, value in given.items() if name != "frozen"}
    # Others convert while they send, as simulated ranks do not.
    settings["transport"] = TransportName.COLLECTIVES
    strategy = given.get("strategy", Strategy.FULL_SHARD)
    if strategy.is_hybrid:
        settings["replicas"] = 2
    if strategy is Strategy.DILOCO:
        settings["diloco"] = DilocoConfig()
    return train_config(Path("out"), {"steps": 4, **settings}, OptimizerConfig(lr=1e-2))


def _is_possible(given: Given) -> bool:
    try:
        train = _train(given)
        train.check_values()
        resolve_sharding(train.sharding, RANKS)
        settings_for(train, _example(), WORLD)
    except (NotPossibleError, OptionError):
        return False
    return True


def _each_value_once() -> list[Given]:
    """A few trainings, in which every option has each of its values."""
    left = {name: list(values[1:]) for name, values in VARIED.items()}
    found = []
    while any(left.values()):
        row: dict[str, Any] = {}
        for name, values in left.items():
            fits = next((each for each in values if _is_possible({**row, name: each})), None)
            if fits is not None:
                row[name] = fits
                values.remove(fits)
        assert row, f"no training is possible with {left}"
        found.append(row)
    return found


def _each_pair(seed: int) -> list[Given]:
    """Trainings in which any two options have any two values that are possible together."""
    draw = random.Random(seed)
    left = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(VARIED, 2)
        for a, b in itertools.product(VARIED[one], VARIED[other])
        if _is_possible({one: a, other: b})
    }
    found = []
    while left:
        row = dict(draw.choice(sorted(left, key=str)))
        for name in draw.sample(list(VARIED), len(VARIED)):
            values = [each for each in VARIED[name] if _is_possible({**row, name: each})]
            if name not in row and values:
                row[name] = max(values, key=lambda each: _covered({**row, name: each}, left))
        left -= set(itertools.permutations(row.items(), 2))
        found.append(row)
    return found


def _covered(row: Given, left: set[Any]) -> int:
    return len(left & set(itertools.permutations(row.items(), 2)))


WORLD = World(0, RANKS, 0, RANKS)


def _blueprint() -> Blueprint:
    """Two blocks of odd sizes with a scalar in each, and a head; one matrix is frozen."""
    with torch.device("meta"):
        blocks = [Block(24, 42), Block(24, 42)]
        model = nn.Sequential(*blocks, nn.Linear(24, 5))
    blocks[0].second.requires_grad_(requires_grad=False)
    return Blueprint("two blocks", model, blocks)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def _example() -> Example:
    return Example(batch=lambda count: torch.ones(count, 24), loss=_loss)


def _sent(rank: int, world_size: int, given: Given) -> Calls:
    """What a rank of the training sends in a step."""
    train, counts = _train(given), Counts()
    with observe.observing(counts):
        place = place_for(train, World(rank, world_size, rank, world_size), torch.device("cpu"))
        program = program_of(_blueprint(), train, place, _loss)
        model = shard(program, place)
        materialize(program.model, init=_ones)
        if given.get("frozen") is Frozen.KEEP:
            model.set_reshard_after_forward(reshard_after_forward=False)
            program = dataclasses.replace(program, gathers=Gathers.EVERY_STEP)
        step = TrainingStep(program=program, optimizer=program.make_optimizer())
        for _ in range(_COUNTED):
            counts.start()
            batches = [torch.ones(2, 24) for _ in range(train.accumulate)]
            list(step.backward(batches, train.accumulate, train.accumulate))
            step.norm()
            step.update()
    # Simulated ranks call an exchange in which they have nothing to send; messages are not sent.
    return Counter({key[:5]: number for key, number in counts.sent.items() if key[4]})


def _ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def _planned(given: Given) -> Calls:
    """What its plan says."""
    settings = settings_for(_train(given), _example(), WORLD)
    if given.get("frozen") is Frozen.KEEP:
        settings = dataclasses.replace(
            settings, gathers=Gathers.EVERY_STEP, reshard_after_forward=False
        )
    events = rehearse(_blueprint(), settings).events
    return Counter(
        (each.activity.value, each.dimension, each.ranks, each.group, each.nbytes)
        for each in events
        if isinstance(each, Start) and each.nbytes
    )


def _check(threads: Ranks, trainings: Sequence[Given]) -> None:
    differ = []
    for given in trainings:
        sent, planned = threads(_sent, RANKS, given)[0], _planned(given)
        if sent != planned:
            differ.append({"of": given, "planned": planned - sent, "sent": sent - planned})
    assert not differ


def test_a_plan_sends_what_the_training_sends_with_every_option(threads: Ranks) -> None:
    _check(threads, _each_value_once())


@pytest.mark.long
def test_a_plan_sends_what_the_training_sends_with_any_two_options(threads: Ranks) -> None:
    _check(threads, _each_pair(seed=0))


@pytest.mark.parametrize("recipe", ["mnist", "vit"])
def test_the_blocks_of_a_model_that_is_one_group_are_recomputed_in_its_plan(recipe: str) -> None:
    sharding = ShardingConfig(activation_checkpointing=Checkpointing.FULL)
    given: Any = RECIPES[recipe].with_train(sharding=sharding)
    small = ONE_BLOCK.get(recipe, {})
    config = dataclasses.replace(given, nested=False, **small)
    settings = settings_for(config.train, config.example(), WORLD)
    events = rehearse(config.blueprint(), settings).events
    assert any(isinstance(each, Op) and each.phase is StepPhase.RECOMPUTE for each in events)
