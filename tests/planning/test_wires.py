"""Transports of a rank that is alone: chosen as in a training, and nobody receives anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise._torch import c10d
from shardwise.base import devices, libc
from shardwise.insight.planning.wires import simulated
from shardwise.sharding.state import groups_of
from shardwise.transport.base import Transport
from shardwise.transport.carrier import carrier
from shardwise.transport.collectives import CollectivesTransport

RANKS = 4

on_linux = pytest.mark.skipif(not libc.has_futex(), reason="shared memory is for Linux on x86-64")


def _sharded(transport: str) -> nn.Linear:
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), transport=transport)
    return model


def _transport(model: nn.Module) -> Transport:
    (group,) = groups_of(model)
    assert group.mesh.shard is not None
    return group.mesh.shard


@pytest.mark.parametrize(
    ("asked", "ranks_per_host", "name"),
    [
        pytest.param("auto", 4, "shm", marks=on_linux),
        pytest.param("auto", 2, "shm+gloo", marks=on_linux),  # once over the link
        pytest.param("shm", 4, "shm", marks=on_linux),
        ("c10d", 4, "gloo"),
        ("collectives", 4, "collectives"),
    ],
)
def test_transports_are_chosen_as_in_a_training(asked: str, ranks_per_host: int, name: str) -> None:
    with c10d.fake_world(RANKS), simulated(devices.GLOO, ranks_per_host=ranks_per_host):
        assert _transport(_sharded(asked)).name == name


def test_ranks_of_several_hosts_share_no_memory() -> None:
    message = "'shm' is not available here: its ranks are on 2 hosts, with 2 ranks on each"
    with (
        c10d.fake_world(RANKS),
        simulated(devices.GLOO, ranks_per_host=2),
        pytest.raises(ValueError, match=message),
    ):
        _sharded("shm")


@pytest.mark.parametrize("transport", ["c10d", "collectives"])
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_rank_steps_though_nobody_answers(transport: str, rank: int) -> None:
    with c10d.fake_world(RANKS, rank), simulated(devices.GLOO, ranks_per_host=RANKS):
        model = _sharded(transport)
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.shape == model.weight.shape


def test_only_rehearsals_send_nothing() -> None:
    always = carrier()
    with c10d.fake_world(RANKS), simulated(devices.GLOO, ranks_per_host=RANKS):
        assert carrier() is not always
        inside = _transport(_sharded("collectives"))
    assert carrier() is always
    with c10d.fake_world(RANKS):
        outside = _transport(_sharded("collectives"))
    assert type(inside) is type(outside) is CollectivesTransport
