"""Collectives in symmetric memory: every buffer of theirs lies there, and results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise._torch import symmetric as torch_symmetric
from shardwise.devices import NCCL
from shardwise.transport import select
from shardwise.transport.base import Reduce
from shardwise.transport.collectives import NcclTransport
from shardwise.transport.custom import in_memory_of
from shardwise.transport.local import LocalTransport
from shardwise.transport.symmetric import SymmetricBuffers, SymmetricTransport, check_available
from tests.transport.conformance import Checks, check_all, fuzz
from tests.transport.symmetric import HostMemory, host_memory

CPU = torch.device("cpu")
Ranks = Callable[..., list[Any]]


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _contract(rank: int, world_size: int) -> list[int]:
    with host_memory():
        transport = select.symmetric_transport(_world_group(), CPU)
        check_all(transport, exact=False)
        fuzz(Checks(transport, exact=False), 40, seed=world_size, largest=400)
        (memory,) = HostMemory.made
        return memory.registered


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_keeps_the_contract_of_every_transport(ranks: Ranks, world_size: int) -> None:
    registered = ranks(_contract, world_size)
    assert all(each == registered[0] for each in registered), "ranks register in one order"


def _collectives(rank: int, world_size: int) -> None:
    with host_memory() as seen:
        group = _world_group()
        transport = select.symmetric_transport(group, CPU)
        assert select.symmetric_transport(group, CPU) is transport, "groups of parameters share it"
        (memory,) = HostMemory.made
        sizes = [20, 3, 40, 2]
        buffers = transport.full_buffers([n * world_size for n in sizes], [torch.float32] * 4, CPU)
        assert memory.nbytes == 0, "reserved, not allocated"
        for _ in range(2):
            buffers.allocate()
            before = memory.nbytes
            elsewhere = torch.empty(30 * world_size)
            shards = [torch.full((n,), rank + 1.0) for n in [*sizes, 30]]
            transport.all_gather(shards, [*buffers.tensors, elsewhere]).wait()
            for full in (*buffers.tensors, elsewhere):
                assert full.view(world_size, -1)[:, 0].tolist() == [1.0, 2.0]
            assert memory.comes_to(before), "staging buffers are freed after the wait"
            buffers.free()
            assert memory.nbytes == 0
        assert seen == ["all-gather"] * 8, "two in place, the small ones packed, one elsewhere"

        seen.clear()
        grads = [torch.full((n * world_size - 1,), rank + 1.0) for n in (5, 30)]
        sums = [torch.empty(n) for n in (5, 30)]
        transport.reduce_scatter(grads, sums, Reduce.SUM).wait()
        held = [each[: len(each) - rank] for each in sums]
        assert all(bool((each == 3).all()) for each in held)
        assert seen == ["reduce-scatter"], "one for both, and in symmetric memory"
        assert memory.comes_to(0)
        seen.clear()
        transport.reduce_scatter(grads, sums, Reduce.AVG).wait()
        assert all(bool((each[: len(each) - rank] == 1.5).all()) for each in sums)
        assert not seen, "an average is not"


def test_buffers_of_collectives_are_allocated_registered_and_freed(ranks: Ranks) -> None:
    ranks(_collectives, 2)


def test_full_buffers_are_slices_of_one_allocation() -> None:
    memory = HostMemory(None, CPU)  # type: ignore[arg-type]
    dtypes = [torch.bfloat16, torch.float64, torch.float32]
    buffers = SymmetricBuffers(memory, [3, 2, 0], dtypes, CPU)
    views = [tensor.view(-1) for tensor in buffers.tensors]
    for _ in range(2):
        buffers.allocate()
        buffers.allocate()
        address = buffers.whole.data_ptr()
        assert [view.data_ptr() - address for view in views[:2]] == [0, 256]
        assert [view.dtype for view in views] == dtypes
        views[1].fill_(4.0)
        assert buffers.tensors[1].tolist() == [4.0, 4.0], "views made before stay valid"
        buffers.abandon()
        assert memory.nbytes == 512, "a collective that nobody waited for may still write to it"
        buffers.free()
        buffers.free()
        assert memory.nbytes == 0


def _unavailable(rank: int, world_size: int) -> None:
    with pytest.raises(
        RuntimeError, match=r"on rank 0: expected .* 'nccl', found 'gloo' for .*cpu"
    ):
        check_available(_world_group(), CPU)
    with patch("shardwise.transport.peers.Peers.backend", lambda peers, device: NCCL):
        with pytest.raises(RuntimeError, match="expected a device with memory pools, found cpu"):
            check_available(_world_group(), CPU)
        with patch.object(torch_symmetric, "has_pools", lambda device: True):
            if not torch.cuda.is_available():
                with pytest.raises(RuntimeError, match=r"cannot allocate it with NCCL: .*NCCL"):
                    check_available(_world_group(), CPU)
            with patch.object(torch_symmetric, "set_backend") as chosen:
                made = select.symmetric_transport(_world_group(), CPU)
            chosen.assert_called_once_with("NCCL")
            assert isinstance(made, LocalTransport), "one rank gathers nothing"


def test_what_is_missing_is_said(ranks: Ranks) -> None:
    ranks(_unavailable, 1)


class _Backend:
    """A backend that allocates."""

    def __init__(self) -> None:
        self.allocated: list[torch.Tensor] = []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated.append(torch.empty(numel, dtype=dtype, device=device))
        return self.allocated[-1]


def _memory_of_group(rank: int, world_size: int) -> None:
    group = _world_group()
    plain = select.select_transport(group, CPU, "collectives")
    assert in_memory_of(group, plain, CPU) is plain, "gloo allocates nothing"

    backend = _Backend()
    with patch.object(type(group), "_get_backend", lambda group, device: backend):
        transport = in_memory_of(group, plain, CPU)
    used: list[torch.Tensor] = []
    gather, scatter = dist.all_gather_single, dist.reduce_scatter_single

    def noting(function: Any) -> Any:
        def call(out: torch.Tensor, own: torch.Tensor, **kwargs: Any) -> Any:
            used.extend((out, own))
            return function(out, own, **kwargs)

        return call

    with (
        patch.object(dist, "all_gather_single", noting(gather)),
        patch.object(dist, "reduce_scatter_single", noting(scatter)),
    ):
        check_all(transport, exact=False)
    owned = {tensor.untyped_storage()._cdata for tensor in backend.allocated}
    assert used
    assert {tensor.untyped_storage()._cdata for tensor in used} == owned


def test_a_process_group_that_allocates_gets_the_buffers_of_all_collectives(ranks: Ranks) -> None:
    ranks(_memory_of_group, 2)


def _on_gpus(rank: int, world_size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    group = _world_group()
    transport = select.symmetric_transport(group, device)
    assert isinstance(transport, SymmetricTransport)
    plain = NcclTransport(group)
    for numel in (8, 1 << 16):
        buffers = transport.full_buffers([numel * world_size], [torch.float32], device)
        for _ in range(3):
            buffers.allocate()
            shards = [torch.full((numel,), rank + 1.0, device=device)]
            expected = [torch.empty(numel * world_size, device=device)]
            transport.all_gather(shards, buffers.tensors).wait()
            plain.all_gather(shards, expected).wait()
            torch.testing.assert_close(buffers.tensors, expected)
            buffers.free()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_all_gpus(ranks: Ranks) -> None:
    ranks(_on_gpus, torch.cuda.device_count(), backend="nccl", timeout=120)
