"""Let ``shardwise train`` compute as slowly as asked, and tell when its processes get how far.

    PYTHONPATH=benchmarks/stretched GOODPUT_STEP=0.5 GOODPUT_PHASES=phases.jsonl \
        shardwise train lm --nproc 4

Python imports a module of this name when a process starts, before anything else. Forward and
backward of a step then last as long as asked, as though a device computed them: the rest of that
time is slept. So processes that share too few processors do not slow each other, and where one is
gone, the others do not become faster. The exchanges and the optimizer step take what they take.

Each process of a training writes a line whenever it has got further: see :data:`PHASES`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LOOP, _TRAINING = "shardwise.app.recipes.core.loop", "shardwise.app.recipes.core.training"


class _Stretch(importlib.abc.MetaPathFinder):
    """Changes the modules of a training as they are imported.

    Args:
        step: seconds that forward and backward last.
        file: where phases go.
    """

    def __init__(self, step: float, file: str) -> None:
        self._step = step
        self._file = file
        self._changes = {_LOOP: self._change_loop, _TRAINING: self._change_training}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is to be changed as Python would, and change it once it is loaded."""
        change = self._changes.pop(name, None)
        spec = None if change is None else importlib.util.find_spec(name)
        if spec is None or spec.loader is None or change is None:
            return None
        load: Callable[[ModuleType], None] = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec

    def tell(self, phase: str) -> None:
        """Write a line: who is how far, and when."""
        line = {"pid": os.getpid(), "rank": int(os.environ["RANK"]), "phase": phase}
        written = json.dumps({**line, "at": time.monotonic()}) + "\n"
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, written.encode())  # at once: a line of another process never comes between
        os.close(file)

    def _change_training(self, module: Any) -> None:
        self._tell_before(module, "train", "imported")
        self._tell_before(module, "train_connected", "connected")

    def _change_loop(self, module: Any) -> None:
        loop = module.Loop
        self._tell_before(loop, "run", "loaded")
        compute, step = loop._accumulate, loop._step
        first = True

        @functools.wraps(compute)
        def stretched(*args: Any) -> Any:
            until = time.monotonic() + self._step
            found = compute(*args)
            time.sleep(max(0.0, until - time.monotonic()))
            return found

        @functools.wraps(step)
        def told(*args: Any) -> Any:
            nonlocal first
            found = step(*args)
            if first:
                first = False
                self.tell("stepped")
            return found

        loop._accumulate, loop._step = stretched, told

    def _tell_before(self, owner: Any, name: str, phase: str) -> None:
        """Write a line whenever a function is called."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            self.tell(phase)
            return function(*args, **kwargs)

        setattr(owner, name, told)


if "RANK" in os.environ and "GOODPUT_STEP" in os.environ:
    _stretch = _Stretch(float(os.environ["GOODPUT_STEP"]), os.environ["GOODPUT_PHASES"])
    _stretch.tell("started")
    sys.meta_path.insert(0, _stretch)
