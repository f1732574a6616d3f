"""Muon on any mesh computes what torch's Muon and AdamW compute on one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise._torch import dtensor
from shardwise.optim import Muon, muon_groups
from tests.optim.nets import Mesh, make_muon, part_of, set_gradients
from tests.optim.references import HIDDEN, MuonReference
from tests.sharding.nets import step_all
from tests.worlds import on_threads

STEPS = 2


@on_threads(3)
def test_bfloat16_parameters_differ_by_their_rounding_at_most(rank: int, world_size: int) -> None:
    net = Mesh({"dp": world_size}).build(torch.bfloat16)
    muon, reference = make_muon(net), MuonReference(torch.bfloat16)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        muon.step()
        reference.step(step)
    values = reference.values()
    for name in HIDDEN:
        param = net.get_parameter(name)
        expected = dtensor.plain(part_of(values[name], param))
        torch.testing.assert_close(dtensor.plain(param), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("world_size", [2, 3])
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
        step_all(optimizers)
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


def test_groups_of_other_muons_are_understood() -> None:
    """Keller Jordan's and muon-fsdp2's groups say ``use_muon``, dion's ``algorithm``."""
    matrix, vector = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    for ours, theirs in (({"use_muon": True}, {"use_muon": False}), ({}, {"algorithm": "adamw"})):
        muon = Muon([{"params": [matrix], **ours}, {"params": [vector], **theirs, "lr": 0.5}])
        assert [group["algorithm"] for group in muon.param_groups] == ["muon", "adamw"]
        matrix.grad, vector.grad = torch.ones(3, 2), torch.ones(3)
        muon.step()
        assert set(muon.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"bias: found shape \(5,\), expected a matrix") as caught:
        Muon(nn.Linear(5, 5).named_parameters())
    assert 'algorithm="adamw", as muon_groups(model) does' in str(caught.value)


def test_other_algorithms_are_refused() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": "lion"}]
    with pytest.raises(ValueError, match="algorithm: found 'lion', expected one of"):
        Muon(groups)
