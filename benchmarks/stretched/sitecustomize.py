"""Let ``shardwise train`` compute as slowly as asked.

    PYTHONPATH=benchmarks/stretched GOODPUT_STEP=0.5 shardwise train lm --nproc 4

Python imports a module of this name when a process starts, before anything else. Forward and
backward of a step then last as long as asked, as though a device computed them: the rest of that
time is slept. So processes that share too few processors do not slow each other, and where one is
gone, the others do not become faster. The exchanges and the optimizer step take what they take.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LOOP = "shardwise.app.recipes.core.loop"


class _Stretch(importlib.abc.MetaPathFinder):
    """Changes the loop of a training as it is imported.

    Args:
        step: seconds that forward and backward last.
    """

    def __init__(self, step: float) -> None:
        self._step = step
        self._looks = True

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the loop as Python would, and change it once it is loaded."""
        if name != _LOOP or not self._looks:
            return None
        self._looks = False  # the others find it now
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load: Callable[[ModuleType], None] = spec.loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            compute = module.Loop._accumulate

            @functools.wraps(compute)
            def stretched(*args: Any) -> Any:
                until = time.monotonic() + self._step
                found = compute(*args)
                time.sleep(max(0.0, until - time.monotonic()))
                return found

            module.Loop._accumulate = stretched

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if "RANK" in os.environ and "GOODPUT_STEP" in os.environ:
    sys.meta_path.insert(0, _Stretch(float(os.environ["GOODPUT_STEP"])))
