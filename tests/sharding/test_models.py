"""What programs do with a model, against an unsharded twin.

What models do by themselves is in ``tests/corpus``, and trained by ``tests/parity``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise.sharding.states import GroupState
from tests.corpus.gathering import wholes
from tests.corpus.models import MODELS, make_model
from tests.sharding.nets import (
    Block,
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    group_of,
    loss_of,
    run_backward,
    seeded,
    step_all,
    train_alike,
    twins,
)
from tests.worlds import on_processes, on_threads

# -- which parameters train --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapters", "adapters-apart"])
@on_threads(2)
def test_freezing_while_training(rank: int, world_size: int, name: str) -> None:
    net, whole = make_model(name), make_model(name)
    for block in MODELS[name].blocks(net):
        fully_shard(block)
    fully_shard(net)
    for model in (net, whole):
        model.layers[1].base.requires_grad_(True)
        model.layers[0].down.requires_grad_(False)
    train_alike(net, whole, rank, world_size)
    for model in (net, whole):
        model.requires_grad_(False)
        model.embed.requires_grad_(True)
    train_alike(net, whole, rank, world_size)
    assert all(group_of(layer).state is GroupState.SHARDED for layer in net.layers)


class Skipping(nn.Module):
    """Runs only the blocks that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        for i in which:
            x = self.blocks[i](x)
        return x


@on_threads(2)
def test_steps_that_run_other_modules_in_other_orders(rank: int, world_size: int) -> None:
    net, whole = twins(Skipping)
    for which in [(0, 1, 2), (0, 2), (2, 1, 0), (1,), (0, 1, 2)]:
        train_alike(net, whole, rank, world_size, which, steps=2)
        for block in net.blocks:
            assert group_of(block).state is GroupState.SHARDED


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@on_threads(2)
def test_forwards_and_an_evaluation_before_one_backward(
    rank: int, world_size: int, guard: Any
) -> None:
    net, whole = twins(Net)
    for step in range(2):
        x, other = batches(world_size, step), batches(world_size, step + 1)
        losses = [loss_of(net, part[rank]) for part in (x, other)]
        with guard():
            net(x[rank])
        sum(losses).backward()
        average_backward(whole, x)
        average_backward(whole, other)
        assert_same_gradients(net, whole)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@on_threads(2)
def test_what_stayed_whole_over_a_step_is_gathered_anew(
    rank: int, world_size: int, guard: Any, options: Any
) -> None:
    net, whole = twins(Net, reshard_after_forward=None)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **options) for m in (net, whole)]
    for step in range(2):
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
        with guard():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]))
        step_all(optimizers)
        with guard():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]), msg="stale values")


@pytest.mark.parametrize("in_place", [True, False], ids=["module.compile", "torch.compile"])
@on_processes(2)
def test_compiled_blocks_train_alike_with_hooks_outside_of_graphs(
    rank: int, world_size: int, in_place: bool
) -> None:
    # Dynamo itself looks at the gradients of a graph's inputs.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    net, whole = seeded(Net), seeded(Net)
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    for i, block in enumerate(net.blocks):
        if in_place:
            block.compile(backend=backend)
        fully_shard(block)
        if not in_place:
            net.blocks[i] = torch.compile(block, backend=backend)
    fully_shard(net)
    managed = [module for module in net.modules() if not hasattr(module, "_orig_mod")]
    assert all(module._is_fsdp_managed_module for module in managed)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (net, whole)]
    for step in range(2):
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
        grads = wholes(param.grad for param in net.parameters())
        for found, param in zip(grads, whole.parameters(), strict=True):
            torch.testing.assert_close(found, param.grad)
        step_all(optimizers)
    assert frames, "something was compiled"
    for graph in frames:
        assert "all_gather" not in graph.code
        assert "shardwise" not in graph.code
    targets = {node.target for graph in frames for node in graph.graph.nodes}
    assert any("linear" in str(target) for target in targets), targets
