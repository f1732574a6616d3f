"""Programs that use all of torch's FSDP2 are watched and recorded, and train as without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import shardwise
from tests.corpus.collectives import CustomGather
from tests.with_fsdp2.models import BLOCKS, Way, batch, make, mesh_of, shard
from tests.worlds import on_processes


def _plain(model: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def _gathered_early(model: Any, x: torch.Tensor) -> None:
    model.unshard(async_op=True)
    for block in model[:BLOCKS]:
        block.unshard(async_op=True)
    _plain(model, x)


def _prefetched(model: Any, x: torch.Tensor) -> None:
    for one, other in itertools.pairwise(model[:BLOCKS]):
        one.set_modules_to_forward_prefetch([other])
    _plain(model, x)


def _run_twice(model: Any, x: torch.Tensor) -> None:
    (model(x).square().mean() + model(2 * x).square().mean()).backward()


def _backward_later(model: Any, x: torch.Tensor) -> None:
    one, other = model(x).square().mean(), model(2 * x).square().mean()
    other.backward()
    one.backward()


def _accumulated(model: Any, x: torch.Tensor) -> None:
    for micro in range(3):
        model.set_is_last_backward(micro == 2)
        model.set_requires_gradient_sync(micro == 2)
        _plain(model, x + micro)
    model.set_is_last_backward(True)


def _evaluated(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)
    _plain(model, x)


def _raises(model: Any, x: torch.Tensor) -> None:
    hook = model[1].down.register_forward_hook(_fail)
    with pytest.raises(ArithmeticError):
        model(x)
    hook.remove()
    model.reset_iter_state()
    _plain(model, x)


def _fail(*_: Any) -> None:
    raise ArithmeticError


class _Counting(CustomGather):
    """A user's all-gather, counted."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


PROGRAMS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "plain": _plain,
    "gathered early": _gathered_early,
    "prefetched": _prefetched,
    "run twice": _run_twice,
    "backward later": _backward_later,
    "accumulated": _accumulated,
    "evaluated": _evaluated,
    "raises": _raises,
}


@pytest.mark.parametrize("grouped", [False, True], ids=["blocks", "two blocks in a group"])
@on_processes(2)
def test_odd_programs_have_the_same_bits(rank: int, world_size: int, grouped: bool) -> None:
    for name, program in PROGRAMS.items():
        if grouped and name == "prefetched":
            continue  # torch prefetches modules of groups of one
        models = [_grouped() if grouped else shard(Way()) for _ in range(2)]
        for index, model in enumerate(models):
            with ExitStack() as stack:
                if index == 0:
                    stack.enter_context(shardwise.watch_ranks(model, seconds=30))
                    recording = stack.enter_context(shardwise.timeline.record(model=model))
                for step in range(1 if name == "raises" else 2):
                    program(model, batch(rank, step))
                    with torch.no_grad():
                        for param in model.parameters():
                            param.sub_(0.1 * param.grad)
        assert recording.timeline is not None, name
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local()), name
            assert torch.equal(one.grad.to_local(), other.grad.to_local()), name


def _grouped() -> Any:
    """Two blocks in one group."""
    model, mesh = make(), mesh_of(Way())
    fully_shard([model[0], model[1]], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@on_processes(2)
def test_collectives_of_the_user_are_called_and_put_back(rank: int, world_size: int) -> None:
    model, own = shard(Way()), _Counting()
    model[0].set_custom_all_gather(own)
    with shardwise.watch_ranks(model):
        _plain(model, batch(rank, 0))
    assert own.calls == 2
    with shardwise.watch_ranks(model), shardwise.timeline.record(model=model) as recording:
        _plain(model, batch(rank, 1))
    _plain(model, batch(rank, 2))
    assert own.calls == 6
    assert recording.timeline is not None
