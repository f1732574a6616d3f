"""Steps in backward with torch's own FSDP2 have the bits of steps after it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.base.errors import StepInterruptedError
from shardwise.optim import in_backward
from tests.threads import run_threads
from tests.with_fsdp2.models import WAYS, Way, batch, shard
from tests.worlds import on_threads

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(rank, step)).square().mean()
    return loss


def _same(model: Any, other: Any) -> None:
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected.full_tensor())


def _trained(rank: int, world_size: int, way: Way, tell: str, make: Any) -> None:
    model, other = shard(way), shard(way)
    optimizer, its = in_backward(model, make), make(other.parameters())
    for step in range(6):
        ends = step % 2 == 1
        model(batch(rank, 0))  # a graph that nobody runs
        for each in (model, other):
            getattr(each, tell)(ends)
            _loss(each, rank, step).backward()  # type: ignore[no-untyped-call]
        if not ends:
            continue
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        its.step()
        its.zero_grad()
        _same(model, other)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("tell", ["set_is_last_backward", "set_requires_gradient_sync"])
def test_a_step_has_the_bits_of_one_after_backward(way: Way, tell: str) -> None:
    ranks = 2 if len(way.shape) == 1 else 4
    run_threads(_trained, ranks, way, tell, ADAMW)


def test_so_it_has_with_our_optimizers() -> None:
    make = functools.partial(shardwise.optim.AdamW8bit, lr=0.01)
    run_threads(_trained, 2, Way(), "set_requires_gradient_sync", make)


@on_threads(2)
def test_gradients_are_dropped_group_by_group(rank: int, world_size: int) -> None:
    """Gradients of at most two groups are there at the same time."""
    model = shard(Way())
    optimizer = in_backward(model, ADAMW)
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, sum(param.grad is not None for param in model[:3].parameters()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    _loss(model, rank, 0).backward()  # type: ignore[no-untyped-call]
    of_a_block = len(list(model[0].parameters()))
    assert 0 < most <= 2 * of_a_block < len(list(model[:3].parameters()))
    optimizer.remove()
    _loss(model, rank, 0).backward()  # type: ignore[no-untyped-call]
    assert all(param.grad is not None for param in model.parameters())


@on_threads(2)
def test_gradients_are_clipped_by_the_norm_of_the_step_before(rank: int, world_size: int) -> None:
    model, other = shard(Way()), shard(Way())
    optimizer = in_backward(model, ADAMW, max_norm=0.01)
    its = ADAMW(other.parameters())
    previous = None
    for step in range(4):
        for each in (model, other):
            _loss(each, rank, step).backward()  # type: ignore[no-untyped-call]
        norm = shardwise.clip_grad_norm_(other.parameters(), float("inf"))
        scale = min(1.0, 0.01 / ((norm.item() if previous is None else previous) + 1e-6))
        if previous is not None:
            for param in other.parameters():
                param.grad.mul_(scale)
            its.step()
            for found, expected in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(found.full_tensor(), expected.full_tensor())
        else:
            other.load_state_dict(model.state_dict())
            its.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm, norm)
        previous = norm.item()
        its.zero_grad()


@pytest.mark.parametrize("retains", [False, True])
@on_threads(2)
def test_a_backward_of_a_forward_from_before_the_step_is_refused(
    rank: int, world_size: int, retains: bool
) -> None:
    model = shard(Way())
    in_backward(model, ADAMW)
    first, second = _loss(model, rank, 0), _loss(model, rank, 1)
    second.backward(retain_graph=retains)  # type: ignore[no-untyped-call]
    shards = list(model.parameters())
    before = [each.to_local().clone() for each in shards]
    with pytest.raises(RuntimeError, match="a forward from before the last step"):
        (second if retains else first).backward()  # type: ignore[no-untyped-call]
    for each, value in zip(shards, before, strict=True):
        assert torch.equal(each.to_local(), value), "it has stepped again"


@on_threads(2)
def test_modules_that_run_twice_are_frozen_or_recomputed(rank: int, world_size: int) -> None:
    """A module that runs twice, a frozen one, and activations that are recomputed."""
    torch.manual_seed(0)
    plain = [torch.nn.Linear(32, 32) for _ in range(3)]
    nets = []
    for _ in range(2):
        net: Any = torch.nn.ModuleList(copy.deepcopy(plain))
        net[2].requires_grad_(False)
        for each in net:
            fully_shard(each)
        nets.append(net)

    def loss(net: Any, step: int) -> torch.Tensor:
        x = net[0](net[0](batch(rank, step)).relu())
        x = checkpoint(net[1], x, use_reentrant=False)
        out: torch.Tensor = net[2](x).square().mean()
        return out

    optimizer, its = in_backward(nets[0], ADAMW), ADAMW(nets[1].parameters())
    for step in range(3):
        loss(nets[0], step).backward()  # type: ignore[no-untyped-call]
        loss(nets[1], step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        its.step()
        its.zero_grad()
    _same(*nets)


@on_threads(2)
def test_an_exception_leaves_no_half_step_unnoticed(rank: int, world_size: int) -> None:
    model = shard(Way())
    optimizer = in_backward(model, ADAMW)
    x = batch(rank, 0).requires_grad_()

    def fail(grad: torch.Tensor) -> None:
        raise MemoryError("in the middle")

    handle = model[0].register_full_backward_pre_hook(lambda *_: fail(x))
    with pytest.raises(MemoryError):
        model(x).square().mean().backward()
    handle.remove()
    with pytest.raises(StepInterruptedError, match="groups had stepped"):
        model(x)
    optimizer.accept_interrupted_step()
    model(x).square().mean().backward()


class _Again(torch.nn.Module):
    """Modules that run twice in one forward, as the program says."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program
        self.a, self.b, self.c = (torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.program(self, x)
        return out


def _siamese(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.a(x).relu()) * net.b(net.a(x.flip(0)).relu())  # type: ignore[no-any-return]


def _looped(net: Any, x: torch.Tensor) -> torch.Tensor:
    for each in (net.a, net.b, net.a, net.b, net.b):
        x = each(x).relu()
    return x


def _recomputed(net: Any, x: torch.Tensor) -> torch.Tensor:
    for each in (net.a, net.b, net.c, net.b):
        x = checkpoint(each, x, use_reentrant=False)  # type: ignore[assignment]
    return x


def _apart(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Inputs need no gradient, so that torch reduces at the end of backward."""
    return net.a(x) + net.b(x).sin() + net.c(x)  # type: ignore[no-any-return]


def _reentrant(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Each use is recomputed by a backward of its own, inside of the other."""
    x = x.detach().requires_grad_()
    for each in (net.a, net.b, net.c, net.b):
        x = checkpoint(each, x, use_reentrant=True)  # type: ignore[assignment]
    return x


def _mixed(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = checkpoint(net.a, x.detach().requires_grad_(), use_reentrant=True)  # type: ignore[assignment]
    return net.a(net.b(x))  # type: ignore[no-any-return]


@on_threads(2)
def test_modules_run_twice_while_gradients_accumulate(rank: int, world_size: int) -> None:
    """Torch reduces what earlier backwards have left before all uses have added to it."""
    for program in (_siamese, _looped, _recomputed, _apart, _reentrant, _mixed):
        for has_root in (True, False):
            torch.manual_seed(0)
            nets: list[Any] = [_Again(program)]
            nets.append(copy.deepcopy(nets[0]))
            for net in nets:
                for each in (*net.children(), *[net] * has_root):
                    fully_shard(each)
            optimizer, its = in_backward(nets[0], ADAMW), ADAMW(nets[1].parameters())
            for step in range(2):
                for net in nets:
                    pending = [_loss(net, rank, number) for number in range(2)]
                    for ends in (False, True):  # forwards run before both backwards, or between
                        loss = pending[ends] if step else _loss(net, rank, 2 + ends)
                        for each in net.modules():
                            if isinstance(each, FSDPModule):
                                each.set_requires_gradient_sync(ends, recurse=False)
                        loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                its.step()
                its.zero_grad()
                for each in (each for net in nets for each in net.modules()):
                    if isinstance(each, FSDPModule):
                        each.reshard()  # torch leaves those whose last forward has no gradients
                _same(*nets)
