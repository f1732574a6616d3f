"""Which transport a process group gets, and who says so."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from shardwise.base import libc
from shardwise.transport.base import LocalTransport, Transport
from shardwise.transport.custom import CustomTransport
from shardwise.transport.select import select_transport
from tests.harness import run_ranks
from tests.worlds import on_processes

pytestmark = pytest.mark.usefixtures("new_ranks")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _chosen(rank: int, world_size: int, requested: str | None) -> str:
    transport = select_transport(dist.group.WORLD, CPU, requested)
    assert isinstance(transport, Transport)
    assert (transport.rank, transport.world_size) == (rank, world_size)
    return transport.name


@pytest.mark.parametrize(
    ("requested", "variable", "name"),
    [
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
    ],
)
def test_the_argument_wins_over_the_variable_over_auto(
    requested: str | None, variable: str | None, name: str
) -> None:
    found = run_ranks(_chosen, 2, requested, env={"SHARDWISE_TRANSPORT": variable})
    assert found == [name, name]


@pytest.mark.parametrize("requested", [None, "auto", "shm", "c10d", "collectives"])
def test_one_rank_needs_no_group(requested: str | None) -> None:
    assert select_transport(None, CPU, requested).name == "local"


def _alone(rank: int, world_size: int) -> str:
    return select_transport(dist.group.WORLD, CPU, "collectives").name


def test_a_group_of_one_rank_is_local() -> None:
    assert run_ranks(_alone, 1) == ["local"]


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


def _let_go(rank: int, world_size: int) -> list[float]:
    transport = select_transport(dist.group.WORLD, CPU)
    if rank == 0:
        del transport
        gc.collect()
    transport = select_transport(dist.group.WORLD, CPU)
    full = torch.empty(world_size)
    transport.all_gather([torch.full((1,), float(rank))], [full]).wait()
    return full.tolist()


def test_ranks_may_drop_a_transport_at_different_times() -> None:
    assert run_ranks(_let_go, 2) == [[0.0, 1.0]] * 2


def _overlaps(rank: int, world_size: int) -> dict[str, bool]:
    names = ("shm", "c10d", "collectives")
    transports = {name: select_transport(dist.group.WORLD, CPU, name) for name in names}
    assert dist.group.WORLD is not None
    for name in names:
        transports[f"custom {name}"] = CustomTransport(transports[name], dist.group.WORLD)
    return {name: transport.overlaps_compute for name, transport in transports.items()}


@pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64")
def test_messages_overlap_with_compute_and_shared_memory_does_not() -> None:
    assert not LocalTransport().overlaps_compute
    decided = run_ranks(_overlaps, 2)[0]
    assert decided == {
        "shm": False,
        "c10d": True,
        "collectives": True,
        "custom shm": False,
        "custom c10d": True,
        "custom collectives": True,
    }


def _on_a_device_without_backend(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="none for cuda") as caught:
        select_transport(dist.group.WORLD, CUDA)
    return str(caught.value)


def test_a_device_without_a_backend_is_an_error_that_says_what_to_do() -> None:
    for message in run_ranks(_on_a_device_without_backend, 2, backend="cpu:gloo"):
        assert "init_process_group" in message
        assert "cpu:gloo,cuda:" in message
