"""Programs at odd moments, as in ``test_any_moment.py``, with parameters out of the ordinary.

They are tied, frozen and thawed, kept on fewer ranks, cut by tensor parallelism as well, or reduced
in part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import FSDPModule, clip_grad_norm_, fully_shard
from shardwise.base.errors import MisuseError
from tests.corpus.gathering import own_part, wholes
from tests.corpus.models import EvenBlock
from tests.sharding.nets import (
    WIDTH,
    Block,
    Net,
    batches,
    hybrid_mesh,
    run_over,
    seeded,
    sharded_net,
)
from tests.worlds import on_threads, on_transport

TRANSPORTS = ["shm", "c10d"]


def _same(found: list[Any], expected: list[Any], what: str) -> None:
    for i, (whole, theirs) in enumerate(zip(wholes(found), expected, strict=True)):
        assert (whole is None) == (theirs is None), f"{what}, value {i}: {whole} {theirs}"
        if theirs is not None:
            torch.testing.assert_close(whole, theirs, msg=lambda t, i=i: f"{what}, value {i}: {t}")


def _grads(net: nn.Module) -> list[Any]:
    return [param.grad for param in net.parameters()]


# -- ties ---------------------------------------------------------------------------------------


def _clamp(head: nn.Module, _: Any) -> None:
    with torch.no_grad():
        head.weight.clamp_(-0.2, 0.2)


class Tied(nn.Module):
    """An embedding that renormalizes itself, and a head that is tied to it.

    Args:
        max_norm: of rows of the embedding; if there is none, the head clamps its weight.
        again: whether the embedding runs once more, after the head.
    """

    def __init__(self, max_norm: float | None = 0.7, *, again: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, WIDTH, max_norm=max_norm)
        self.mid, self.head = Block(), nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.emb.weight
        self.again = again
        if max_norm is None:
            self.head.register_forward_pre_hook(_clamp)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.head(self.mid(self.emb(tokens)))
        return out * self.emb(tokens[:1, :1]).mean() if self.again else out


def _tied(make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    net = seeded(make)
    for module in (net.mid, net.head, net):
        fully_shard(module, **options)
    return net


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 8]])


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_what_one_group_writes_to_a_tied_parameter_the_next_uses(
    rank: int, world_size: int, transport: str
) -> None:
    for reshard in (True, False, None):
        net, whole = _tied(Tied, transport=transport, reshard_after_forward=reshard), seeded(Tied)
        found: list[list[Any]] = [[], []]
        for model, values in zip((net, whole), found, strict=True):
            steps = torch.optim.SGD(model.parameters(), lr=2.0)  # rows grow beyond the norm again
            for _ in range(3):
                values.append(model(TOKENS))
                values[-1].square().mean().backward()
                steps.step()
                steps.zero_grad()
        net.reshard()
        _same(found[0] + list(net.parameters()), found[1] + list(whole.parameters()), f"{reshard}")


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_a_write_to_a_tied_parameter_that_another_group_has_unsharded_raises(
    rank: int, world_size: int, transport: str
) -> None:
    for reshard in (True, False, None):
        net = _tied(lambda: Tied(None), transport=transport, reshard_after_forward=reshard)
        before = net.emb.weight.full_tensor().clone()
        with pytest.raises(MisuseError, match=r"weight.* group 'head' wrote .* while group ''"):
            net(TOKENS)
        net.reset_iter_state()
        written = net.emb.weight.full_tensor()  # as in one process, where an exception follows
        assert torch.equal(written, before.clamp(-0.2, 0.2))
        net.head._forward_pre_hooks.popitem()
        net(TOKENS).sum().backward()
        assert torch.equal(net.emb.weight.full_tensor(), written)


@on_threads(2)
def test_a_tied_parameter_is_not_written_to_between_its_forward_and_backward(
    rank: int, world_size: int
) -> None:
    for reshard in (True, False, None):
        model = seeded(lambda: Tied(again=True))
        net = _tied(lambda: Tied(again=True), reshard_after_forward=reshard)
        for each in (model, net):
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation|wrote to"):
                each(TOKENS).sum().backward()


# -- requires_grad ------------------------------------------------------------------------------


def _unfreeze_in_forward(net: nn.Module, x: torch.Tensor) -> list[Any]:
    net.blocks.requires_grad_(False)

    def thaw(block: nn.Module, _: Any) -> None:
        block.down.weight.requires_grad_(True)

    for block in net.blocks:
        block.register_forward_pre_hook(thaw)
    net(x).square().mean().backward()
    return _grads(net)


def _freeze_after_a_look(net: nn.Module, x: torch.Tensor) -> list[Any]:
    net(x)
    net.requires_grad_(False)
    net.blocks[0].requires_grad_(True)
    net(x).square().mean().backward()
    return _grads(net)


def _freeze_before_backward(net: nn.Module, x: torch.Tensor) -> list[Any]:
    loss = net(x).square().mean()
    net.head.requires_grad_(False)
    loss.backward()
    found = [None if g is None else g.clone() for g in _grads(net)]
    net.zero_grad()
    net(x).square().mean().backward()
    return found + _grads(net)


def _freeze_and_thaw_what_is_unsharded(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The switches of shards after their gather are those of the forward that uses it."""
    net.head.requires_grad_(False)
    thawed, frozen = list(net.head.parameters()), list(net.blocks[0].parameters())
    for module in (net, net.blocks[0]):
        if isinstance(module, FSDPModule):
            module.unshard()
    for param in thawed:
        param.requires_grad_(True)
    for param in frozen:
        param.requires_grad_(False)
    net(x).square().mean().backward()
    return _grads(net)


def _freeze_after_its_backward(net: nn.Module, x: torch.Tensor) -> list[Any]:
    """The head has its gradient when the backward of a block comes to a hook, and keeps it."""

    def freeze(_: torch.Tensor) -> None:
        net.head.requires_grad_(False)

    net.blocks[0].register_forward_hook(
        lambda module, args, out: out.register_hook(freeze) and None
    )
    net(x).square().mean().backward()
    return _grads(net)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(4)
def test_parameters_may_be_frozen_and_thawed_at_any_moment(
    rank: int, world_size: int, transport: str
) -> None:
    x = batches(1)[0]
    programs = _unfreeze_in_forward, _freeze_after_a_look, _freeze_before_backward
    others = _freeze_and_thaw_what_is_unsharded, _freeze_after_its_backward
    for program in (*programs, *others):
        for reshard in (True, False, None, 2):
            net = sharded_net(transport=transport, reshard_after_forward=reshard)
            _same(program(net, x), program(seeded(Net), x), f"{program.__name__} {reshard}")


@on_threads(2)
def test_a_tied_parameter_that_is_frozen_in_its_backward_gets_no_gradient(
    rank: int, world_size: int
) -> None:
    """The tied weight is frozen when the backward of its last use is over, and of the first not."""
    net, whole = seeded(Tied), seeded(Tied)
    for module in (net.mid, net.head, net):
        fully_shard(module)
    for model in (net, whole):
        handle = model.emb.weight

        def freeze(*_: object, handle: torch.Tensor = handle) -> None:
            handle.requires_grad_(False)

        model.mid.register_full_backward_pre_hook(freeze)
        model(torch.tensor([[1, 2, 3], [4, 5, 8]])).sum().backward()
        assert handle.grad is None
    _same(_grads(net), _grads(whole), "gradients")


# -- shards kept on fewer threads -----------------------------------------------------------------


@on_threads(4)
def test_a_write_to_what_is_kept_on_fewer_ranks_raises(rank: int, world_size: int) -> None:
    x = batches(1)[0]
    for ends in (lambda net, out: net(x), lambda net, out: out.sum().backward()):
        net = sharded_net(reshard_after_forward=2)
        out = net(x)
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.8)
        with pytest.raises(MisuseError, match="written to between forward and backward"):
            ends(net, out)
        net.reset_iter_state()
        net(x).sum().backward()


# -- forwards in backward, backwards in forward -------------------------------------------------


def _evaluate_in_backward(net: nn.Module, x: torch.Tensor) -> list[Any]:
    seen = []

    def look(_: torch.Tensor) -> None:
        with torch.no_grad():
            seen.append(net(2 * x).clone())

    def watch(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(look)

    net.blocks[1].register_forward_hook(watch)
    (50 * net(x).square().mean()).backward()
    norm = clip_grad_norm_(net.parameters(), 0.1)
    return [*seen, norm, *_grads(net)]


class Forces(Net):
    """Uses a gradient with respect to its input in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.head(self.blocks[0](at)).square().sum()
            (force,) = torch.autograd.grad(energy, at)
        return super().forward(x + 0.1 * force)


def _forces(net: nn.Module, x: torch.Tensor) -> list[Any]:
    with torch.no_grad():
        seen = net(x)
    out = net(x)
    out.square().mean().backward()
    return [seen, out, *_grads(net)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(3)
def test_forwards_in_backward_and_backwards_in_forward(
    rank: int, world_size: int, transport: str
) -> None:
    x = batches(1)[0]
    for make, program in ((Net, _evaluate_in_backward), (Forces, _forces)):
        for reshard in (True, False, None):
            net = sharded_net(make, transport=transport, reshard_after_forward=reshard)
            _same(program(net, x), program(seeded(make), x), f"{program.__name__} {reshard}")


# -- tensor parallelism, hybrid ------------------------------------------------------------------


def _tensor_parallel(rank: int, world_size: int, transport: str, dp: int) -> None:
    x, whole, net = batches(1)[0], seeded(EvenBlock), seeded(EvenBlock)
    mesh = init_device_mesh("cpu", (dp, world_size // dp), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"], transport=transport, reshard_after_forward=True)

    def shrink(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            own_part(module.up.weight).mul_(0.9)

    hooks = [each.register_forward_pre_hook(shrink) for each in (net, whole)]
    with torch.no_grad():
        _same([net(x), net(x)], [whole(x), whole(x)], "written to by way of to_local()")
        for hook in hooks:
            hook.remove()
        for model in (net, whole):
            for param in model.parameters():
                torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 0.5))
        _same([net(x)], [whole(x)], "swapped")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dp", [1, 2])
def test_tensor_parallel_parameters_are_written_to_and_swapped(transport: str, dp: int) -> None:
    run_over(transport, _tensor_parallel, 2 * dp, dp)


@on_threads(4)
def test_what_was_reduced_in_part_arrives_though_frozen_since(rank: int, world_size: int) -> None:
    x, whole = batches(1)[0], seeded(Net)
    net = sharded_net(mesh=hybrid_mesh(world_size))
    for scale in (1, 2):
        net.set_requires_all_reduce(scale == 2)
        for model in (net, whole):
            model(scale * x).square().mean().backward()
            model.head.weight.requires_grad_(False)
    _same(_grads(net), _grads(whole), "gradients")
