"""The transport of NCCL on the device, without modules: values, dtypes, paddings, host shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.transport import collectives
from shardwise.transport.base import Reduce
from shardwise.transport.collectives import NcclTransport
from shardwise.transport.peers import Peers
from shardwise.transport.select import select_transport
from tests.gpu.devices import TYPE, Devices, device

#: Some small tensors, which are packed, and some that are not. Elements: some bytes each.
LARGE = collectives.SMALL_BYTES
SIZES = [1, 7, LARGE, 3 * LARGE + 1]


def _transport() -> NcclTransport:
    assert dist.group.WORLD is not None
    return NcclTransport(dist.group.WORLD, Peers(dist.group.WORLD).backend(device()))


def _collectives(rank: int, world_size: int) -> None:
    transport = _transport()
    for dtype in (torch.float32, torch.bfloat16):
        shards = [torch.full((n,), rank + 1.0, device=device()) for n in SIZES]
        buffers = transport.full_buffers([n * world_size for n in SIZES], [dtype] * 4, device())
        for _ in range(2):  # the second time into memory that was given back
            buffers.allocate()
            transport.all_gather(shards, buffers.tensors).wait()
            for full in buffers.tensors:
                found = full.view(world_size, -1)
                expected = torch.arange(1.0, world_size + 1, device=device(), dtype=dtype)
                assert torch.equal(found, expected[:, None].expand_as(found))
            buffers.free()
        grads = [torch.full((n * world_size - 1,), rank + 1.0, device=device()) for n in SIZES]
        results = [torch.zeros(n, device=device(), dtype=dtype) for n in SIZES]
        transport.reduce_scatter(grads, results, Reduce.AVG).wait()
        for n, result in zip(SIZES, results, strict=True):
            held = n if rank < world_size - 1 else n - 1
            assert torch.all(result[:held] == (world_size + 1) / 2)
        summed = [torch.full((n,), rank + 1.0, device=device(), dtype=dtype) for n in SIZES]
        transport.all_reduce(summed, Reduce.SUM).wait()
        for each in summed:
            assert torch.all(each == world_size * (world_size + 1) / 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_collectives_move_the_right_values(devices: Devices, world_size: int) -> None:
    devices.run(_collectives, world_size)


def _selected(rank: int, world_size: int) -> str:
    return select_transport(dist.group.WORLD, device(), "c10d").name


def test_nccl_is_chosen_for_gpus(devices: Devices) -> None:
    by_backend = {"cpu:gloo,cuda:nccl": "nccl", "cpu:gloo,cuda:gloo": "collectives"}
    expected = "gloo" if TYPE == "cpu" else by_backend[devices.shared]
    assert devices.run(_selected, 2) == [expected] * 2


def _host_shards(rank: int, world_size: int) -> None:
    """Offloaded shards lie in host memory, which is pinned where there is a device to copy to."""
    shards = [torch.full((n,), rank + 1.0) for n in (3, LARGE)]
    if TYPE == "cuda":
        shards = [shard.pin_memory() for shard in shards]
    fulls = [torch.empty(n * world_size, device=device()) for n in (3, LARGE)]
    _transport().all_gather(shards, fulls).wait()
    for full in fulls:
        assert full.view(world_size, -1)[:, 0].tolist() == list(range(1, world_size + 1))


def test_shards_in_host_memory_are_gathered_on_the_device(devices: Devices) -> None:
    devices.run(_host_shards, 2)
