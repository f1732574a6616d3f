"""A rank that dies while training is named by those that are left, within seconds."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

from shardwise import PeerLostError, fully_shard
from tests.harness import run_ranks

VICTIM = 1


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _loses_a_peer(rank: int, world_size: int, moment: str) -> str:
    model = _model()
    x = torch.ones(2, 64)
    model(x).sum().backward()

    def die(*_: object) -> None:
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)  # by now the other has gone

    if moment == "forward":
        model[1].register_forward_hook(die)
    else:
        model[1].register_full_backward_hook(die)
    try:
        for _ in range(2):
            model(x).sum().backward()
    except PeerLostError as error:
        return str(error)
    raise AssertionError("the loss of a peer went unnoticed")


@pytest.mark.parametrize(("world_size", "moment"), [(2, "forward"), (3, "backward")])
def test_survivors_name_the_group_and_the_peer(world_size: int, moment: str) -> None:
    # Nobody waits for the timeout: that would be too late for the test.
    outcomes = run_ranks(_loses_a_peer, world_size, moment, pg_timeout=600, expect_failures=True)

    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            continue
        assert outcome.ok, outcome.error
        message = outcome.result
        assert f"rank {rank} lost" in message
        if world_size == 2:
            assert f"lost rank {VICTIM}" in message
        assert "all-gather of" in message or "reduce-scatter of" in message
