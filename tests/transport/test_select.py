"""Which transport a process group gets, and who says so."""

from __future__ import annotations

import gc
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise.base import libc
from shardwise.transport.base import LocalTransport, Transport
from shardwise.transport.custom import CustomTransport
from shardwise.transport.select import select_transport
from tests.worlds import on_processes

pytestmark = pytest.mark.usefixtures("new_ranks")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


#: By what is asked for, and what the environment says: what is chosen.
CHOSEN = [
    (None, None, "shm"),
    (None, "", "shm"),
    (None, "auto", "shm"),
    (None, "shm", "shm"),
    (None, "c10d", "gloo"),
    (None, "collectives", "collectives"),
    ("collectives", None, "collectives"),
    ("c10d", "collectives", "gloo"),
    ("auto", "collectives", "shm"),
    ("shm", "collectives", "shm"),
    ("collectives", "nonsense", "collectives"),
]


@on_processes(2)
def test_the_argument_wins_over_the_variable_over_auto(rank: int, world_size: int) -> None:
    for requested, variable, name in CHOSEN:
        said = {} if variable is None else {"SHARDWISE_TRANSPORT": variable}
        with patch.dict(os.environ, said):
            transport = select_transport(dist.group.WORLD, CPU, requested)
        assert isinstance(transport, Transport)
        assert (transport.rank, transport.world_size) == (rank, world_size)
        assert transport.name == name, (requested, variable)


@pytest.mark.parametrize("requested", [None, "auto", "shm", "c10d", "collectives"])
def test_one_rank_needs_no_group(requested: str | None) -> None:
    assert select_transport(None, CPU, requested).name == "local"


@on_processes(1)
def test_a_group_of_one_rank_is_local(rank: int, world_size: int) -> None:
    assert select_transport(dist.group.WORLD, CPU, "collectives").name == "local"


def test_an_unknown_argument_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match="transport='smoke' is unknown") as caught:
        select_transport(None, CPU, "smoke")
    assert "auto, shm, c10d, collectives" in str(caught.value)
    assert "SHARDWISE_TRANSPORT" not in str(caught.value)


def test_an_unknown_variable_is_named_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_TRANSPORT", "smoke")
    with pytest.raises(ValueError, match="SHARDWISE_TRANSPORT='smoke' is unknown"):
        select_transport(None, CPU)


@on_processes(2)
def test_groups_of_parameters_over_the_same_ranks_share_a_transport(
    rank: int, world_size: int
) -> None:
    world, other = dist.group.WORLD, dist.new_group([0, 1])
    first = select_transport(world, CPU)
    assert select_transport(world, CPU) is first
    assert select_transport(world, CPU, "collectives") is not first
    assert select_transport(other, CPU) is not first


@on_processes(2)
def test_ranks_may_drop_a_transport_at_different_times(rank: int, world_size: int) -> None:
    transport = select_transport(dist.group.WORLD, CPU)
    if rank == 0:
        del transport
        gc.collect()
    transport = select_transport(dist.group.WORLD, CPU)
    full = torch.empty(world_size)
    transport.all_gather([torch.full((1,), float(rank))], [full]).wait()
    assert full.tolist() == [0.0, 1.0]


@pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64")
@on_processes(2)
def test_messages_overlap_with_compute_and_shared_memory_does_not(
    rank: int, world_size: int
) -> None:
    assert not LocalTransport().overlaps_compute
    for name, overlaps in (("shm", False), ("c10d", True), ("collectives", True)):
        transport = select_transport(dist.group.WORLD, CPU, name)
        assert dist.group.WORLD is not None
        for each in (transport, CustomTransport(transport, dist.group.WORLD)):
            assert each.overlaps_compute == overlaps, name


@on_processes(2, backend="cpu:gloo")
def test_a_device_without_a_backend_is_an_error_that_says_what_to_do(
    rank: int, world_size: int
) -> None:
    with pytest.raises(ValueError, match="none for cuda") as caught:
        select_transport(dist.group.WORLD, CUDA)
    assert "init_process_group" in str(caught.value)
    assert "cpu:gloo,cuda:" in str(caught.value)
