"""Ranks of torch's own FSDP2 that wait for each other are told apart."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise import PeerLostError, RanksDivergedError
from shardwise.frontends import watch_ranks
from tests.harness import Processes, run_ranks
from tests.with_fsdp2.models import BLOCKS, WAYS, Way, batch, shard, train
from tests.worlds import on_processes


def _trained(rank: int, world_size: int, way: Way) -> None:
    model, alone = shard(way), shard(way)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, alone)]
    with shardwise.watch_ranks(model):
        losses = train(model, optimizers[0], rank, range(3))
    assert losses == train(alone, optimizers[1], rank, range(3))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_training_that_is_watched_has_the_same_bits(way: Way) -> None:
    run_ranks(_trained, 2 if len(way.shape) == 1 else 4, way)


def _skips(rank: int, world_size: int) -> str:
    model: Any = shard(Way())
    began = time.monotonic()

    def skip() -> None:
        x = batch(rank, 0)
        for number in range(BLOCKS):
            if (rank, number) != (1, 1):
                x = model[number](x)
        train(model, torch.optim.SGD(model.parameters()), rank, range(2))

    with shardwise.watch_ranks(model):
        model(batch(rank, 0))
        with pytest.raises((RanksDivergedError, PeerLostError)) as found:
            skip()
    assert time.monotonic() - began < 60
    return str(found.value)


def test_a_rank_that_skips_a_module_is_told() -> None:
    texts = run_ranks(_skips, 2, processes=Processes.NEW)
    assert any("the all-gather of 1" in text and "the all-gather of 2" in text for text in texts)


def _skips_a_backward(rank: int, world_size: int) -> str:
    """Sends gloo messages that are longer than a peer expects, which ends that process."""
    torch.manual_seed(0)
    sizes = (32, 256, 16, 32)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(sizes)))
    for each in (*model, model):
        fully_shard(each)

    def trained() -> None:
        for step in range(4):
            loss = model(batch(rank, step)).square().mean()
            if (rank, step) != (2, 1):
                loss.backward()

    told = pytest.raises((RanksDivergedError, PeerLostError))
    with shardwise.watch_ranks(model, seconds=20), told as found:
        trained()
    return str(found.value)


def test_a_rank_that_skips_a_backward_is_told() -> None:
    texts = run_ranks(_skips_a_backward, 3, processes=Processes.NEW)
    assert any("have diverged" in text and "the all-gather of 0" in text for text in texts)


def _waits(rank: int, world_size: int) -> str:
    model: Any = shard(Way())
    with shardwise.watch_ranks(model, seconds=2):
        if rank == 1:
            time.sleep(12)
            return ""
        with pytest.raises(RanksDivergedError) as found:
            model(batch(rank, 0))
    return str(found.value)


def test_all_say_where_they_are_when_one_does_not_come() -> None:
    text = run_ranks(_waits, 2, processes=Processes.NEW)[0]
    assert "rank 0 has waited" in text
    assert "the all-gather of" in text
    assert "rank 1: last no collective yet; now at" in text
    assert "test_watch_ranks.py" in text


@on_processes(2)
def test_what_cannot_be_watched_is_refused(rank: int, world_size: int) -> None:
    with (
        pytest.raises(ValueError, match="shards nothing"),
        shardwise.watch_ranks(torch.nn.Linear(2, 2)),
    ):
        pass
    with pytest.raises(ValueError, match="seconds"), shardwise.watch_ranks(shard(Way()), seconds=0):
        pass
    dist.barrier()


def _watched() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 4))
    with shardwise.watch_ranks(model):
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.2)  # a look comes, which fails the test if it raises


def test_simulated_ranks_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_ranks, "_LOOK_SECONDS", 0.01)
    shardwise.simulate(_watched, 2)
