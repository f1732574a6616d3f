"""Backwards that the program completes itself, and full parameters that keep their addresses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import GradientReductionHandle, fully_shard
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    check_backward,
    group_of,
    hybrid_mesh,
    loss_of,
    run_backward,
    seeded,
    sharded_modules,
    sharded_net,
    step_all,
)
from tests.worlds import Ranks, on_threads


def _manual(**kwargs: Any) -> tuple[Any, nn.Module]:
    net = sharded_net(**kwargs)
    net.set_manual_backward_finalization(True)
    return net, seeded(Net)


# -- finalization ---------------------------------------------------------------------------------


def _finalized(rank: int, world_size: int, way: str) -> None:
    kwargs = {"mesh": hybrid_mesh(world_size)} if way == "hybrid" else {}
    net, whole = _manual(reshard_after_forward=way != "zero-2", **kwargs)
    first = net.blocks[0].up.weight
    assert net.finalize_backward() is None, "before the first forward there is nothing to do"
    net.finalize_backward(async_op=True).wait()
    for step in range(3):
        x = batches(world_size, step)
        loss_of(net, x[rank]).backward()
        if step == 0:
            assert first.grad is None, "its inputs need no gradient, so no hook saw it"
        average_backward(whole, x)
        handle = net.finalize_backward(async_op=step > 0)
        assert isinstance(handle, GradientReductionHandle) == (step > 0)
        if handle is not None:
            with pytest.raises(RuntimeError, match=r"forward on rank \d: .* wait\(\)"):
                net(x[rank])
            with pytest.raises(RuntimeError, match="has not been waited for"):
                net.finalize_backward()
            handle.wait()
            handle.wait()
        assert_same_gradients(net, whole)  # which adds up, step by step
        for module in sharded_modules(net):
            assert group_of(module).state.value == "sharded"


@pytest.mark.parametrize("way", ["zero-3", "zero-2", "hybrid"])
def test_the_program_completes_a_backward(threads: Ranks, way: str) -> None:
    threads(_finalized, 4 if way == "hybrid" else 2, way)


@pytest.mark.parametrize("unused", [False, True])
@on_threads(2)
def test_what_backwards_have_kept_is_reduced_by_finalization(
    rank: int, world_size: int, unused: bool
) -> None:
    net, whole = _manual()
    x = [batches(world_size, step) for step in range(3)]
    net.set_reduce_scatter_unused_params(unused)
    net.set_is_last_backward(True)  # it is the program that says so
    for sync in ([False, False, True], [False, False, False]):
        for batch, last in zip(x, sync, strict=True):
            net.set_requires_gradient_sync(last)
            run_backward(net, whole, batch, rank)
        net.set_requires_gradient_sync(True)
        net.finalize_backward()
        assert_same_gradients(net, whole)
        net.finalize_backward()  # nothing is left
        assert_same_gradients(net, whole)
    net.set_manual_backward_finalization(False)
    loss_of(net, x[0][rank]).backward()
    average_backward(whole, x[0])
    assert_same_gradients(net, whole)


@on_threads(4)
def test_finalization_without_the_all_reduce_keeps_gradients_for_it(
    rank: int, world_size: int
) -> None:
    net, whole = _manual(mesh=hybrid_mesh(world_size))
    x = batches(world_size)
    for reduces in (False, True):
        net.set_requires_all_reduce(reduces)
        run_backward(net, whole, x, rank)
        net.finalize_backward()
        assert (net.head.weight.grad is not None) == reduces
    assert_same_gradients(net, whole)


@on_threads(2)
def test_hooks_on_parameters_run_once(rank: int, world_size: int) -> None:
    net, whole = _manual()
    net.head.weight.requires_grad_(False)
    whole.head.weight.requires_grad_(False)
    stepped: list[str] = []
    for name, param in net.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, name=name: stepped.append(name))
    x = batches(world_size)
    run_backward(net, whole, x, rank)
    net.finalize_backward()
    expected = [name for name, param in net.named_parameters() if param.requires_grad]
    assert sorted(stepped) == sorted(expected), "each once"
    assert_same_gradients(net, whole)


@on_threads(2)
def test_finalization_at_the_wrong_time_or_place_is_refused(rank: int, world_size: int) -> None:
    net, whole = _manual()
    x = batches(world_size)
    loss = loss_of(net, x[rank])
    seen: list[str] = []

    def inside(_: torch.Tensor) -> None:
        for call in (net.finalize_backward, lambda: net.set_manual_backward_finalization(False)):
            with pytest.raises(RuntimeError, match="backward") as error:
                call()
            seen.append(str(error.value))

    loss.register_hook(inside)
    loss.backward()
    assert "a backward is running" in seen[0]
    assert "is not completed" in seen[1]
    with pytest.raises(RuntimeError, match=r"rank \d: a backward has begun and is not completed"):
        net.set_manual_backward_finalization(False)
    for call in ("finalize_backward", "set_manual_backward_finalization"):
        with pytest.raises(RuntimeError, match=f"{call}: expected the root.*nested FSDPBlock"):
            getattr(net.blocks[0], call)(*([False] if "set" in call else []))
    invalid = net.finalize_backward(async_op=True)
    net.reset_iter_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dropped by reset_iter_state"):
            invalid.wait()
    net.zero_grad()
    net.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match=r"call set_manual_backward_finalization\(True\)"):
        net.finalize_backward()
    check_backward(net, whole, x, rank)

    net = sharded_net()
    net.blocks[1].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match=r"called on blocks\.1: expected the root"):
        net(x[rank])


@on_threads(2)
def test_after_a_backward_that_raised_and_in_a_copy(rank: int, world_size: int) -> None:
    net, whole = _manual()
    x = batches(world_size)

    def fail(*_: Any) -> None:
        raise ValueError("in backward")

    def failing(out: torch.Tensor) -> None:
        out.register_hook(fail)

    hook = net.blocks[0].register_forward_hook(lambda m, args, out: failing(out))
    with pytest.raises(ValueError, match="in backward"):
        loss_of(net, x[rank]).backward()
    hook.remove()
    net.zero_grad()
    run_backward(net, whole, x, rank)
    net.finalize_backward()
    assert_same_gradients(net, whole)

    twin = copy.deepcopy(net)
    first = twin.blocks[0].up.weight
    twin.zero_grad()
    whole.zero_grad()
    run_backward(twin, whole, x, rank)
    assert first.grad is None, "a copy is finalized by the program, too"
    twin.finalize_backward()
    assert_same_gradients(twin, whole)


class Chunks(nn.Module):
    """A trunk, and a head that runs on pieces of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x)
        return out


@on_threads(2)
def test_backwards_of_parts_of_a_group_are_finalized(rank: int, world_size: int) -> None:
    net, whole = seeded(Chunks), seeded(Chunks)
    fully_shard([net.norm, net.head])
    fully_shard(net)
    net.set_manual_backward_finalization(True)
    x = batches(world_size, rows=4)
    net.set_requires_gradient_sync(False)
    trunk = net(x[rank]).detach().requires_grad_()
    for piece in trunk.chunk(2):
        net.head(piece).square().sum().backward()
    net.set_requires_gradient_sync(True)
    net.finalize_backward()
    for batch in x:
        (whole.head(whole(batch).detach()).square().sum() / world_size).backward()
    found = net.head.weight.grad
    assert found is not None
    torch.testing.assert_close(found.full_tensor(), whole.head.weight.grad)


# -- memory that is kept --------------------------------------------------------------------------


def _kept(rank: int, world_size: int, options: dict[str, Any]) -> None:
    net, whole = sharded_net(**options), seeded(Net)
    net.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (net, whole)]
    addresses: list[list[int]] = []

    def look(module: nn.Module) -> None:
        addresses[-1] += [param.data_ptr() for param in module.parameters()]

    def look_twice(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: look(module))

    for block in net.blocks:
        block.register_forward_pre_hook(lambda module, args: look(module))
        block.register_forward_hook(look_twice)
    for step in range(3):
        addresses.append([])
        x = batches(world_size, step)
        check_backward(net, whole, x, rank)
        taken = [torch.empty(1 << 10) for _ in range(8)]  # what would get freed memory
        step_all(optimizers)
        del taken
    assert addresses[0]
    assert addresses[1:] == addresses[:-1], "the same in every forward and backward"
    block = net.blocks[0]
    fulls = [param.full_data for param in group_of(block).params if param.layout.dim is not None]
    held = [full.untyped_storage().size() > 0 for full in fulls]
    net.set_keep_unsharded_storage(False)
    with torch.no_grad():
        net(x[rank])
    if options.get("transport") != "shm":
        assert all(held)
        assert not any(full.untyped_storage().size() for full in fulls), "from then on it is freed"


@pytest.mark.parametrize(
    "options",
    [{"transport": "shm"}, {"transport": "c10d"}, {"reshard_after_forward": 2}],
    ids=["shm", "c10d", "fewer ranks"],
)
def test_full_parameters_can_keep_their_addresses(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(_kept, 4 if "reshard_after_forward" in options else 2, options)


@on_threads(2)
def test_kept_memory_is_not_used_by_a_backward_that_no_hook_sees(
    rank: int, world_size: int
) -> None:
    net = sharded_net()
    net.set_keep_unsharded_storage(True)
    x = batches(world_size)
    block = net.blocks[0]
    leaked: list[torch.Tensor] = []
    block.down.register_forward_hook(lambda m, args, out: leaked.append(out))
    net(x[rank])
    for module in sharded_modules(net):
        module.reshard()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        leaked[0].sum().backward()
