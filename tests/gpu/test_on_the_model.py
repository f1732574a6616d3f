"""The tests of a GPU's memory, on the model of a device: so much for the tests themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.transport import select
from shardwise.transport.collectives import NcclTransport
from tests.gpu import test_memory
from tests.sharding.nets import shard_blocks
from tests.streams.device import NAME, Device, modeled
from tests.streams.process_group import world
from tests.worlds import on_processes


@pytest.mark.parametrize("ranks", [1, 2])
@on_processes(1, backend=None)
def test_the_memory_of_the_model_is_what_the_layouts_promise(
    rank: int, world_size: int, ranks: int
) -> None:
    """Run the checks as rank 0 of a world of ``ranks``, with the memory figures of the model."""
    wide = test_memory.Wide

    def on_device(*args: int) -> nn.Module:
        with torch.device(NAME):
            return wide(*args)

    with (
        world((ranks,)) as mesh,
        mock.patch.object(select, "c10d_transport", lambda group, device: NcclTransport(group)),
        modeled(Device()) as model,
        mock.patch.multiple(torch.cuda, **_figures(model)),
        mock.patch.multiple(
            test_memory,
            Wide=on_device,
            device=lambda: torch.device(NAME),
            sharded=lambda net, **kwargs: shard_blocks(net, mesh=mesh, **kwargs),
        ),
    ):
        for reshard in (True, False):
            test_memory._memory(rank, ranks, reshard)


def _figures(model: Device) -> dict[str, Callable[..., Any]]:
    def allocated() -> int:
        gc.collect()
        model.sweep()
        return model.allocated

    return {
        "memory_allocated": allocated,
        "max_memory_allocated": lambda: model.peak,
        "reset_peak_memory_stats": model.reset_peak,
        "synchronize": model.synchronize_all,
    }
