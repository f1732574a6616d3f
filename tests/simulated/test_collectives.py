"""All collectives of torch, on simulated ranks and on processes with gloo: the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import shardwise
from tests.harness import run_ranks


def _mine(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-50, 50, shape, generator=generator).float()


def _call(name: str, older: str, *args: Any) -> None:
    """Call a function by its name in this torch."""
    getattr(dist, name if hasattr(dist, name) else older)(*args)


def _everything() -> dict[str, Any]:
    """Call everything once. Values are whole numbers, whose sums have no rounding."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}

    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        value = _mine(2, 3)
        dist.all_reduce(value, getattr(dist.ReduceOp, op))
        found[f"all_reduce {op}"] = value
    bits = _mine(4).to(torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    found["all_reduce BOR"] = bits
    work = dist.all_reduce(later := _mine(3, seed=1), async_op=True)
    assert work is not None
    work.wait()
    found["all_reduce later"] = later
    dist.reduce(total := _mine(3), dst=1)
    found["reduce"] = total if rank == 1 else None
    dist.broadcast(sent := _mine(3), src=1)
    found["broadcast"] = sent

    parts = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, _mine(2, 3).t().contiguous().t())
    found["all_gather"] = parts
    whole = torch.empty(2 * size, 3)
    _call("all_gather_single", "all_gather_into_tensor", whole, _mine(2, 3))
    found["all_gather_into_tensor"] = whole
    on_last = [torch.empty(2) for _ in range(size)] if rank == size - 1 else None
    dist.gather(_mine(2), on_last, dst=size - 1)
    found["gather"] = on_last
    own = torch.empty(2)
    dist.scatter(own, [_mine(2, seed=i) for i in range(size)] if rank == 0 else None, src=0)
    found["scatter"] = own
    reduced = torch.empty(2, 3)
    _call("reduce_scatter_single", "reduce_scatter_tensor", reduced, _mine(2 * size, 3))
    found["reduce_scatter_tensor"] = reduced
    dist.reduce_scatter(reduced, [_mine(2, 3, seed=i) for i in range(size)])
    found["reduce_scatter"] = reduced.clone()

    swapped = torch.empty(2 * size)
    dist.all_to_all_single(swapped, _mine(2 * size))
    found["all_to_all_single"] = swapped
    uneven = torch.empty(size * (rank + 1))
    given = _mine(sum(range(1, size + 1)))
    dist.all_to_all_single(uneven, given, [rank + 1] * size, list(range(1, size + 1)))
    found["all_to_all_single, uneven"] = uneven

    right, left = (rank + 1) % size, (rank - 1) % size
    arrived = torch.empty(3)
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, _mine(3), right), dist.P2POp(dist.irecv, arrived, left)]
    ):
        request.wait()
    found["batch_isend_irecv"] = arrived
    if rank == 0:
        dist.recv(any_source := torch.empty(2))
        found["recv from any"] = any_source
    elif rank == 1:
        dist.send(_mine(2), 0)
    dist.barrier()

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    told = [{"from": rank}]
    dist.broadcast_object_list(told, src=1)
    found["broadcast_object_list"] = told

    group = dist.group.WORLD
    assert group is not None
    reduced_later = functional.all_reduce(_mine(4), "sum", group)
    found["functional"] = reduced_later + 0

    subgroups = [dist.new_group([0, 1]), dist.new_group([1, 0, 2][:size])]
    for number, subgroup in enumerate(subgroups):
        value = _mine(2)
        if rank in dist.get_process_group_ranks(subgroup):
            dist.all_reduce(value, group=subgroup)
        found[f"subgroup {number}"] = value
    return found


def _as_processes(rank: int, world_size: int) -> dict[str, Any]:
    return _everything()


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_processes(world_size: int) -> None:
    expected = run_ranks(_as_processes, world_size)
    found = [rank.value for rank in shardwise.simulate(_everything, world_size)]
    for rank in range(world_size):
        assert found[rank].keys() == expected[rank].keys()
        for name, value in expected[rank].items():
            torch.testing.assert_close(
                found[rank][name], value, rtol=0, atol=0, msg=f"{name} on rank {rank}"
            )
