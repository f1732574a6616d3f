"""Where the tests of this package run: on the GPUs of this machine, or on its CPUs without one.

On CPUs the same tests run on gloo, so that they are known to be sound before the first GPU runs
them. What only a GPU has (streams, its allocator, pinned memory) is marked ``needs_gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.harness import RanksFailedError, run_ranks
from tests.sharding.nets import Net, seeded, shard_blocks

TYPE = "cuda" if torch.cuda.is_available() else "cpu"
GPUS = torch.cuda.device_count()


def needs_gpu(test: Any) -> Any:
    """Mark a test of what only a GPU has."""
    return pytest.mark.gpu(pytest.mark.skipif(TYPE == "cpu", reason="needs a GPU")(test))


def needs_gpus(count: int) -> Callable[[Any], Any]:
    """Mark a test of what takes a GPU for each of some ranks."""
    few = pytest.mark.skipif(count > GPUS, reason=f"needs {count} GPUs")
    return lambda test: pytest.mark.gpu(few(test))


def long_on_cpus(test: Any) -> Any:
    """Mark a test that need not always run where there is no GPU: others look at the same."""
    return pytest.mark.long(test) if TYPE == "cpu" else test


@dataclass(frozen=True)
class Devices:
    """How ranks are started on the devices of this machine.

    Attributes:
        shared: the backend of ranks that share a GPU.
    """

    shared: str

    def run(self, check: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call ``check(rank, world_size, *args)`` on every rank of a new world."""
        backend = "gloo"
        if TYPE == "cuda":
            backend = "cpu:gloo,cuda:nccl" if world_size <= GPUS else self.shared
        return run_ranks(check, world_size, *args, backend=backend, timeout=90)

    @classmethod
    def find(cls) -> Devices:
        """Try whether NCCL lets ranks share a GPU; gloo does."""
        if TYPE == "cpu" or GPUS > 1:
            return cls("cpu:gloo,cuda:nccl")
        try:
            run_ranks(_meet, 2, backend="cpu:gloo,cuda:nccl", timeout=60)
        except RanksFailedError:
            return cls("cpu:gloo,cuda:gloo")
        return cls("cpu:gloo,cuda:nccl")


def _meet(rank: int, world_size: int) -> None:
    ones = torch.ones(4, device=device())
    dist.all_reduce(ones)
    assert ones.tolist() == [world_size] * 4


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if TYPE == "cuda" else _CPU


_CPU = torch.device("cpu")


def mesh(*shape: int) -> DeviceMesh:
    """A mesh over all ranks: ``(shard,)`` by default, or ``(replicate, shard)``."""
    names = ("shard",) if len(shape) < 2 else ("replicate", "shard")
    return init_device_mesh(TYPE, shape or (dist.get_world_size(),), mesh_dim_names=names)


def sharded(net: nn.Module | None = None, **kwargs: Any) -> nn.Module:
    """``Net``, or another model with blocks, sharded over all ranks unless ``mesh`` is given."""
    net = seeded(Net) if net is None else net
    return shard_blocks(net, **{"mesh": mesh(), **kwargs})


def whole(seed: int = 0) -> nn.Module:
    """``Net`` on the device of this rank, not sharded."""
    return seeded(Net, seed).to(device())


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare a sharded tensor, wherever its shards are, with one that is not sharded."""
    if isinstance(found, DTensor):
        local = found.to_local().to(device())
        there = DTensor.from_local(
            *(local, found.device_mesh, found.placements),
            run_check=False,
            shape=found.shape,
            stride=found.stride(),
        )
        found = there.full_tensor()
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")
