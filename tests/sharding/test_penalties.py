"""Penalties on sharded parameters: autograd's gradients are replicated, or pending a sum.

Regularizers, pulls toward initial weights and spectral norms are functions of the parameters
themselves, whose gradients do not come through a module's forward.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shardwise import CPUOffloadPolicy, clip_grad_norm_, fully_shard, optim
from tests.corpus.gathering import in_full
from tests.worlds import on_processes, on_threads

Penalty = Callable[[torch.Tensor], torch.Tensor]

PENALTIES: dict[str, Penalty] = {
    "square": lambda p: p.square().sum(),
    "norm": lambda p: p.norm(),
    "first row": lambda p: p[0].square().sum(),
    "product": lambda p: (p @ p.mT).square().sum() if p.ndim == 2 else p.square().sum(),
    "spectral": lambda p: torch.linalg.matrix_norm(p, 2) if p.ndim == 2 else p.norm(),
    "pull": lambda p: (p - torch.ones_like(p).detach()).square().sum(),
}


class _Odd(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, and a scalar."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.second = nn.Linear(hidden, 2)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * self.gain


def _penalty(model: nn.Module) -> torch.Tensor:
    """One penalty on each parameter: plain, whatever holds the parameters."""
    found = zip(model.parameters(), itertools.cycle(PENALTIES.values()), strict=False)
    total = torch.zeros(())
    for param, penalty in found:
        total = total + in_full(penalty(param) if param.ndim else param.square())
    return total


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _sharded(model: nn.Module, mesh: DeviceMesh | None = None, **kwargs: object) -> nn.Module:
    fully_shard(model.first, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def _assert_same(model: nn.Module, whole: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        if theirs.grad is None:
            assert ours.grad is None
        else:
            assert ours.grad.placements == ours.placements, name
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)
        torch.testing.assert_close(ours.full_tensor(), theirs, msg=name)


def _both(model: nn.Module, x: torch.Tensor) -> None:
    """One backward, and the penalty is older than the forward."""
    penalty = _penalty(model)
    (_loss(model, x) + penalty).backward()


def _both_later(model: nn.Module, x: torch.Tensor) -> None:
    loss = _loss(model, x)
    (loss + _penalty(model)).backward()


def _before(model: nn.Module, x: torch.Tensor) -> None:
    _penalty(model).backward()
    _loss(model, x).backward()


def _after(model: nn.Module, x: torch.Tensor) -> None:
    _loss(model, x).backward()
    _penalty(model).backward()


def _alone(model: nn.Module, x: torch.Tensor) -> None:
    _penalty(model).backward()


def _assigned(model: nn.Module, x: torch.Tensor) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(_penalty(model), params), strict=True):
        param.grad = grad
    _loss(model, x).backward()


STEPS = [_both, _both_later, _before, _after, _alone, _assigned]


def _assert_same_steps(model: nn.Module, whole: nn.Module, rank: int, ranks: int) -> None:
    """Take all kinds of steps with both, of which the first sees the rows of one rank."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, whole)]
    x = torch.randn(ranks, 3, 4, generator=torch.Generator().manual_seed(1))
    for step in STEPS:
        step(model, x[rank])
        step(whole, x.flatten(0, 1))
        _assert_same(model, whole)
        norms = [clip_grad_norm_(m.parameters(), 0.5) for m in (model, whole)]
        torch.testing.assert_close(*norms)
        _assert_same(model, whole)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step is not _before)
        _assert_same(model, whole)


def _train(
    rank: int, world_size: int, shape: tuple[int, ...], dim: int, reshards: bool | int = True
) -> None:
    torch.manual_seed(0)
    whole = _Odd()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = _sharded(
        copy.deepcopy(whole),
        mesh,
        reshard_after_forward=reshards,
        shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)) if p.ndim else None,
    )
    _assert_same_steps(model, whole, rank, world_size)


@pytest.mark.parametrize(
    ("world_size", "shape", "dim"),
    [(2, (2,), 0), (3, (3,), 0), (3, (3,), 1), (4, (2, 2), 0), (2, (2, 1), 0), (1, (1,), 0)],
)
@on_threads()
def test_steps_equal_those_of_one_process(
    rank: int, world_size: int, shape: tuple[int, ...], dim: int
) -> None:
    _train(rank, world_size, shape, dim)


@on_threads(4)
def test_post_forward_shards_hand_their_gradients_on(rank: int, world_size: int) -> None:
    _train(rank, world_size, (4,), 0, reshards=2)


@on_threads(4)
def test_with_tensor_parallelism(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = _Odd(hidden=8)
    model = copy.deepcopy(whole)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    _sharded(parallelize_module(model, mesh["tp"], plan), mesh["dp"])
    _assert_same_steps(model, whole, mesh.get_local_rank("dp"), 2)


class _Tied(nn.Module):
    """A weight that two groups share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def _tied(whole: nn.Module) -> nn.Module:
    model = copy.deepcopy(whole)
    fully_shard(model.first)
    fully_shard(model.second)
    return fully_shard(model)


def _unsharded(whole: nn.Module) -> nn.Module:
    """The first penalty is computed on full parameters."""
    model = _sharded(copy.deepcopy(whole))
    for module in (model.first, model):
        module.unshard()
    return model


def _copied(whole: nn.Module) -> nn.Module:
    return copy.deepcopy(_sharded(copy.deepcopy(whole)))


def _converted(whole: nn.Module) -> nn.Module:
    model = _sharded(copy.deepcopy(whole).double())
    model.to(torch.float32)  # which lets autograd forget the hooks of parameters
    return model


@on_threads(2)
def test_wherever_parameters_come_from(rank: int, world_size: int) -> None:
    ways: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = [
        (_Tied, _tied),
        (_Odd, _unsharded),
        (_Odd, _copied),
        (_Odd, _converted),
        (
            _Odd,
            lambda whole: _sharded(copy.deepcopy(whole), offload_policy=CPUOffloadPolicy()),
        ),
    ]
    x = torch.randn(world_size, 3, 4, generator=torch.Generator().manual_seed(1))
    for make, shard in ways:
        torch.manual_seed(0)
        whole = make()
        model = shard(whole)
        for step in STEPS:
            step(model, x[rank])
            step(whole, x.flatten(0, 1))
            _assert_same(model, whole)
            model.zero_grad()
            whole.zero_grad()


@on_threads(2)
def test_clipping_and_our_optimizers_after_a_penalty_alone(rank: int, world_size: int) -> None:
    for make in (
        lambda params: optim.AdamW8bit(params, lr=0.01),
        lambda params: optim.Muon([p for p in params if p.ndim == 2], lr=0.01),
        lambda params: torch.optim.SGD(params, lr=0.01),
    ):
        torch.manual_seed(0)
        whole = _Odd()
        models = [_sharded(copy.deepcopy(whole)), whole]
        optimizers = [make(list(model.parameters())) for model in models]
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                _penalty(model).backward()
                clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
                optimizer.step()
                optimizer.zero_grad()
        _assert_same(*models)


@on_threads(2)
def test_gradients_that_a_program_sets_itself_are_placed(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    whole = _Odd()
    model = _sharded(copy.deepcopy(whole))
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, whole)]
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        theirs.grad = torch.rand(theirs.shape, generator=generator)
        mine.grad = distribute_tensor(theirs.grad.clone(), mine.device_mesh, [Replicate()])
    norms = [clip_grad_norm_(m.parameters(), 0.5) for m in (model, whole)]
    torch.testing.assert_close(*norms)
    for optimizer in optimizers:
        optimizer.step()
    _assert_same(model, whole)


@on_threads(2)
def test_hooks_get_placed_gradients_and_never_two_in_one_backward(
    rank: int, world_size: int
) -> None:
    x = torch.ones(3, 4)
    seen: list[object] = []
    for step in STEPS[:4]:
        model = _sharded(_Odd())
        seen.clear()
        for param in model.parameters():
            param.register_hook(lambda grad: seen.append(grad.placements))
            param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
        if step in (_both, _both_later):
            with pytest.raises(NotImplementedError, match="would run twice in one backward"):
                step(model, x)
        else:
            step(model, x)
            wanted = [param.placements for param in model.parameters()]
            assert sorted(map(str, seen)) == sorted(map(str, wanted * 4))


@on_processes(2)
def test_penalties_between_the_messages_of_a_transport(rank: int, world_size: int) -> None:
    x = torch.randn(world_size, 8, 64, generator=torch.Generator().manual_seed(1))
    for transport in ("shm", "c10d", "collectives"):
        torch.manual_seed(0)
        whole = nn.Sequential(
            *[nn.Sequential(nn.Linear(64, 65), nn.Tanh(), nn.Linear(65, 64)) for _ in range(3)]
        )
        model = copy.deepcopy(whole)
        for block in model:
            fully_shard(block, transport=transport)
        fully_shard(model, transport=transport)
        for step in (_both, _both_later):
            step(model, x[rank])
            step(whole, x.flatten(0, 1))
            _assert_same(model, whole)
