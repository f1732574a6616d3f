"""Ways to break the library in a rank, so that it can be seen that the fuzzer notices."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from tests.corpus.gathering import own_part
from tests.fuzz import execution
from tests.fuzz.runtimes import Sharded


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
        if isinstance(self.models[0], shardwise.FSDPModule):
            for name, value in self.models[0].state_dict().items():
                if name in before:
                    own_part(before[name]).copy_(own_part(value))

    execution.Execution._ACTIONS[execution.p.Load] = writing


def _add_to_forward(do: Callable[[], object]) -> None:
    """Do something on rank 0 whenever a model that ours sharded runs."""
    shard = Sharded.shard

    def adding(self: Sharded, model: Any, program: Any) -> None:
        shard(self, model, program)
        if dist.get_rank() == 0 and isinstance(model, shardwise.FSDPModule):
            model.register_forward_pre_hook(lambda *_: do())

    Sharded.shard = adding  # type: ignore[method-assign]


def _hang() -> None:
    """Wait for what never comes."""
    _add_to_forward(threading.Event().wait)


def _die() -> None:
    """Touch memory that is not there."""
    _add_to_forward(lambda: os.kill(os.getpid(), signal.SIGSEGV))


def _raise() -> None:
    """Raise for no reason."""

    def refuse() -> None:
        raise RuntimeError("no reason")

    _add_to_forward(refuse)


WAYS: dict[str, Callable[[], None]] = {
    "skip gathers": _skip_gathers,
    "stale values": _use_stale_values,
    "write to what users hold": _write_to_what_users_hold,
    "hang": _hang,
    "die": _die,
    "raise": _raise,
}
