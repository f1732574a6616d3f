"""Ways to break the library in a rank, so that it can be seen that the fuzzer notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.fuzz import execution
from tests.fuzz.runtimes import Sharded, local


def break_library(how: str) -> None:
    """Break it in one of ``WAYS``; in no way if ``how`` is empty."""
    if how:
        WAYS[how]()


def _skip_gathers() -> None:
    """Leave out every fifth gather of the transport ``collectives``."""
    gather = dist.all_gather_into_tensor
    calls = 0

    def skipping(output: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5:
            return gather(output, shard, *args, **kwargs)
        before = output.clone()
        work = gather(output, shard, *args, **kwargs)
        if work is not None:
            work.wait()
        output.copy_(before)
        return work

    dist.all_gather_into_tensor = skipping


def _use_stale_values() -> None:
    """Have ``collectives`` gather what was there the last time, from the second time on."""
    gather = dist.all_gather_into_tensor
    before: dict[int, torch.Tensor] = {}

    def stale(output: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = gather(output, shard, *args, **kwargs)
        if work is not None:
            work.wait()
        fresh = output.clone()
        output.copy_(before.get(output.numel(), fresh))
        before[output.numel()] = fresh
        return work

    dist.all_gather_into_tensor = stale


def _write_to_what_users_hold() -> None:
    """Write what is loaded into the tensors that were there before."""
    load = execution.Execution._load

    def writing(self: execution.Execution, action: Any) -> None:
        before = {name: value for _, kept in self._kept for name, value in kept.items()}
        load(self, action)
        if isinstance(self.runtime, Sharded):
            for name, value in self.models[0].state_dict().items():
                if name in before:
                    local(before[name]).copy_(local(value))

    execution.Execution._ACTIONS[execution.p.Load] = writing


def _part_quietly() -> None:
    """Have one rank wait for a collective that the other never calls."""
    shard = Sharded.shard

    def waiting(self: Sharded, model: Any, program: Any) -> None:
        shard(self, model, program)
        if dist.get_rank() == 0:
            model.register_forward_pre_hook(lambda *_: dist.barrier())

    Sharded.shard = waiting  # type: ignore[method-assign]


WAYS: dict[str, Callable[[], None]] = {
    "skip gathers": _skip_gathers,
    "stale values": _use_stale_values,
    "write to what users hold": _write_to_what_users_hold,
    "part quietly": _part_quietly,
}
