"""Blocks that are compiled, computed again in backward, or both: ``fully_shard`` comes last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardwise import FSDPModule, fully_shard
from tests.sharding.nets import Net, batches, run_backward, seeded, step_all
from tests.worlds import on_processes

# Dynamo and the compiler behind it warn of what they do themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCKS = 2
KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def _never(i: int, block: nn.Module) -> nn.Module:
    return block


def _all(i: int, block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block)


def _every_second(i: int, block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block) if i % 2 else block


def _by_operator(i: int, block: nn.Module) -> nn.Module:
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    return checkpoint_wrapper(block, context_fn=contexts)


CHECKPOINTING = [_never, _all, _every_second, _by_operator]


def _sharded(wrap: Callable[..., nn.Module], compiled: bool) -> Any:
    net = seeded(lambda: Net(BLOCKS))
    for i, block in enumerate(net.blocks):
        net.blocks[i] = wrap(i, block)
        if compiled:
            # The backend that makes graphs of forward and backward, and then no kernels of them.
            net.blocks[i].compile(backend="aot_eager")
        fully_shard(net.blocks[i])
    return fully_shard(net)


@pytest.mark.long
@on_processes(2)
def test_compiled_and_checkpointed_blocks_train_as_on_one_process(
    rank: int, world_size: int
) -> None:
    for wrap in CHECKPOINTING:
        for compiled in (False, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            what = f"{wrap.__name__}, {compiled=}"
            net, twin = _sharded(wrap, compiled), seeded(lambda: Net(BLOCKS))
            assert all(isinstance(block, FSDPModule) for block in net.blocks)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (net, twin)]
            for step in range(2):
                x = batches(world_size, step)
                run_backward(net, twin, x, rank)
                step_all(optimizers)
            pairs = zip(net.parameters(), twin.parameters(), strict=True)
            for found, wanted in pairs:
                torch.testing.assert_close(
                    found.full_tensor(), wanted.detach(), msg=lambda t, w=what: f"{w}: {t}"
                )
            frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert bool(frames) == compiled, f"{what}: {frames} graphs"
