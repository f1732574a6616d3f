"""The peak of a step's memory, by formula from the layouts, on the model of an allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import fully_shard
from shardwise.sharding.state import groups_of
from shardwise.transport import select
from shardwise.transport.collectives import NcclTransport
from tests.streams.device import NAME, Device, modeled
from tests.streams.process_group import world

WIDTH = 256
BATCH = 8
#: Bytes that a tensor and a segment of small tensors take multiples of.
ROUNDING = 512
SMALL_SEGMENT = 2 * 2**20
#: The loss, and its gradient of one; of the groups whose gradients are under way, which gradients
#: this rank has, and which any rank has.
SCALARS = 4 * ROUNDING

#: By world size, depth and dtype: bytes of segments that the peak would not need without holes. The
#: peak almost fills one segment, in which no hole is as long as the last full gradient.
HOLES = {(2, 3, torch.float32): SMALL_SEGMENT}

Peaks = list[tuple[int, int]]


def round_up(number: int, multiple: int) -> int:
    """The next multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def _bytes(numel: int, dtype: torch.dtype) -> int:
    return round_up(numel * dtype.itemsize, ROUNDING)


def _peaks(
    rank: int, world_size: int, ranks: int, depth: int, reshard: bool, dtype: torch.dtype
) -> tuple[Peaks, int]:
    """Train a chain of equal matrices.

    Returns:
        Peak allocated and reserved bytes of each step, and the peak that the formula gives.
    """
    with (
        world((ranks,)) as mesh,
        mock.patch.object(select, "c10d_transport", lambda group, device: NcclTransport(group)),
        modeled(Device()) as device,
    ):
        with torch.device(NAME):
            net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for layer in net:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        peaks = []
        for _ in range(4):
            gc.collect()
            device.reset_peak()
            x = torch.randn(BATCH, WIDTH, dtype=dtype, device=NAME)
            out = net(x)
            out.sum().backward()
            del x, out
            optimizer.step()
            optimizer.zero_grad()
            peaks.append((device.peak, device.reserved))
        [layout] = {param.layout for group in groups_of(net) for param in group.params}
        shard = _bytes(layout.chunk_numel, torch.float32)
        reduced = _bytes(layout.chunk_numel, dtype)
        full = _bytes(layout.padded_numel, dtype)
        row = _bytes(BATCH * WIDTH, dtype)

    def peak_at(block: int) -> int:
        """The memory just before the gradient of a block is reduced, blocks counted from 1."""
        unsharded = min(block, 2) if reshard else block  # this one and the one before it
        grads = 1 if block == depth else 2  # this one's, and one that is being reduced
        finished = max(0, depth - block - 1)
        return (
            2 * depth * shard  # parameters and momentum
            + (unsharded + grads) * full
            + finished * shard
            + (reduced if block < depth else 0)
            + (block + 3) * row  # inputs up to this one, the output, two gradients of activations
            + SCALARS
        )

    return peaks, max(peak_at(block) for block in range(1, depth + 1))


@pytest.mark.parametrize(
    ("world_size", "depth", "reshard", "dtype"),
    [
        pytest.param(*size, reshard, dtype, marks=pytest.mark.long if (i + j + k) % 2 else ())
        for i, size in enumerate([(2, 3), (4, 3), (4, 6)])  # in turns: `make test` has all pairs
        for j, reshard in enumerate([True, False])
        for k, dtype in enumerate([torch.float32, torch.bfloat16])
    ],
    ids=str,
)
def test_the_peak_of_a_step_follows_from_the_layouts(
    ranks: Callable[..., list[Any]], world_size: int, depth: int, reshard: bool, dtype: torch.dtype
) -> None:
    [(peaks, formula)] = ranks(_peaks, 1, world_size, depth, reshard, dtype, backend=None)
    warm = peaks[1:]
    assert len(set(warm)) == 1, peaks
    peak, reserved = warm[0]
    assert peak == formula, (peak - formula, peaks)
    # All blocks are small, so segments are, too.
    assert reserved == round_up(peak, SMALL_SEGMENT) + HOLES.get((world_size, depth, dtype), 0)
