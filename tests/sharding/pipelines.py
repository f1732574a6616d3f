"""Stages of a pipeline that are sharded, and the same model on one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import fully_shard
from tests.sharding.nets import WIDTH, assert_same_gradients, seeded

MICROBATCHES = 4
ROWS = 8

#: By name: the class, and the stages of each of two ranks.
SCHEDULES: dict[str, tuple[Any, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "gpipe": (ScheduleGPipe, ((0,), (1,))),
    "1f1b": (Schedule1F1B, ((0,), (1,))),
    "interleaved": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "zero bubble": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "zero bubble, v": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}


class StageBlock(nn.Module):
    """A block of which a gradient of one parameter needs the values of another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.gains
        return x + self.down(self.up(self.norm(x)).relu()) * (first * second)


class Stage(nn.Module):
    """Two blocks and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StageBlock() for _ in range(2))
        self.bias = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.bias


@dataclasses.dataclass
class Pipeline:
    """This rank's stages, and the whole model.

    Attributes:
        schedule: made of the stages.
        stages: this rank's.
        whole: all stages, on one process.
        rank: this rank among those that have data of their own.
        world_size: how many those are.
        keeps: whether stages are kept unsharded in a step.
    """

    schedule: Any
    stages: Sequence[PipelineStage]
    whole: nn.Sequential
    rank: int
    world_size: int
    keeps: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        stages: DeviceMesh,
        data: DeviceMesh,
        tensor: DeviceMesh | None = None,
        **kwargs: Any,
    ) -> Pipeline:
        """Cut a model into the stages of the schedule ``name``, and shard this rank's.

        Args:
            name: among :data:`SCHEDULES`.
            stages: the mesh of two ranks over which stages are dealt.
            data: the mesh to shard over, 1-D or 2-D.
            tensor: the mesh of tensor parallelism, which comes first, if there is one.
            kwargs: of ``fully_shard``.
        """
        schedule, dealt = SCHEDULES[name]
        count = sum(map(len, dealt))
        made = []
        for index in dealt[stages.get_local_rank()]:
            module = seeded(Stage, seed=index)
            for block in module.blocks:
                if tensor is not None:
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(block, tensor, plan)
                fully_shard(block, mesh=data, **kwargs)
            fully_shard(module, mesh=data, **kwargs)
            device, group = torch.device("cpu"), stages.get_group()
            made.append(PipelineStage(module, index, count, device, group=group))
        given = made if issubclass(schedule, _MULTI) else made[0]
        return cls(
            schedule=schedule(given, n_microbatches=MICROBATCHES, loss_fn=_loss),
            stages=made,
            whole=nn.Sequential(*(seeded(Stage, seed=index) for index in range(count))),
            rank=_rank_in(data),
            world_size=data.size(),
        )

    def step(self, number: int) -> None:
        """One step of both; compares all gradients of this rank's stages, and drops them."""
        generator = torch.Generator().manual_seed(number)
        x, target = torch.randn(2, self.world_size, ROWS, WIDTH, generator=generator)
        first = [x[self.rank]] if any(stage.is_first for stage in self.stages) else []
        last = target[self.rank] if any(stage.is_last for stage in self.stages) else None
        with contextlib.ExitStack() as held:
            for stage in self.stages if self.keeps else ():
                held.enter_context(stage.submod.keep_unsharded())
            self.schedule.step(*first, target=last)
        for part in range(self.world_size):
            (_loss(self.whole(x[part]), target[part]) / self.world_size).backward()
        stages = {str(stage.stage_index): stage.submod for stage in self.stages}
        twins = {name: self.whole[int(name)] for name in stages}
        assert_same_gradients(nn.ModuleDict(stages), nn.ModuleDict(twins))
        for stage in self.stages:
            stage.submod.zero_grad()
        self.whole.zero_grad()


_MULTI = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _rank_in(data: DeviceMesh) -> int:
    coordinate = data.get_coordinate()
    assert coordinate is not None
    rank = 0
    for index, size in zip(coordinate, data.shape, strict=True):
        rank = rank * size + index
    return rank
