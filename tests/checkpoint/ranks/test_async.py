"""Saving while training goes on: what is saved, when, and who hears of failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError, storage
from tests.checkpoint.meshes import Setup, build, fill, give_state, wrong
from tests.checkpoint.small import make, same, train
from tests.worlds import Ranks


class Gate:
    """Holds writing back until it is opened."""

    def __init__(self) -> None:
        self._original = storage.write_shard
        self._open = threading.Event()
        self.reached = threading.Event()

    def __enter__(self) -> Gate:
        storage.write_shard = self._write  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        storage.write_shard = self._original

    def open(self) -> None:
        self._open.set()

    def _write(self, *args: Any) -> Any:
        self.reached.set()
        assert self._open.wait(60)
        return self._original(*args)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as made:
        yield made


def test_what_is_saved_is_what_was_when_it_was_asked_for(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = make()
    extra: dict[str, Any] = {"noise": torch.ones(3), "seen": [1]}
    before, before_optimizer = make()
    handle = checkpoint.async_save(tmp_path / "a", model, optimizer, extra)
    assert not handle.done()
    with pytest.raises(TimeoutError, match="not done after"):
        handle.result(timeout=0.01)
    for _ in range(2):  # training goes on, in place
        train(model, optimizer)
    extra["noise"].zero_()
    extra["seen"].append(2)
    optimizer.param_groups[0]["lr"] = 0.2
    assert gate.reached.wait(60)
    assert not (tmp_path / "a").exists()
    gate.open()

    assert handle.result() == tmp_path / "a"

    assert handle.done()
    found, found_optimizer = make(seed=3)
    loaded = checkpoint.load(tmp_path / "a", found, found_optimizer)
    assert same(found, before)
    assert torch.equal(loaded["noise"], torch.ones(3))
    assert loaded["seen"] == [1]
    assert found_optimizer.param_groups[0]["lr"] == 0.1
    for each in ((found, found_optimizer), (before, before_optimizer)):
        torch.manual_seed(5)
        train(*each)
    assert same(found, before), "the optimizer's state is of that moment too"


@pytest.mark.parametrize("then", ["save", "async_save", "load"])
def test_what_comes_next_waits_for_what_is_under_way(tmp_path: Path, gate: Gate, then: str) -> None:
    model, optimizer = make()
    handle = checkpoint.async_save(tmp_path / "a", model, optimizer)
    threading.Timer(0.2, gate.open).start()
    if then == "load":
        checkpoint.load(tmp_path / "a", model, optimizer)
    else:
        following = getattr(checkpoint, then)(tmp_path / "b", model, optimizer)
    assert handle.done()
    assert (tmp_path / "a").exists()
    if then == "async_save":
        following.result()  # or it would go on behind the gate of the next test


def test_an_error_surfaces_once_at_the_next_call_or_at_the_handle(tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path / "a", model)
    checkpoint.async_save(tmp_path / "a", model, optimizer)
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoint.async_save(tmp_path / "b", model, optimizer)
    handle = checkpoint.async_save(tmp_path / "a", model, optimizer)
    with pytest.raises(CheckpointError, match="already exists"):
        handle.result()
    checkpoint.async_save(tmp_path / "b", model, optimizer).result()
    with pytest.raises(TypeError, match=r"extra\.x: found builtins\.object"):
        checkpoint.async_save(tmp_path / "c", model, optimizer, {"x": object()})
    checkpoint.save(tmp_path / "c", model, optimizer)


def _train_on(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str]]:
    """Save three times while collectives of training go on; then load each."""
    model, optimizer = build(Setup("llama-tied", (world_size,)), seed=0)
    give_state(optimizer)
    told = []
    for step in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        handle = checkpoint.async_save(
            checkpoint.step_folder(folder, step + 1), model, optimizer, keep_last=2
        )
        if step == 2:
            handle.result()
        give_state(optimizer)
        for _ in range(20):
            dist.all_reduce(torch.ones(100))
    bad = {"x": object()} if rank == 1 else {}
    try:
        checkpoint.async_save(folder / "bad", model, optimizer, bad)
    except TypeError as error:
        told.append(str(error))
    try:
        checkpoint.save(folder / "good", model, optimizer)
    except CheckpointError as error:
        told.append(str(error))
        checkpoint.save(folder / "good", model, optimizer)
    else:
        # The rank whose mistake it was has been told already.
        pass
    checkpoint.load(checkpoint.step_folder(folder, 3), model, optimizer)
    found = [name for name, p in model.named_parameters() if (p.to_local() != 2).any()]
    fill(model, optimizer)
    checkpoint.async_save(folder / "filled", model, optimizer).result()
    checkpoint.load(folder / "filled", *(pair := build(Setup("llama-tied", (world_size,)), 1)))
    return told, found + wrong(*pair)


def test_ranks_save_while_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(_train_on, 2, tmp_path)
    assert first[1] == second[1] == []
    assert checkpoint.steps(tmp_path) == [2, 3]
    assert len(first[0]) == 1 and "rank 1: TypeError: extra.x" in first[0][0]
    assert len(second[0]) == 1 and second[0][0].startswith("extra.x: found builtins.object")
    assert not (tmp_path / "bad").exists()
