"""Tools that watch ``torch.distributed`` see every call of the collectives transport."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.base.devices import GLOO
from shardwise.transport.base import Reduce
from shardwise.transport.collectives import NcclTransport
from shardwise.transport.select import select_transport
from tests.worlds import on_processes


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


@pytest.mark.parametrize(
    ("watched", "dtypes", "expected"),
    [
        # Whatever the list of tensors is.
        (
            [
                *("all_gather_single", "reduce_scatter_single", "all_reduce"),
                *("send", "recv", "batch_isend_irecv"),
            ],
            [torch.float32],
            {"all_gather_single": 1, "reduce_scatter_single": 1, "all_reduce": 1},
        ),
        (["all_reduce"], [torch.float32, torch.bfloat16], {"all_reduce": 2}),
        # The names of older versions of torch.
        (
            ["all_gather_into_tensor", "reduce_scatter_tensor"],
            [torch.float32],
            {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
        ),
    ],
    ids=["one dtype", "two dtypes", "older names"],
)
@on_processes(2)
def test_a_call_is_one_collective_for_each_dtype_under_any_name(
    rank: int,
    world_size: int,
    watched: list[str],
    dtypes: list[torch.dtype],
    expected: dict[str, int],
) -> None:
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
    assert counts == expected


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


@on_processes(2)
def test_a_tool_may_replace_them_by_partial_functions(rank: int, world_size: int) -> None:
    """Whose first arguments are its own."""
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
    # The collectives transport gathers both dtypes as bytes, in one call.
    assert counts == {"all_gather_single": 3, "reduce_scatter_single": 4, "all_reduce": 4}
