"""A Vision Transformer is built block by block: the same on any mesh, and never whole anywhere."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

from shardwise import fully_shard
from shardwise.app.recipes.core.build import program_of, shard, shard_bytes
from shardwise.app.recipes.core.model import build_classifier, decoder_layers, initialize
from shardwise.app.recipes.core.plan import describe, plan_training
from shardwise.app.recipes.core.recipe import Example, TrainContext
from shardwise.app.recipes.core.training import place_for
from shardwise.app.recipes.vision import config as vision_config
from shardwise.app.recipes.vision.config import VitConfig
from shardwise.app.recipes.vision.task import classification_loss
from shardwise.elastic.world import World
from shardwise.frontends.strategies import SHARD, Strategy, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.inspect.read import plan
from shardwise.insight.inspect.report import Report
from shardwise.insight.planning.memory import RankBytes
from shardwise.insight.planning.models import vit_placement
from shardwise.insight.planning.presets import RESNETS, VIT_PRESETS
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.sharding import (
    Checkpointing,
    ShardingConfig,
    TransportName,
    resolve_sharding,
)
from shardwise.insight.schema.training import Existing, OptimizerConfig, OutputConfig, TrainConfig
from tests.checkpoint.ranks.test_memory import MIB, extra_memory
from tests.cli.shell import call
from tests.recipes.running import as_after, train
from tests.recipes.small import losses, train_config
from tests.recipes.snapshots import small_vit
from tests.worlds import Ranks

#: Nothing of it is divided evenly by 4 ranks, or by 2.
UNEVEN = {
    "model_type": "vit",
    "hidden_size": 21,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 15,
    "patch_size": 5,
}
CLASSES = 7

on_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks come from Linux's /proc"
)


# -- what is built ---------------------------------------------------------------------------------


def _whole(settings: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The parameters of the model that one process builds whole, by its own rules."""
    model = build_classifier(settings, CLASSES).to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.apply(model._init_weights)
    return dict(model.named_parameters())


def _planned(model: PreTrainedModel, ranks: int, nested: bool = True) -> Report:
    blocks = decoder_layers(model) if nested else []
    return plan(
        Blueprint("vit", model, blocks, placement=vit_placement), WantedMesh((SHARD,), (ranks,))
    )


def _built(
    model: PreTrainedModel,
    config: ShardingConfig,
    place: TrainContext,
    nested: bool = True,
    seed: int = 0,
) -> torch.optim.Optimizer:
    layers = decoder_layers(model)
    blueprint = Blueprint("vit", model, layers if nested else [], placement=vit_placement)
    program = program_of(blueprint, _train(config), place, classification_loss)
    shard(program, place)
    initialize(model, seed)
    optimizer = program.make_optimizer()
    assert optimizer is not None
    return optimizer


def _train(config: ShardingConfig) -> TrainConfig:
    return TrainConfig(
        steps=1,
        batch_size=1,
        optimizer=OptimizerConfig(lr=1e-3),
        output=OutputConfig(out=Path("out")),
        sharding=config,
    )


def _place(config: ShardingConfig, rank: int, world_size: int) -> TrainContext:
    world = World(rank, world_size, rank, world_size)
    return place_for(_train(config), world, torch.device("cpu"))


#: By the number of replicas, whether every block is a group of its own.
NESTED = {4: True, 2: False, 1: True}


def _build_on_meshes(rank: int, world_size: int, planned: Mapping[int, list[int]]) -> None:
    expected = _whole(UNEVEN, seed=3)
    images = torch.randn(2, 3, 15, 15, generator=torch.Generator().manual_seed(rank))
    losses = set()
    for replicas, nested in NESTED.items():
        strategy = Strategy.FULL_SHARD if replicas == 1 else Strategy.HYBRID_SHARD
        config = ShardingConfig(strategy=strategy, replicas=replicas)
        plan = resolve_sharding(config, world_size)
        model = build_classifier(UNEVEN, CLASSES)
        _built(model, config, _place(config, rank, world_size), nested, seed=3)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name]), f"{name} over {plan}"
        position = rank % plan.shape[-1]
        assert shard_bytes(model) == planned[replicas][position], plan
        losses.add(classification_loss(model, (images, torch.tensor([1, 5]))).item())
    assert len(losses) == 1, "cut as it may be, it is one model"


def test_what_is_built_over_one_two_and_four_ranks_is_the_model_built_whole(ranks: Ranks) -> None:
    planned = {
        replicas: [
            total.parameters
            for total in _planned(build_classifier(UNEVEN, CLASSES), 4 // replicas, nested).totals
        ]
        for replicas, nested in NESTED.items()
    }
    ranks(_build_on_meshes, 4, planned)


def test_presets_have_the_sizes_that_they_are_called_by() -> None:
    sizes = {
        name: sum(p.numel() for p in build_classifier(settings, 1000).parameters())
        for name, settings in {**VIT_PRESETS, **RESNETS}.items()
    }
    of_vits = [sizes[name] for name in VIT_PRESETS]
    assert of_vits == sorted(of_vits), "as ``--help`` lists them"
    # As published, for 1000 classes.
    assert sizes["resnet18"] == 11_689_512
    assert sizes["resnet34"] == 21_797_672
    assert sizes["resnet50"] == 25_557_032
    assert sizes["resnet101"] == 44_549_160
    assert sizes["resnet152"] == 60_192_808
    assert sizes["vit-tiny"] == 5_717_416
    assert sizes["vit-small"] == 22_050_664
    assert sizes["vit-base"] == 86_567_656
    assert sizes["vit-large"] == 304_326_632
    assert sizes["vit-huge"] == 632_045_800
    assert round(sizes["vit-1b"] / 1e9, 1) == 1.0
    assert round(sizes["vit-2b"] / 1e9, 1) == 1.8
    # XLA's example has the mean of all patches in place of a class token and its position.
    assert sizes["vit-10b"] - 2 * 5120 == 10_077_917_160


def test_settings_that_transformers_refuses_are_named() -> None:
    with pytest.raises(OptionError, match="--model: found settings that transformers cannot use"):
        build_classifier({**UNEVEN, "hidden_size": "wide"}, CLASSES)


# -- what is held ----------------------------------------------------------------------------------

WIDE = {**UNEVEN, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
WIDE |= {"num_hidden_layers": 8}
EXTRA = 16 * MIB  # what threads, hooks and messages may take


def _measure(rank: int, world_size: int, stored: int, needed: RankBytes) -> dict[str, int]:
    """Bytes that a rank held at most in building and in a step, beside its shards."""
    libc = ctypes.CDLL(None)
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: what is freed is given back
        libc.mallopt(option, 65536)
    # Over gloo each rank has its memory to itself, so that resident memory can be counted.
    config = ShardingConfig(transport=TransportName.C10D)
    place = _place(config, rank, world_size)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        classification_loss(model, _images(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    small = build_classifier(UNEVEN, CLASSES)  # imports, connections and threads are not counted
    step(small, _built(small, config, place))
    gc.collect()
    model = build_classifier(WIDE, CLASSES)
    made: list[torch.optim.Optimizer] = []
    found = {"build": extra_memory(lambda: made.append(_built(model, config, place)))}
    (optimizer,) = made
    step(model, optimizer)  # makes the optimizer's state
    gc.collect()
    found["step"] = stored + needed.optimizer + extra_memory(lambda: step(model, optimizer))
    return found


def _images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 3, 15, 15), torch.zeros(count, dtype=torch.int64)


@on_linux
@pytest.mark.long
def test_a_rank_holds_its_shards_and_a_layer_while_building_and_what_was_planned_in_a_step(
    ranks: Ranks,
) -> None:
    model = build_classifier(WIDE, CLASSES)
    layer = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    layout = _planned(model, 4)
    whole, stored = layout.nbytes, layout.totals[0].parameters
    sharding = ShardingConfig(transport=TransportName.C10D)
    given = train_config(Path("out"), {"batch_size": 1}, OptimizerConfig(lr=1e-3))
    train = dataclasses.replace(given, sharding=sharding)
    blueprint = Blueprint("vit", model, decoder_layers(model), placement=vit_placement)
    example = Example(batch=_images, loss=classification_loss)
    [needed, *_] = plan_training(blueprint, train, example, World(0, 4, 0, 4)).ranks
    for found in ranks(_measure, 4, stored, needed):
        assert found["build"] < stored + layer * 4 + EXTRA < whole / 1.5
        assert found["step"] < needed.peak + EXTRA
    # Else the limit would say nothing: all blocks unsharded, and all their gradients.
    assert needed.peak + 2 * EXTRA < whole * 3


# -- what is told of any number of ranks -----------------------------------------------------------


@functools.cache
def _told(world_size: int) -> str:
    config = VitConfig.for_model("vit-10b")
    world = World(0, world_size, 0, world_size)
    return describe(config.blueprint(), config.train, config.example(), world)


_ROW = re.compile(
    r"^(?:(?P<name>\S.*?) +(?P<groups>\d+) +(?P<numel>[\d,]+) +(?P<padding>[\d,]+))? +"
    r"(?P<first>\d+)(?:-(?P<last>\d+))? +(?P<held>[\d,]+) +[\d.,]+ *$"
)


def _rows(text: str) -> dict[str, dict[str, int]]:
    """Of every row of the table: its groups, its parameters, and what all ranks hold of them."""
    rows: dict[str, dict[str, int]] = {}
    name = ""
    for line in text.splitlines():
        if match := _ROW.match(line):
            found = {
                k: int(v.replace(",", ""))
                for k, v in match.groupdict().items()
                if v and k != "name"
            }
            if match["name"]:
                name = match["name"]
                rows[name] = {"groups": found["groups"], "numel": found["numel"], "held": 0}
            count = found.get("last", found["first"]) - found["first"] + 1
            rows[name]["held"] += count * found["held"]
    return rows


def _assert_adds_up(text: str) -> None:
    """Check what is told of the model with 10 billion parameters, over any number of ranks."""
    rows = _rows(text)
    whole = rows.pop("total")
    assert whole["numel"] == whole["held"] == 10_077_927_400
    assert sum(row["groups"] * row["numel"] for row in rows.values()) == whole["numel"]
    assert all(row["held"] == row["numel"] for row in rows.values()), rows
    table = text.partition("memory of a rank")[0]
    assert len(table.splitlines()) < 20, "of 128 ranks and 33 groups, equal ones share a row"


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 96])
def test_what_is_printed_adds_up_to_the_model(world_size: int) -> None:
    _assert_adds_up(_told(world_size))


@functools.cache
def _vit_10b() -> Report:
    return _planned(build_classifier(VIT_PRESETS["vit-10b"], 1000), 128)


def _sharded_for(rank: int, world_size: int, of: list[int]) -> dict[int, int]:
    """Bytes that the runtime itself gives to some ranks of a world that is only pretended."""
    held = {}
    for each in of:
        dist.init_process_group("fake", rank=each, world_size=128, store=FakeStore())
        mesh = init_device_mesh("cpu", (128,))
        model = build_classifier(VIT_PRESETS["vit-10b"], 1000)
        for module in (*decoder_layers(model), model):
            fully_shard(
                module, mesh=mesh, shard_placement_fn=vit_placement, transport="collectives"
            )
        held[each] = shard_bytes(model)
        dist.destroy_process_group()
    return held


def test_what_is_told_of_128_ranks_is_what_the_runtime_gives_them(ranks: Ranks) -> None:
    totals = _vit_10b().totals
    [held] = ranks(_sharded_for, 1, [0, 124, 125], backend=None)
    assert held == {rank: totals[rank].parameters for rank in held}
    assert held[0] > held[125], "the classifier's 1000 rows are not divided evenly"


@pytest.mark.long
def test_the_guide_shows_what_the_command_prints_and_that_adds_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "vision.md").read_text()
    [(command, expected)] = re.findall(r"```console\n\$ (shardwise .*)\n([^`]*)```", guide)
    monkeypatch.chdir(tmp_path)
    assert call(*command.split()[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == expected.splitlines()
    assert max(map(len, expected.splitlines())) <= 80
    _assert_adds_up(expected)
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_one_row_is_not_left_to_one_rank() -> None:
    """Class token and positions, (1, n, hidden), would be gathered into 128 times their size."""
    for name in ("cls_token", "position_embeddings"):
        tiling = _vit_10b().find(f"vit.embeddings.{name}").tiling
        assert tiling.padding == 0
        assert tiling.by_rank[0].shape == tiling.by_rank[127].shape


# -- what is learned -------------------------------------------------------------------------------


def _train_all(rank: int, world_size: int, runs: list[VitConfig], resumed: VitConfig) -> list[str]:
    """Train; and go on with the first run, as if it had ended after its third step."""
    vision_config.FAKE_CLASSES = 100  # to draw what was mistaken for what of 1000 takes 5 s
    ends = train(rank, world_size, *runs)
    if rank == 0:
        as_after(3, runs[0], resumed)
        resumed.files.weights.unlink()
    dist.barrier()
    return [*ends, *train(rank, world_size, resumed)]


def test_a_transformer_learns_and_goes_on_and_its_file_alone_knows_as_much(
    ranks: Ranks, tmp_path: Path
) -> None:
    plain = small_vit(tmp_path, "plain", steps=6, checkpoint_every=3)
    variants: dict[str, dict[str, Any]] = {
        "one-group": {"nested": False},
        "checkpointed": {"activation_checkpointing": Checkpointing.FULL},
    }
    same = [small_vit(tmp_path, name, steps=6, **each) for name, each in variants.items()]
    fake = small_vit(tmp_path, "fake", data_dir=None, fake_data=True, steps=1, layers=1)
    resumed = small_vit(tmp_path, "resumed", steps=6, checkpoint_every=3, existing=Existing.RESUME)
    runs = [plain, *same, fake]
    ended = ranks(_train_all, 2, runs, resumed, pg_timeout=120)  # rank 0 copies a run meanwhile
    assert ended == [["finished"] * 5] * 2

    assert [step for step, *_ in losses(plain)] == list(range(1, 7))
    assert [session["from_step"] for session in resumed.files.read()["sessions"]] == [0, 3]
    session = plain.files.read()["sessions"][-1]
    assert session["accuracy"] == session["accuracy_of_file"] > 0.8
    assert plain.files.confusion.read_bytes().startswith(b"\x89PNG")
    whole = load_file(plain.files.weights)
    for config in (*same, resumed):
        for found, expected in zip(losses(config), losses(plain), strict=True):
            assert found == pytest.approx(expected, rel=1e-6), config.train.output.out.name
        for name, found in load_file(config.files.weights).items():
            torch.testing.assert_close(found, whole[name], msg=f"{name} of {config.files.root}")
    assert losses(resumed) == losses(plain)
    assert losses(fake)[0][1] == pytest.approx(math.log(100), rel=0.1)

    # What was written is what others load, without any shards.
    model = ViTForImageClassification(ViTConfig(**plain.settings(), num_labels=3))
    model.load_state_dict(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 7}, "--image-size: found 32, expected a multiple of 7, the patch size"),
        ({"patch_size": 0}, "--patch-size: found 0, expected 1 or more"),
        ({"layers": 0}, "--layers: found 0, expected 1 or more"),
        ({"model": "vit-10"}, "--model: found vit-10, expected .*; did you mean vit-10b?"),
        ({"data_dir": None}, "--data-dir: found none, expected a folder with train and val, or"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        small_vit(tmp_path, **changes).check(World(0, 1, 0, 1))
