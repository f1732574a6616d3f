"""Sharded modules as stages of ``torch.distributed.pipelining``, which reaches into their state."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.parity.test_collectives import counting
from tests.sharding.pipelines import SCHEDULES, Pipeline
from tests.worlds import on_processes, on_threads


@on_threads(4)
def test_gradients_equal_those_of_one_process(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for i, name in enumerate(SCHEDULES):  # with and without resharding in turns
        pipeline = Pipeline.of(name, mesh["pp"], mesh["dp"], reshard_after_forward=i % 2 == 1)
        print(name)
        pipeline.step(0)
        pipeline.keeps = True
        pipeline.step(1)


@on_processes(4)
def test_gradients_are_reduced_once_a_step(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with counting() as count:
        for name in SCHEDULES:
            pipeline = Pipeline.of(name, mesh["pp"], mesh["dp"], transport="collectives")
            pipeline.step(0)  # the first runs each stage once more, to see what it returns
            count.clear()
            pipeline.step(1)
            groups = 3 * len(pipeline.stages)
            assert count["reduce-scatter"] == groups, f"{name}: {count}"
            assert count["all-reduce"] == 0, f"{name}: {count}"
            if name == "1f1b" and mesh["pp"].get_local_rank() == 1:
                # Forward and backward of the first microbatch; then they stay until the step ends.
                assert count["all-gather"] == 2 * 2 + 1, f"{name}: {count}"


@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 1, 2),
        pytest.param((2, 1, 4, 1), marks=pytest.mark.long),
        pytest.param((2, 1, 2, 2), marks=pytest.mark.long),
        pytest.param((2, 2, 2, 1), marks=pytest.mark.long),
    ],
    ids=str,
)
@on_threads(8)
def test_with_hybrid_sharding_and_tensor_parallelism(
    rank: int, world_size: int, shape: tuple[int, ...]
) -> None:
    names = ("pp", "replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    hybrid, tensor = shape[1] > 1, shape[3] > 1
    data = mesh["replicate", "shard"] if hybrid else mesh["shard"]
    kept = 2 if shape[2] == 4 else True  # between forward and backward on fewer ranks
    for name in ("1f1b", "zero bubble, v") if kept == 2 else ("zero bubble, v",):
        print(f"{name} on {shape}")
        pipeline = Pipeline.of(
            name, mesh["pp"], data, mesh["tp"] if tensor else None, reshard_after_forward=kept
        )
        for step in range(2):
            pipeline.step(step)
