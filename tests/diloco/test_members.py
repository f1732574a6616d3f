"""Replicas leave, join and are lost; what they have trained is not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import PeerLostError, RanksDivergedError
from shardwise.diloco import DiLoCo, OuterSGD, Streaming, WireFormat
from shardwise.diloco.average import Average
from tests.diloco.reference import Reference, batch_of, make_inner
from tests.diloco.replicas import assert_values, sharded, whole
from tests.harness import run_ranks
from tests.sharding.nets import loss_of

pytestmark = pytest.mark.usefixtures("new_ranks")

EVERY = 2


class Alone:
    """A replica of one process with a model that is not sharded."""

    def __init__(self, group: dist.ProcessGroup, seed: int = 0, **settings: Any) -> None:
        self.model = sharded(None, seed)
        self.inner = make_inner(self.model.parameters())
        self.diloco = DiLoCo(self.model, self.inner, group=group, **{"every": EVERY, **settings})

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            loss_of(self.model, batch_of(dist.get_rank(), step)).backward()
            self.diloco.step()
            self.diloco.zero_grad()

    def outer(self) -> dict[str, torch.Tensor]:
        with self.diloco.outer_parameters():
            return whole(self.model)


def _group(*ranks: int) -> dist.ProcessGroup:
    """Create a group, as all ranks of the world do, members or not."""
    return dist.new_group(ranks)


def _leave_and_join(rank: int) -> dict[str, Any]:
    """Train three replicas, two, and three again; a round each, and one step before each change."""
    everyone = _group(0, 1, 2)
    replica = Alone(everyone)
    replica.train(1, 2)
    pair = _group(0, 1)
    if rank == 2:
        replica.diloco.change_group(None)
    else:
        replica.diloco.change_group(pair)
        replica.train(3, 4)
    again = _group(0, 1, 2)
    if rank == 2:
        replica = Alone(again, seed=7)  # other values, and nothing of what the others have
    else:
        replica.diloco.change_group(again)
    replica.train(5, 6)
    return {"outer": replica.outer(), "steps": replica.diloco.steps}


def _begin_with_other_values(rank: int) -> dict[str, torch.Tensor]:
    return whole(Alone(_group(0, 1, 2), seed=rank).model)


def _say_other_things(rank: int) -> str:
    with pytest.raises(RanksDivergedError) as caught:
        Alone(_group(0, 1, 2), every=EVERY + (rank == 1))
    return str(caught.value)


def _miss_the_end(rank: int) -> dict[str, Any]:
    """Fail on rank 1 where the others finish; its overlapped steps continue."""
    settings = {"every": 3, "streaming": Streaming(overlap=1)}
    replica = Alone(_group(0, 1, 2), **settings)
    replica.train(1, 3)
    end = Average.wait

    def fail(self: Average) -> torch.Tensor:
        end(self)
        raise PeerLostError("a peer is lost")

    if rank == 1:
        Average.wait = fail  # type: ignore[method-assign]
        with pytest.raises(PeerLostError):
            replica.train(4, 4)
    else:
        replica.train(4, 4)
    replica.diloco.change_group(_group(0, 1, 2))
    Average.wait = end  # type: ignore[method-assign]
    return {"outer": replica.outer(), "inner": whole(replica.model)}


def _several(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "changes": _leave_and_join(rank),
        "begun": _begin_with_other_values(rank),
        "diverged": _say_other_things(rank),
        "missed": _miss_the_end(rank),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_several, 3)


def test_outer_parameters_are_those_of_whoever_was_there(found: Any) -> None:
    reference = Reference(3, OuterSGD())
    for step in range(1, 7):
        if step == 3:
            reference.leave(2)
        if step == 5:
            reference.join(2)
        reference.inner_step(step)
        if step % EVERY == 0:
            reference.exchange()
    for rank, results in enumerate(found):
        assert_values(results["changes"]["outer"], reference.outer, f"rank {rank}")
        assert results["changes"]["steps"] == 6, "who joins counts as the others do"


def test_outer_parameters_are_the_same_bits_after_changes(found: Any) -> None:
    first, *others = (results["changes"]["outer"] for results in found)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_all_begin_with_the_parameters_of_the_first(found: Any) -> None:
    first = found[0]["begun"]
    for results in found[1:]:
        assert all(torch.equal(first[name], results["begun"][name]) for name in first)


def test_other_settings_are_named(found: Any) -> None:
    for results in found:
        assert "rank 1 has every=3" in results["diverged"]
        assert "rank 0 has every=2" in results["diverged"]


def test_who_missed_the_end_of_an_exchange_gets_its_result(found: Any) -> None:
    first = found[0]["missed"]
    for results in found[1:]:
        for part in ("outer", "inner"):
            for name, value in first[part].items():
                assert torch.equal(value, results["missed"][part][name]), f"{part} {name}"


# -- a replica dies ------------------------------------------------------------------------------


def _die(rank: int, world_size: int, wire: WireFormat) -> dict[str, Any]:
    replica = Alone(_group(0, 1, 2), wire=wire)
    replica.train(1, 3)
    if rank == 2:
        os._exit(0)
    with pytest.raises(PeerLostError, match="pseudo-gradient of fragment 0"):
        replica.train(4, 4)
    replica.diloco.zero_grad()
    before = replica.outer()
    # The dead one takes no part in making it.
    replica.diloco.change_group(dist.new_group([0, 1], use_local_synchronization=True))
    assert all(torch.equal(value, before[name]) for name, value in replica.outer().items())
    replica.diloco.flush()
    replica.train(5, 6)
    return replica.outer()


def test_survivors_go_on_and_lose_nothing() -> None:
    # Nobody waits for the timeout: that would be too late for the test.
    outcomes = run_ranks(_die, 3, WireFormat.FP32, pg_timeout=600, expect_failures=True)
    reference = Reference(3, OuterSGD())
    for step in range(1, 7):
        reference.inner_step(step)
        if step == 4:
            reference.leave(2)
        if step % EVERY == 0:
            reference.exchange()
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.error
        assert_values(outcome.result, reference.outer, f"rank {outcome.rank}")
