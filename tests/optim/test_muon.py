"""Muon on any mesh computes what torch's Muon and AdamW compute on one process."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise._torch import dtensor
from shardwise.base.errors import RanksDivergedError
from shardwise.optim import Muon, muon_groups
from tests.optim.nets import Mesh, Net, make_muon, part_of, set_gradients
from tests.worlds import on_threads

Threads = Callable[..., list[Any]]

STEPS = 2
HIDDEN = ("up.weight", "down.weight", "square.weight")


class Reference:
    """Torch's own optimizers on full tensors: each matrix of a stack is a parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.net = Net().to(dtype)
        self.experts = [nn.Parameter(each.clone()) for each in self.net.experts.detach()]
        hidden = [param for name, param in self.net.named_parameters() if name in HIDDEN]
        rest = {n: p for n, p in self.net.named_parameters() if n not in (*HIDDEN, "experts")}
        decayed = [param for param in rest.values() if param.ndim > 1]
        vectors = [param for param in rest.values() if param.ndim == 1]
        self.muon = torch.optim.Muon([*hidden, *self.experts], lr=0.1, **settings)
        decay = settings.get("weight_decay", 0.1)
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.02,
            betas=(0.9, 0.95),
        )

    def step(self, number: int, has: Callable[[str], bool] = lambda name: True) -> None:
        set_gradients(self.net, number, has)
        grad = self.net.experts.grad
        for i, expert in enumerate(self.experts):
            expert.grad = None if grad is None else grad[i]
        self.muon.step()
        self.adamw.step()

    def values(self) -> dict[str, torch.Tensor]:
        found = {name: param.detach() for name, param in self.net.named_parameters()}
        return {**found, "experts": torch.stack([each.detach() for each in self.experts])}


def _assert_same(net: nn.Module, wanted: dict[str, torch.Tensor], what: str) -> None:
    for name, param in net.named_parameters():
        found, expected = dtensor.plain(param.detach()), dtensor.plain(part_of(wanted[name], param))
        # The end of a tensor is computed without vectors, and every rank's shard has another end.
        worst = (found - expected).abs().max().item() if found.numel() else 0.0
        assert worst <= 3e-7, f"{what}: {name} differs by {worst}"


def _trains_as_one_process(rank: int, world_size: int, mesh: Mesh, settings: Any) -> None:
    net = mesh.build()
    muon, reference = make_muon(net, **settings), Reference(**settings)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        muon.step()
        reference.step(step)
        _assert_same(net, reference.values(), f"{mesh}, step {step}")


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh({"dp": 1}),
        Mesh({"dp": 2}),
        Mesh({"dp": 3}),
        Mesh({"dp": 8}),
        Mesh({"dp": 4}, dim=1),
        Mesh({"replicate": 2, "shard": 2}),
        Mesh({"replicate": 3, "shard": 1}),
        Mesh({"dp": 2, "tp": 2}),
        Mesh({"dp": 3, "tp": 2}),
        Mesh({"replicate": 2, "shard": 2, "tp": 2}),
    ],
    ids=lambda mesh: "-".join(f"{n}{s}" for n, s in mesh.sizes.items()) + f"-{mesh.dim}",
)
def test_update_is_that_of_one_process(threads: Threads, mesh: Mesh) -> None:
    threads(_trains_as_one_process, mesh.size, mesh, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False, "weight_decay": 0.0},
        {"momentum": 0.5, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_are_those_of_torch(threads: Threads, settings: dict[str, Any]) -> None:
    threads(_trains_as_one_process, 2, Mesh({"dp": 2}), settings)


@on_threads(3)
def test_bfloat16_parameters_differ_by_their_rounding_at_most(rank: int, world_size: int) -> None:
    net = Mesh({"dp": world_size}).build(torch.bfloat16)
    muon, reference = make_muon(net), Reference(torch.bfloat16)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        muon.step()
        reference.step(step)
    values = reference.values()
    for name in HIDDEN:
        param = net.get_parameter(name)
        expected = dtensor.plain(part_of(values[name], param))
        torch.testing.assert_close(dtensor.plain(param), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_threads()
def test_split_data_changes_a_hundredth_of_a_step_at_most(rank: int, world_size: int) -> None:
    """The iteration rounds to bfloat16 what differs by the order in which gradients are added."""
    lr, steps = 0.02, 8
    shapes = ((32, 64), (64, 64), (64, 32))
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(*shape), nn.GELU()) for shape in shapes))
    mine = fully_shard(copy.deepcopy(whole))
    optimizers = [Muon(muon_groups(net, adamw={"lr": 3e-4}), lr=lr) for net in (mine, whole)]
    for step in range(steps):
        of_ranks = torch.randn(world_size, 8, 32, generator=torch.Generator().manual_seed(step))
        mine(of_ranks[rank]).sub(of_ranks[rank]).square().mean().backward()
        whole(of_ranks.flatten(0, 1)).sub(of_ranks.flatten(0, 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in mine.named_parameters():
        expected = dtensor.plain(part_of(whole.get_parameter(name).detach(), param))
        found = dtensor.plain(param.detach())
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * lr * steps)


@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_momentum_in_bfloat16_is_not_overwritten(rank: int, world_size: int) -> None:
    """Torch 2.13 normalizes its own momentum in place there."""
    net = Mesh({"dp": world_size}).build(torch.bfloat16)
    muon = make_muon(net, nesterov=False)
    set_gradients(net, 1)
    muon.step()
    momentum = muon.state[net.up.weight]["momentum_buffer"]
    expected = dtensor.plain(net.up.weight.grad) * 0.05
    torch.testing.assert_close(dtensor.plain(momentum), expected, rtol=1e-2, atol=1e-6)


@on_threads(2)
def test_parameters_without_a_gradient_are_left_alone(rank: int, world_size: int) -> None:
    net = Mesh({"dp": world_size}).build()
    muon, reference = make_muon(net), Reference()
    for step, missing in enumerate([(), ("up.weight",), ("experts", "embed.weight"), HIDDEN, ()]):

        def has(name: str, missing: tuple[str, ...] = missing) -> bool:
            return name not in missing

        set_gradients(net, step, has)
        muon.step()
        reference.step(step, has)
        _assert_same(net, reference.values(), f"without {missing}")


def _gradients_differ(rank: int, world_size: int, lacks: str) -> str:
    net = Mesh({"dp": world_size}).build()
    muon = make_muon(net)
    before = copy.deepcopy([dtensor.plain(param) for param in net.parameters()])
    hidden = (*HIDDEN, "experts")
    set_gradients(net, 1, lambda name: rank != 1 or name not in (hidden if lacks == "" else lacks))
    with pytest.raises(RanksDivergedError) as caught:
        muon.step()
    after = [dtensor.plain(param) for param in net.parameters()]
    assert all(map(torch.equal, before, after)), "nothing was changed"
    set_gradients(net, 2)
    muon.step()  # and training can go on
    return str(caught.value)


def test_gradients_of_some_ranks_only_are_an_error_on_all(threads: Threads) -> None:
    first, second, third = threads(_gradients_differ, 3, "down.weight")
    assert "down.weight on rank 0 only, none on rank 1 only" in first
    assert "none on rank 1 only, down.weight on rank 0 only" in second
    assert "down.weight on rank 2 only, none on rank 1 only" in third
    assert "set and clear gradients alike" in first


def test_a_rank_without_any_gradient_is_an_error_on_all(threads: Threads) -> None:
    first, *_ = threads(_gradients_differ, 2, "")
    assert "experts, up.weight, down.weight and 1 more on rank 0 only" in first


def _one_rank_fails(rank: int, world_size: int) -> str:
    net = Mesh({"dp": world_size}).build()
    muon = make_muon(net)
    set_gradients(net, 1)
    if rank == 1:  # a state of another size, as from a file that was read by hand
        muon.state[net.up.weight]["momentum_buffer"] = torch.zeros(1)
    kind = ValueError if rank == 1 else RanksDivergedError
    with pytest.raises(kind) as caught:
        muon.step()
    return str(caught.value)


def test_what_one_rank_cannot_use_stops_all_of_them(threads: Threads) -> None:
    first, second = threads(_one_rank_fails, 2)
    assert "up.weight: found a momentum_buffer of shape (1,)" in second
    assert "rank 1 raised an error before it" in first


def test_plain_tensors_need_no_process_group() -> None:
    net, reference = Net(), Reference()
    muon = make_muon(net)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        muon.step()
        reference.step(step)
    _assert_same(net, reference.values(), "one process")


def test_a_copy_and_a_pickled_optimizer_go_on() -> None:
    net = Net()
    muon = make_muon(net)
    set_gradients(net, 1)
    muon.step()
    twin, copied = copy.deepcopy((net, muon))
    _, pickled = pickle.loads(pickle.dumps((net, muon)))
    for optimizer in (muon, copied, pickled):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)


def test_groups_of_other_muons_are_understood() -> None:
    """Keller Jordan's and muon-fsdp2's groups say ``use_muon``, dion's ``algorithm``."""
    matrix, vector = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    for ours, theirs in (({"use_muon": True}, {"use_muon": False}), ({}, {"algorithm": "adamw"})):
        muon = Muon([{"params": [matrix], **ours}, {"params": [vector], **theirs, "lr": 0.5}])
        assert [group["algorithm"] for group in muon.param_groups] == ["muon", "adamw"]
        matrix.grad, vector.grad = torch.ones(3, 2), torch.ones(3)
        muon.step()
        assert set(muon.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: found -1.0, expected 0 or more"),
        ({"momentum": float("nan")}, "momentum: found nan, expected 0 or more"),
        ({"ns_steps": 100}, "ns_steps: found 100, expected 0 to 99"),
        ({"ns_coefficients": (1.0,)}, "ns_coefficients: found (1.0,), expected three numbers"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn: found 'rms', expected one of"),
        ({"lr": torch.ones(2)}, "lr: found a tensor of 2 elements, expected 1"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Muon([nn.Parameter(torch.ones(2, 2))], **settings)
    with pytest.raises(ValueError, match=re.escape(f"group 0: {message}")):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))], **settings}])


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"bias: found shape \(5,\), expected a matrix") as caught:
        Muon(nn.Linear(5, 5).named_parameters())
    assert 'algorithm="adamw", as muon_groups(model) does' in str(caught.value)


def test_other_algorithms_are_refused() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": "lion"}]
    with pytest.raises(ValueError, match="algorithm: found 'lion', expected one of"):
        Muon(groups)
