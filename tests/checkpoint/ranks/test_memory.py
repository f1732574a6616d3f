"""No rank holds more than its shard and a piece of bounded size, as the kernel counts memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardwise import checkpoint, fully_shard
from tests.worlds import Ranks

MIB = 2**20
WIDTH = 4096  # 64 MiB a matrix
EXTRA = 24 * MIB  # what the allocator, threads and plans may take beside the buffer
BUFFER = 1 * MIB

pytestmark = [
    pytest.mark.usefixtures("new_ranks"),
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="peaks come from Linux's /proc"
    ),
]


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def extra_memory(action: Callable[[], Any]) -> int:
    """Bytes that the resident memory rose by, at most, while something was done."""
    Path("/proc/self/clear_refs").write_text("5")  # the record of the peak begins anew
    before = _kib("VmRSS")
    action()
    return _kib("VmHWM") - before


def _build(dim: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,)), "reshard_after_forward": True}
    for layer in model:
        fully_shard(layer, shard_placement_fn=lambda _: Shard(dim), **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _measure(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    rows, rows_optimizer = _build(0)
    columns, columns_optimizer = _build(1)
    small = nn.Linear(2, 2)
    checkpoint.save(folder / "small", small)  # imports, threads and groups are not counted
    checkpoint.load(folder / "small", small)
    found = {
        "save": extra_memory(lambda: checkpoint.save(folder / "a", rows, rows_optimizer)),
        "load": extra_memory(
            lambda: checkpoint.load(folder / "a", rows, rows_optimizer, buffer=BUFFER)
        ),
        "load into other shards": extra_memory(
            lambda: checkpoint.load(folder / "a", columns, columns_optimizer, buffer=BUFFER)
        ),
        "save other shards": extra_memory(
            lambda: checkpoint.save(folder / "b", columns, columns_optimizer)
        ),
    }
    for one, other in zip(rows.parameters(), columns.parameters(), strict=True):
        assert torch.equal(one.to_local().sum(1), rows_of(other, rank)), "the values are right too"
    return found


def rows_of(param: Any, rank: int) -> torch.Tensor:
    """The sums of this rank's rows, of a parameter that is cut along columns."""
    return param.full_tensor().chunk(2)[rank].sum(1)


def test_saving_and_loading_take_a_buffer_and_no_more(ranks: Ranks, tmp_path: Path) -> None:
    # A rank's shards and their momenta are 128 MiB, a piece is 32 MiB.
    for found in ranks(_measure, 2, tmp_path):
        for what, extra in found.items():
            assert extra < EXTRA + BUFFER, f"{what} took {extra / MIB:.0f} MiB"
