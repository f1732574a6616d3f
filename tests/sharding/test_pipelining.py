"""Sharded modules as stages of ``torch.distributed.pipelining``, which reaches into their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from shardwise import fully_shard
from tests.sharding.nets import Block, assert_same_gradients, seeded

Ranks = Callable[..., list[Any]]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _pipelined(rank: int, world_size: int, schedule: Any, per_rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages_in_all = 2 * per_rank
    whole = nn.Sequential(*(seeded(Block, seed=index) for index in range(stages_in_all)))
    stages = []
    for chunk in range(per_rank):
        index = mesh["pp"].get_local_rank() + 2 * chunk
        block = fully_shard(nn.Sequential(seeded(Block, seed=index)), mesh=mesh["dp"])
        stages.append(
            PipelineStage(
                block, index, stages_in_all, torch.device("cpu"), group=mesh["pp"].get_group()
            )
        )
    made = schedule(stages[0] if per_rank == 1 else stages, n_microbatches=4, loss_fn=_loss)
    generator = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, 2, 8, 6, generator=generator)  # by data parallel rank
    for _ in range(2):
        mine = mesh["dp"].get_local_rank()
        is_first = any(stage.is_first for stage in stages)
        is_last = any(stage.is_last for stage in stages)
        made.step(*([x[mine]] if is_first else []), target=target[mine] if is_last else None)
        for part in range(2):
            (_loss(whole(x[part]), target[part]) / 2).backward()
        for stage in stages:
            assert_same_gradients(stage.submod[0], whole[stage.stage_index])
            stage.submod.zero_grad()
        whole.zero_grad()


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)],
    ids=["gpipe", "1f1b", "interleaved"],
)
def test_gradients_equal_those_of_one_process(ranks: Ranks, schedule: Any, per_rank: int) -> None:
    ranks(_pipelined, 4, schedule, per_rank)
