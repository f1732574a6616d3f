"""How much memory a rank needs to build a Vision Transformer block by block, and to step it.

    python benchmarks/vit_build.py --model vit-huge --layers 20 --ranks 4

The model is built as ``shardwise train vit`` builds it: on the meta device, sharded group by group,
and given its values layer by layer. What may be held is a formula in building (the shards of the
parameters, and the largest layer whole), and in a step what its plan says. A rank's PSS counts a
page that k ranks share as 1/k. The exit code is 1 where a peak is over 5 % above that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _memory import PROMPT_MALLOC, Formula, PssSampler, pss
from _options import TRANSPORTS, positive_int
from _report import announce, document, save
from _vit_build_tables import too_high, vit_build_tables
from _worlds import World as Processes
from shardwise.app.recipes.core.build import make_adamw
from shardwise.app.recipes.core.model import (
    build_classifier,
    decoder_layers,
    initialize,
)
from shardwise.app.recipes.core.plan import plan_training
from shardwise.app.recipes.core.recipe import Example
from shardwise.app.recipes.core.training import place_for
from shardwise.app.recipes.vision.task import classification_loss
from shardwise.app.recipes.vit import shard_model
from shardwise.elastic.world import World
from shardwise.frontends.strategies import SHARD, WantedMesh
from shardwise.insight.inspect.api import Blueprint, plan
from shardwise.insight.planning.models import vit_placement
from shardwise.insight.planning.presets import VIT_PRESETS
from shardwise.insight.schema.sharding import (
    Checkpointing,
    PrecisionName,
    ShardingConfig,
    TransportName,
)
from shardwise.insight.schema.training import OptimizerConfig, OutputConfig, TrainConfig

CLASSES = 1000
STEPS = 2  # the first makes the optimizer's state
OPTIMIZER = OptimizerConfig(lr=1e-4)
SAMPLED_EVERY = 0.01  # seconds; to read the PSS of a large process takes milliseconds


@dataclass(frozen=True)
class VitCase:
    """What to build and to step.

    Attributes:
        model: a preset.
        layers: its number of blocks.
        ranks: world size.
        batch: pictures a rank.
        dtype: ``"fp32"`` or ``"bf16"``: to compute in.
        nested: every block is a group of its own.
        checkpointing: compute activations again in backward.
        transport: who moves bytes.
    """

    model: str
    layers: int
    ranks: int
    batch: int
    dtype: str
    nested: bool
    checkpointing: bool
    transport: str

    @property
    def sharding(self) -> ShardingConfig:
        """As the recipe is told it."""
        return ShardingConfig(
            param_dtype=PrecisionName(self.dtype),
            transport=TransportName(self.transport),
            activation_checkpointing=(
                Checkpointing.FULL if self.checkpointing else Checkpointing.NONE
            ),
        )

    @property
    def train(self) -> TrainConfig:
        """As the recipe is told it."""
        return TrainConfig(
            steps=STEPS,
            batch_size=self.batch,
            optimizer=OPTIMIZER,
            output=OutputConfig(out=Path("unused")),
            sharding=self.sharding,
        )

    def on_meta(self) -> Any:
        """The model without memory."""
        settings = VIT_PRESETS[self.model].settings()
        return build_classifier({**settings, "num_hidden_layers": self.layers}, CLASSES)

    def batch_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures and labels, of random numbers."""
        made = torch.Generator().manual_seed(rank)
        image = VIT_PRESETS[self.model].image
        pictures = torch.randn(self.batch, 3, image, image, generator=made)
        return pictures, torch.randint(CLASSES, (self.batch,), generator=made)


class VitWorker:
    """One rank."""

    def __init__(self, case: VitCase) -> None:
        self._case = case
        # A small one first, so that what it imports and starts is not counted.
        small = VitCase(**{**asdict(case), "model": "vit-tiny", "layers": 1, "batch": 1})
        self._batch = small.batch_of(0)
        self._model = self._built(small)
        self.prepare()
        self.step()
        del self._model, self._optimizer
        _give_back()
        self._batch = case.batch_of(dist.get_rank())

    def build(self) -> None:
        """Build the model: shards with values."""
        self._model = self._built(self._case)

    def prepare(self) -> None:
        """Make the optimizer, and its state at the first step."""
        self._optimizer = make_adamw(self._model, OPTIMIZER)

    def step(self) -> float:
        """Take an optimizer step; return the loss."""
        loss = classification_loss(self._model, self._batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def pss(self) -> int:
        """The PSS now, in bytes, once all ranks have given back what is free."""
        _give_back()
        dist.barrier()
        return pss("self")

    def _built(self, case: VitCase) -> Any:
        world = World(dist.get_rank(), case.ranks, dist.get_rank(), case.ranks)
        model = case.on_meta()
        place = place_for(case.train, world, torch.device("cpu"))
        units = decoder_layers(model) if case.nested else []
        shard_model(model, units, case.sharding, place)
        initialize(model, 0)
        return model.train()


def _give_back() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def predict(case: VitCase) -> dict[str, Any]:
    """What building should take by a formula, and a step by its plan, in bytes."""
    model = case.on_meta()
    units = decoder_layers(model) if case.nested else []
    blueprint = Blueprint(case.model, model, units, placement=vit_placement)
    layout = plan(blueprint, WantedMesh((SHARD,), (case.ranks,)))
    layer = max(
        sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
    )
    example = Example(batch=lambda count: case.batch_of(0), loss=classification_loss)
    world = World(0, case.ranks, 0, case.ranks)
    rank = plan_training(blueprint, case.train, example, world).ranks[0]
    step = Formula(
        shards=rank.parameters + rank.optimizer,
        unsharded=rank.full_parameters + rank.transport,
        gradients=rank.gradients,
        activations=rank.activations + rank.other,
    )
    return {
        "numel": layout.numel,
        "whole": layout.nbytes,
        "build": {"shards": layout.totals[0].parameters, "layer": 4 * layer},
        "step": asdict(step),
    }


def measure(case: VitCase) -> dict[str, Any]:
    """Build and step; the highest figures of all ranks."""
    with _world(case, VitWorker, case) as world:
        base = world.call("pss")
        started = time.perf_counter()
        with PssSampler(world.pids, SAMPLED_EVERY) as building:
            world.call("build")
        built = time.perf_counter() - started
        rest = world.call("pss")
        world.call("prepare")
        with PssSampler(world.pids, SAMPLED_EVERY) as stepping:
            started = time.perf_counter()
            losses = [world.call("step") for _ in range(STEPS)]
            stepped = (time.perf_counter() - started) / STEPS

    def above_base(found: list[int]) -> int:
        return max(highest - start for highest, start in zip(found, base, strict=True))

    return {
        "build": above_base(building.peaks),
        "built": above_base(rest),
        "step": above_base(stepping.peaks),
        "base": max(base),
        "build_s": built,
        "step_s": stepped,
        "losses": [sum(each) / len(each) for each in losses],
    }


def _world(case: VitCase, worker: type, *args: object) -> Processes:
    return Processes(
        case.model,
        case.ranks,
        worker,
        *args,
        env={"KINETO_LOG_LEVEL": "5", **PROMPT_MALLOC},
        exec_each=True,
    )


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--model", choices=VIT_PRESETS, default="vit-huge", help="the shape (vit-huge)")
    add("--layers", type=positive_int, help="blocks, if not those of the model")
    add("--ranks", type=positive_int, default=4, help="world size (4)")
    add("--batch", type=positive_int, default=1, help="pictures a rank (1)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="to compute in (fp32)")
    add("--no-nested-fsdp", action="store_true", help="one group, not one for each block")
    add("--transport", choices=TRANSPORTS, default="auto", help="who moves bytes (auto)")
    add("--no-checkpointing", action="store_true", help="keep activations")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    options = made.parse_args()
    if not Path("/proc/self/smaps_rollup").exists():
        made.error("this needs Linux, whose kernel tells the PSS of a process")
    return options


def main() -> int:
    options = _options()
    case = VitCase(
        model=options.model,
        layers=options.layers or VIT_PRESETS[options.model].layers,
        ranks=options.ranks,
        batch=options.batch,
        dtype=options.dtype,
        nested=not options.no_nested_fsdp,
        checkpointing=not options.no_checkpointing,
        transport=options.transport,
    )
    console = announce()
    measured = [{**asdict(case), "formula": predict(case), "measured": measure(case)}]
    content = document("vit_build", measured)
    vit_build_tables(content)[-1].show(console)
    if options.json:
        save(options.json, content)
    return 1 if too_high(content["cases"][-1]) else 0


if __name__ == "__main__":
    sys.exit(main())
