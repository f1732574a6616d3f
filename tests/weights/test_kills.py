"""Whoever is killed, at whatever moment: no reader sees half a version, and no memory is left."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import CheckpointError

_FORK = multiprocessing.get_context("fork")
_SIZE = 300_000


def _publish_for_ever(name: str, to: str | None) -> None:
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.zeros(_SIZE)) for _ in range(2))
    weights = shardwise.publish(model, name, to=to, buffers=3)
    value = 0
    while True:
        value += 1
        for param in model.parameters():
            nn.init.constant_(param, value)
        try:
            weights.update()
        except CheckpointError:  # readers hold everything
            time.sleep(0.001)


def _read_for_ever(name: str, to: str | None, torn: Any) -> None:
    subscription = shardwise.subscribe(name, at=to)
    while True:
        try:
            tensors = dict(subscription)
        except CheckpointError:
            continue
        values = {float(bound) for each in tensors.values() for bound in each.aminmax()}
        if len(values) != 1:
            torn.value += 1


def _holders(name: str) -> list[str]:
    """The processes of this host that have memory of a version, open or mapped."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            files = Path(f"/proc/{process}/fd")
            links = [os.readlink(files / descriptor) for descriptor in os.listdir(files)]
            maps = Path(f"/proc/{process}/maps").read_text().splitlines()
            found += [process for each in (*links, *maps) if f"memfd:weights {name}" in each]
    return found


def _killed(name: str, to: str | None, kills: int, seed: int) -> int:
    """Kill either side many times; return how many torn versions readers saw."""
    draw = random.Random(seed)
    torn = _FORK.Value("i", 0)
    targets = [(_publish_for_ever, (name, to)), *[(_read_for_ever, (name, to, torn))] * 2]
    processes: list[BaseProcess] = [_FORK.Process(target=f, args=args) for f, args in targets]
    for each in processes:
        each.start()
    try:
        for _ in range(kills):
            time.sleep(draw.uniform(0.0, 0.05))
            at = draw.randrange(len(targets))
            os.kill(processes[at].pid or 0, signal.SIGKILL)
            processes[at].join()
            processes[at] = _FORK.Process(target=targets[at][0], args=targets[at][1])
            processes[at].start()
        # All work is still done after the last one.
        subscription = shardwise.subscribe(name, at=to)
        dict(subscription)
        subscription.wait()
    finally:
        for each in processes:
            each.kill()
            each.join()
    return int(torn.value)


def _check(place: str, folder: Path, kills: int) -> None:
    # Not once for the file: workers may have imported it before they were forked.
    name = f"policy of {os.getpid()}"
    assert _killed(name, str(folder) if place == "folder" else None, kills, seed=1) == 0
    gc.collect()
    assert _holders(name) == []


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_no_reader_sees_half_a_version_and_no_memory_is_left(tmp_path: Path, place: str) -> None:
    _check(place, tmp_path, 20)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_the_same_after_a_thousand_kills(tmp_path: Path, place: str) -> None:
    _check(place, tmp_path, 1000)
