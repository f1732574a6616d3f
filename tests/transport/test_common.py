"""Parameters that live once per host, of which every rank's shard is a part."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import PeerLostError
from shardwise.transport import common, futex, select_transport
from shardwise.transport.base import CommonFull, Label
from shardwise.transport.shm import ShmTransport
from tests.harness import run_ranks

CPU = torch.device("cpu")
PAGE = os.sysconf("SC_PAGE_SIZE")
pytestmark = pytest.mark.skipif(not futex.is_available(), reason="needs Linux on x86-64")


def _transport() -> ShmTransport:
    transport = select_transport(dist.group.WORLD, CPU, "shm")
    assert isinstance(transport, ShmTransport)
    return transport


def _common(transport: ShmTransport, numel: int, dtype: torch.dtype = torch.float32) -> CommonFull:
    made = transport.common_full(numel, dtype)
    assert made is not None
    return made


def _gather(transport: ShmTransport, made: CommonFull, numel: int) -> torch.Tensor:
    transport.all_gather([made.chunk(numel)], [made.full], Label("some group")).wait()
    return made.full


def _every_chunk_is_seen(rank: int, world_size: int) -> None:
    transport = _transport()
    # Chunks that begin and end within a page that two ranks write to.
    for numel, dtype in ((1, torch.float64), (PAGE, torch.float32), (3001, torch.bfloat16)):
        made = _common(transport, numel, dtype)
        for step in range(3):
            made.chunk(numel).fill_(rank + 10 * step)
            found = _gather(transport, made, numel).view(world_size, numel).clone()
            expected = torch.arange(world_size, dtype=dtype) + 10 * step
            assert torch.equal(found, expected[:, None].expand(-1, numel))
            made.release()
            transport.settle()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_every_rank_has_in_its_chunk_is_in_the_full(world_size: int) -> None:
    run_ranks(_every_chunk_is_seen, world_size)


def _another_source(rank: int, world_size: int) -> None:
    transport = _transport()
    made = _common(transport, 5)
    transport.all_gather([torch.full((5,), rank + 1.0)], [made.full]).wait()
    assert made.full.tolist() == [1.0] * 5 + [2.0] * 5


def test_a_shard_that_lives_elsewhere_is_copied_into_its_chunk() -> None:
    run_ranks(_another_source, 2)


def _writes_stay(rank: int, world_size: int) -> None:
    transport = _transport()
    numel = 3 * PAGE
    made = _common(transport, numel)
    made.chunk(numel).fill_(1.0)
    _gather(transport, made, numel)
    made.full[:: PAGE // 8] = 100.0 + rank
    dist.barrier()
    assert made.full[0] == 100.0 + rank, "no other rank's writes"
    assert made.chunk(numel).max() == 1.0, "the shard is what it was"
    made.release()
    assert made.full.max() == 1.0, "forgotten"
    transport.settle()
    made.chunk(numel).fill_(2.0)
    assert _gather(transport, made, numel).min() == 2.0, "and the pages are in common again"


def test_what_is_written_to_the_full_stays_with_the_rank_until_it_is_freed() -> None:
    run_ranks(_writes_stay, 2)


def _slow_reader(rank: int, world_size: int) -> None:
    transport = _transport()
    made = _common(transport, 1000)
    for step in range(20):
        made.chunk(1000).fill_(step)
        _gather(transport, made, 1000)
        if rank == 1:
            time.sleep(0.005)
        assert made.full.eq(step).all(), "no peer writes before all have settled"
        made.release()
        transport.settle()


def test_settling_waits_for_those_that_still_read() -> None:
    run_ranks(_slow_reader, 2)


def _leaves_before_settling(rank: int, world_size: int) -> str:
    transport = _transport()
    made = _common(transport, 1000)
    _gather(transport, made, 1000)
    if rank == 1:
        os._exit(7)
    with pytest.raises(PeerLostError) as caught:
        transport.settle()
    return str(caught.value)


def test_a_peer_that_dies_before_it_settles_is_named() -> None:
    outcomes = run_ranks(_leaves_before_settling, 2, expect_failures=True)
    assert outcomes[0].ok, outcomes[0].error
    assert "rank 0 lost rank 1 during the wait that follows" in outcomes[0].result
    assert "some group" in outcomes[0].result


def _nothing_small(rank: int, world_size: int) -> None:
    transport = _transport()
    assert transport.common_full(common.SMALLEST // 8 - 1, torch.float32) is None
    assert transport.common_full(common.SMALLEST // 8, torch.float32) is not None
    assert transport.common_full(0, torch.float32) is None


def test_small_parameters_are_not_worth_pages_of_their_own() -> None:
    run_ranks(_nothing_small, 2, spares_small_groups=True)


def _held(transport: ShmTransport) -> int:
    """Bytes that the file in common takes."""
    return 512 * os.fstat(transport._posts.meeting.fd).st_blocks


def _last_one_out(rank: int, world_size: int) -> list[int]:
    transport = _transport()
    numel = 1_000_000
    made = _common(transport, numel)
    chunk = made.chunk(numel).fill_(1.0)
    _gather(transport, made, numel).sum()
    seen = [_held(transport)]
    dist.barrier()
    if rank == 0:
        del made
        gc.collect()
    dist.barrier()
    assert rank == 0 or made.full.min() == 1.0, "a rank that stays keeps all of it"
    dist.barrier()
    if rank == 1:
        del made
        gc.collect()
    dist.barrier()
    seen.append(_held(transport))  # the shards are still there
    assert chunk.sum() == numel
    dist.barrier()
    del chunk
    gc.collect()
    dist.barrier()
    return [*seen, _held(transport)]


def test_pages_go_back_when_the_last_rank_has_let_go() -> None:
    whole = 2 * 4 * 1_000_000
    for used, without_full, left in run_ranks(_last_one_out, 2):
        assert used >= whole
        assert without_full >= whole
        assert left < whole / 10


def _on_gloo(rank: int, world_size: int) -> Any:
    return select_transport(dist.group.WORLD, CPU, "c10d").common_full(10_000, torch.float32)


def test_other_transports_have_nothing_in_common() -> None:
    assert run_ranks(_on_gloo, 2) == [None, None]
