"""Ctrl-C at any line of a publisher: what readers see, and whether the next update works."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.base.errors import CheckpointError
from shardwise.weights import folder, memory, publish
from tests.interrupts import at_every_line
from tests.weights.constant import constant_model, set_weights


@pytest.mark.parametrize("module", [memory, folder])
def test_no_two_versions_have_one_number(module: Any, tmp_path: Path) -> None:
    to = None if module is memory else str(tmp_path)
    model = constant_model(0, size=4)
    seen: dict[int, float] = {}
    with shardwise.publish(model, "policy", to=to) as weights:
        subscription = shardwise.subscribe("policy", at=to)
        value = 0.0
        for attempt in at_every_line([module.__file__, publish.__file__]):
            value += 1
            set_weights(model, value)
            with attempt:
                weights.update()
            for _ in range(2):  # what the interrupted one has left, and the next one
                tensors = dict(subscription)
                found = set(tensors["weight"].flatten().tolist())
                assert len(found) == 1, f"two versions in one, after {attempt.where}"
                assert seen.setdefault(subscription.version, *found) == found.pop(), attempt.where
                del tensors
                value += 1
                set_weights(model, value)
                weights.update()
            assert subscription.wait(timeout=1) == weights.version


def test_a_name_is_free_after_an_interrupted_start_or_end() -> None:
    model = constant_model(1, size=4)
    for attempt in at_every_line([memory.__file__, publish.__file__]):
        with attempt:
            shardwise.publish(model, "policy").close()
        with shardwise.publish(model, "policy"):
            pass


def test_two_threads_update_one_after_the_other() -> None:
    model = constant_model(1, size=4)
    with shardwise.publish(model, "policy") as weights, ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: weights.update(), range(8))) == list(range(2, 10))
        assert weights.version == 9


def test_a_thread_waits_for_one_that_has_only_begun() -> None:
    with (
        shardwise.publish(constant_model(1, size=4), "policy") as weights,
        ThreadPoolExecutor(1) as pool,
    ):
        assert pool.submit(weights.update).result() == 2  # the thread that had the last turn
        with weights._turn:
            update = pool.submit(weights.update)
            wait([update], timeout=0.1)
            assert not update.done()
        assert update.result() == 3


def test_an_update_inside_an_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with shardwise.publish(constant_model(1, size=4), "policy") as weights:
        with monkeypatch.context() as patched:
            patched.setattr(weights._versions, "update", weights.update)  # as a signal handler
            with pytest.raises(RuntimeError, match="found this thread updating it already"):
                weights.update()
        assert weights.update() == 2


def test_what_an_interrupted_deletion_has_left_is_removed(tmp_path: Path) -> None:
    model, left = constant_model(1, size=4), tmp_path / "policy" / ".deleted-0a1b2c3d.partial"
    for _ in range(2):
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
        with shardwise.publish(model, "policy", to=str(tmp_path)):
            assert not left.exists()


def _held_by_child(ready: Any, over: Any) -> None:
    tensors = dict(shardwise.subscribe("policy"))
    child = os.fork()
    if not child:
        over.wait()
        os._exit(0)
    del tensors
    ready.put(child)
    over.wait()
    os.waitpid(child, 0)


def test_the_process_that_still_has_a_version_is_named() -> None:
    context = multiprocessing.get_context("fork")
    ready, over = context.SimpleQueue(), context.Event()
    with shardwise.publish(constant_model(1, size=4), "policy", buffers=2) as weights:
        reader = context.Process(target=_held_by_child, args=(ready, over))
        reader.start()
        child = ready.get()
        weights.update()
        with pytest.raises(CheckpointError) as error:
            weights.update()
        over.set()
        reader.join()
        assert f"process {child} " in str(error.value)
        assert f"process {reader.pid} " not in str(error.value)
        assert weights.update() == 3
