"""Tools that watch ``torch.distributed`` see every call of the collectives transport."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.base.devices import GLOO
from shardwise.transport.base import Reduce
from shardwise.transport.collectives import NcclTransport
from shardwise.transport.select import select_transport
from tests.harness import run_ranks
from tests.worlds import on_processes

NAMES = [
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "send",
    "recv",
    "batch_isend_irecv",
]


def _watch(names: Sequence[str]) -> Counter[str]:
    """Replace functions of ``torch.distributed`` by ones that count, as a monitor does."""
    counts: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the monitor is an old one
                return original(*args, **kwargs)

        return replacement

    for name in names:
        if hasattr(dist, name):
            setattr(dist, name, counting(name, getattr(dist, name)))
    return counts


def _count(rank: int, world_size: int, watched: list[str], dtypes: list[torch.dtype]) -> Any:
    transport = select_transport(dist.group.WORLD, torch.device("cpu"), "collectives")
    counts = _watch(watched)  # after the transport was made: it looks them up at every call
    shards = [torch.ones(n, dtype=dtype) for dtype in dtypes for n in (1, 5, 200_000)]
    fulls = [torch.empty(shard.numel() * world_size, dtype=shard.dtype) for shard in shards]
    transport.all_gather(shards, fulls).wait()
    transport.reduce_scatter(fulls, shards, Reduce.SUM).wait()
    transport.all_reduce(shards, Reduce.SUM).wait()
    transport.all_gather([], []).wait()
    transport.all_gather([torch.empty(0)], [torch.empty(0)]).wait()
    assert all(bool((shard == 4).all()) for shard in shards)
    return counts


def test_every_call_is_one_collective_whatever_the_list() -> None:
    for counts in run_ranks(_count, 2, NAMES[:1] + NAMES[2:3] + NAMES[4:], [torch.float32]):
        assert counts == {"all_gather_single": 1, "reduce_scatter_single": 1, "all_reduce": 1}


def test_two_dtypes_are_two_collectives() -> None:
    dtypes = [torch.float32, torch.bfloat16]
    for counts in run_ranks(_count, 2, ["all_reduce"], dtypes):
        assert counts == {"all_reduce": 2}


def test_a_monitor_of_the_older_names_sees_them_too() -> None:
    watched = ["all_gather_into_tensor", "reduce_scatter_tensor"]
    for counts in run_ranks(_count, 2, watched, [torch.float32]):
        assert counts == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


@on_processes(2)
def test_a_tensor_alone_of_its_dtype_is_not_copied(rank: int, world_size: int) -> None:
    """A tensor alone of its dtype travels from and to its own memory."""
    transport = select_transport(dist.group.WORLD, torch.device("cpu"), "collectives")
    seen: list[int] = []
    original = dist.all_gather_single

    def replacement(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(output.data_ptr())
        return original(output, *args, **kwargs)

    dist.all_gather_single = replacement
    full = torch.empty(3 * world_size)
    transport.all_gather([torch.full((3,), float(rank))], [full]).wait()
    assert seen == [full.data_ptr()]
    assert full.view(world_size, 3)[:, 0].tolist() == [0.0, 1.0]


def _counted(
    counts: Counter[str], name: str, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    counts[name] += 1
    return original(*args, **kwargs)


def _replaced_by_partials(rank: int, world_size: int) -> Counter[str]:
    """A tool replaces functions by partial ones, whose first arguments are its own."""
    assert dist.group.WORLD is not None
    counts: Counter[str] = Counter()
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        setattr(dist, name, functools.partial(_counted, counts, name, getattr(dist, name)))
    transports = [
        select_transport(dist.group.WORLD, torch.device("cpu"), "collectives"),
        NcclTransport(dist.group.WORLD, GLOO),
    ]
    for transport in transports:
        shards = [torch.ones(5, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        fulls = [torch.empty(5 * world_size, dtype=shard.dtype) for shard in shards]
        transport.all_gather(shards, fulls).wait()
        transport.reduce_scatter(fulls, shards, Reduce.SUM).wait()
        transport.all_reduce(shards, Reduce.SUM).wait()
        assert all(bool((shard == 4).all()) for shard in shards)
    return counts


def test_a_tool_may_replace_them_by_partial_functions() -> None:
    for counts in run_ranks(_replaced_by_partials, 2):
        # The collectives transport gathers both dtypes as bytes, in one call.
        assert counts == {"all_gather_single": 3, "reduce_scatter_single": 4, "all_reduce": 4}
