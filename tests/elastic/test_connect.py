"""Joining the default process group: one that exists, and the store of torch's agent."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwise.base.errors import PeerLostError, UserError
from shardwise.elastic import connect
from shardwise.elastic.connect import agree_on_attempt, connected
from shardwise.elastic.world import World
from shardwise.transport import peers
from tests.worlds import Ranks

WAIT = 30.0


def _world(rank: int) -> World:
    return World(rank, 3, rank, 3)


def _agree(store: dist.Store, order: list[int]) -> list[str]:
    """Let ranks come in an order, the last one once the others wait; return their prefixes."""
    with ThreadPoolExecutor(3) as pool:
        waiting = {
            rank: pool.submit(agree_on_attempt, store, _world(rank), WAIT) for rank in order[:-1]
        }
        last = agree_on_attempt(store, _world(order[-1]), WAIT)
        found = {order[-1]: last, **{rank: each.result() for rank, each in waiting.items()}}
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
def test_ranks_that_start_again_never_meet_those_of_an_earlier_attempt(order: list[int]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    attempts = [_agree(store, order) for _ in range(3)]
    assert all(len(set(prefixes)) == 1 for prefixes in attempts), "all ranks of one agree"
    assert len({prefixes[0] for prefixes in attempts}) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(PeerLostError, match="rank 0 waited for rank 1 of 3"):
        agree_on_attempt(store, _world(0), 0.05)
    with pytest.raises(PeerLostError, match="rank 2 waited for rank 0 of 3"):
        agree_on_attempt(store, _world(2), 0.05)


def test_a_rank_that_waits_long_for_another_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(peers, "WARNING_SECONDS", 0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agree_on_attempt, store, World(0, 2, 0, 2), WAIT)
        while "rank 0 has waited 0 s for rank 1 of 2 to connect" not in caplog.text:
            assert not waiting.done()
            time.sleep(0.01)
        agree_on_attempt(store, World(1, 2, 1, 2), WAIT)
        waiting.result()


def test_the_agents_store_is_used_below_the_name_of_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    made: list[dist.Store] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **__: made.append(store))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name in ("first", "second"):
        connect._connect(World(0, 1, 0, 1), "gloo", timedelta(seconds=WAIT))
        assert not made[-1].check(["address"]), "what an earlier attempt wrote is not seen"
        made[-1].set("address", name)


def _in_a_group(rank: int, world_size: int) -> list[str]:
    world = World(rank, world_size, rank, world_size)
    found = []
    for attempt in (world, World(rank, 5, rank, 5)):
        try:
            with connected(attempt, "gloo"):
                found.append("used")
        except UserError as error:
            found.append(str(error))
    assert dist.is_initialized(), "it belongs to whoever created it"
    try:
        with connected(world, "cpu:gloo,cuda:nccl"):
            found.append("used")
    except UserError as error:
        found.append(str(error))
    return found


def test_a_process_group_that_exists_is_used_if_it_fits(ranks: Ranks) -> None:
    [found, _] = ranks(_in_a_group, 2)
    used, size, backend = found
    assert used == "used"
    assert "found rank 0 of 2, expected rank 0 of 5" in size
    assert "TorchConfig(backend='cpu:gloo,cuda:nccl')" in backend
