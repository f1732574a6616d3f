"""The NCCL transport: its launches, on gloo in place of NCCL. tests/gpu has it on GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import c10d
from shardwise.base.devices import GLOO
from shardwise.transport import carrier, collectives
from shardwise.transport.base import Reduce
from shardwise.transport.collectives import NcclTransport
from tests.harness import run_ranks
from tests.worlds import on_processes

LARGE = collectives.SMALL_BYTES  # elements: some bytes each


@on_processes(2)
def test_large_parameters_travel_in_place_in_one_launch_and_small_ones_packed(
    rank: int, world_size: int
) -> None:
    """Record which memory each collective reads and writes, and how often there is a launch."""
    assert dist.group.WORLD is not None
    transport = NcclTransport(dist.group.WORLD, GLOO)
    pairs: list[tuple[int, int]] = []
    launches: list[object] = []

    def recording(original: Any) -> Any:
        def replacement(output: torch.Tensor, data: torch.Tensor, **kwargs: Any) -> Any:
            pairs.append((output.data_ptr(), data.data_ptr()))
            return original(output, data, **kwargs)

        return replacement

    dist.all_gather_single = recording(dist.all_gather_single)
    dist.reduce_scatter_single = recording(dist.reduce_scatter_single)
    together = c10d.coalesced

    def counted(group: dist.ProcessGroup) -> Any:
        launches.append(group)
        return together(group)

    carrier.c10d.coalesced = counted

    shards = [torch.full((LARGE + n,), float(rank)) for n in range(3)]
    shards[2] = shards[2][:-5]  # uneven: the last rows ran out
    fulls = [torch.empty((LARGE + n) * world_size) for n in range(3)]
    transport.all_gather(shards, fulls).wait()
    own = [full.chunk(world_size)[rank].data_ptr() for full in fulls]
    expected = [(full.data_ptr(), part) for full, part in zip(fulls, own, strict=True)]
    assert pairs == expected, "each parameter is gathered in place"
    assert len(launches) == 1

    pairs.clear()
    grads = [torch.ones((LARGE + n) * world_size) for n in range(3)]
    grads[2] = grads[2][:-5]
    results = [torch.empty(LARGE + n) for n in range(3)]
    transport.reduce_scatter(grads, results, Reduce.SUM).wait()
    assert [to for to, _ in pairs] == [result.data_ptr() for result in results]
    assert [read for _, read in pairs[:2]] == [grad.data_ptr() for grad in grads[:2]]
    assert pairs[2][1] != grads[2].data_ptr(), "an uneven gradient is padded, in a copy"
    assert len(launches) == 2

    pairs.clear()
    transport.all_gather([torch.ones(3)] * 20, [torch.empty(3 * world_size)] * 20).wait()
    assert len(pairs) == 1, "small parameters are packed"


@on_processes(2)
def test_a_backend_that_cannot_gather_in_place_gets_memory_apart(
    rank: int, world_size: int
) -> None:
    """Some backends forbid that the buffers of a collective overlap."""
    assert dist.group.WORLD is not None
    plain = dataclasses.replace(GLOO, gathers_in_place=False)
    ranges: list[tuple[range, int]] = []
    original = dist.all_gather_single

    def recording(output: torch.Tensor, data: torch.Tensor, **kwargs: Any) -> Any:
        ranges.append(
            tuple(range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (output, data))
        )  # type: ignore[arg-type]
        return original(output, data, **kwargs)

    dist.all_gather_single = recording
    transport = collectives.CollectivesTransport(dist.group.WORLD, plain)
    for dtypes in ([torch.float32], [torch.float32, torch.bfloat16]):
        fulls = [torch.empty(3 * world_size, dtype=dtype) for dtype in dtypes]
        transport.all_gather([torch.full((3,), rank + 1.0)] * len(dtypes), fulls).wait()
        for full in fulls:
            assert full.view(world_size, 3).tolist() == [[r + 1] * 3 for r in range(world_size)]
    assert len(ranges) == 2
    assert all(own not in output for output, own in ranges)


def _padding(rank: int, world_size: int) -> float:
    """The rest of the chunk of a short shard is sent as zeros."""
    assert dist.group.WORLD is not None
    full = torch.full((4 * world_size,), float("nan"))
    NcclTransport(dist.group.WORLD, GLOO).all_gather([torch.ones(3)], [full]).wait()
    return float(full.sum())


def test_padding_is_zeros_for_tools_that_look_for_nan() -> None:
    assert run_ranks(_padding, 2) == [6.0, 6.0]
