"""Ranks that meet for the first time, and one that never comes: the others raise, naming it.

The timeout of the process groups is ten minutes; nobody waits for it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import PeerLostError, RanksDivergedError, fully_shard, init_mesh
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.diloco.members import MemberReport, agree
from shardwise.transport import peers
from shardwise.transport.peers import Peers, make_together, new_group
from tests.harness import run_ranks

SECONDS = 60  # on a busy machine; four are meant, and the timeout is ten minutes


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _says(call: Callable[[], object], kind: type[Exception] = PeerLostError) -> str:
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - start < SECONDS, "noticed late"
    return str(caught.value)


def _shard(group: dist.ProcessGroup, *, is_wrong: bool) -> None:
    """Shard a model; what one rank asks for is wrong, and it does not come to the meeting."""
    mesh = DeviceMesh.from_group(group, "cpu")
    layer = nn.Linear(4, 4)
    fully_shard(nn.ModuleList([layer]) if is_wrong else layer, mesh=mesh)


def _meet_in_shared_memory(group: dist.ProcessGroup, *, leaves: bool) -> str:
    if not leaves:
        return _says(lambda: _shard(group, is_wrong=False))
    with pytest.raises(ValueError, match="forward"):
        _shard(group, is_wrong=True)
    time.sleep(1.0)  # who raised is missed at the latest when it has ended
    os._exit(1)


def _make_a_group(ranks: list[int], *, leaves: bool) -> str:
    if leaves:
        _die()
    return _says(lambda: new_group(ranks))


def _make_a_group_that_breaks(ranks: list[int], *, leaves: bool) -> str:
    """All come; then one dies while the process group is being made."""
    make = _die if leaves else partial(dist.new_group, ranks, use_local_synchronization=True)
    return _says(lambda: make_together(make, "a process group", ranks))


def _save_together(group: dist.ProcessGroup) -> str:
    """Rank 2 dies while what it tells the rank that coordinates is half way."""
    if dist.get_rank() == 2:
        threading.Timer(0.3, _die).start()
    ranks = Ranks(group)
    part = bytes(2**28 if dist.get_rank() == 2 else 1)
    return _says(
        lambda: ranks.together("the test", lambda: part, lambda parts: [0] * len(parts)),
        CheckpointError,
    )


def _all(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    said = {}
    sizes = {"dp": 2, "tp": 3} if rank else {"dp": 3, "tp": 2}
    warned = _warnings(0.5, folder / f"rank {rank} was warned")
    if rank == 0:
        while not (folder / "rank 1 was warned").exists():  # late, and no more than that
            time.sleep(0.02)
    said["diverged"] = _says(lambda: init_mesh(device_type="cpu", **sizes), RanksDivergedError)
    said["warned"] = "; ".join(warned)
    pairs = [new_group([first, first + 3]) if rank % 3 == first else None for first in range(3)]
    three = dist.new_group([0, 1, 2])
    leaves = rank >= 3
    match rank % 3:
        case 0:
            assert pairs[0] is not None
            said["meeting"] = _meet_in_shared_memory(pairs[0], leaves=leaves)
        case 1:
            said["group"] = _make_a_group([1, 4], leaves=leaves)
        case 2:
            said["breaks"] = _make_a_group_that_breaks([2, 5], leaves=leaves)
    dist.barrier(three)
    said["checkpoint"] = _save_together(three)
    mine = MemberReport("", (), (0,), 0, (0,), (0,))
    said["diloco"] = _says(lambda: agree(three, mine))
    assert _is_usable(new_group([0, 1])), "those who are left can meet anew"
    return said


def _warnings(patience: float, noted: Path) -> list[str]:
    """What is logged from now on, after so long a wait; a file notes that there is something."""
    peers.WARNING_SECONDS = patience
    told: list[str] = []

    def note(record: logging.LogRecord) -> None:
        told.append(record.getMessage())
        noted.touch()

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    logging.getLogger(peers.__name__).addHandler(handler)
    return told


def _is_usable(group: dist.ProcessGroup) -> bool:
    found = torch.ones(1)
    Peers(group).call(lambda: dist.all_reduce(found, group=group), "a sum")
    return found.item() == group.size()


def test_a_rank_that_never_comes_is_named_within_seconds(tmp_path: Path) -> None:
    outcomes = run_ranks(_all, 6, tmp_path, pg_timeout=600, timeout=120, expect_failures=True)
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.describe(6)
    zero, one = (outcome.result for outcome in outcomes[:2])

    assert "makes a mesh of shape (3, 2) (dp, tp)" in one["diverged"]
    assert "makes a mesh of shape (2, 3) (dp, tp)" in zero["diverged"]
    waited = r"rank 1 has waited \d+ s for ranks \[0\] in the creation of a mesh"
    assert re.search(waited, one["warned"])
    assert zero["warned"] == ""
    assert zero["meeting"].startswith("rank 0 lost rank 3 during the handshake of shared memory")
    assert one["group"].startswith("rank 1 lost rank 4 during the creation of a process group of")
    assert [outcome.exitcode for outcome in outcomes[2:]] == [-signal.SIGKILL, 1, *[-9] * 2]
    for each in (zero, one):
        assert "rank 2: was lost" in each["checkpoint"]
        assert "lost rank 2 during the agreement of DiLoCo's replicas" in each["diloco"]
