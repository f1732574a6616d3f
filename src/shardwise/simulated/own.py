"""What a process has one of, and each simulated rank needs one of its own."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch import threads
from shardwise.base import devices, observe


class Own:
    """What belongs to the rank that runs: read before another rank runs, and written back.

    What has not changed in between is not written. Random numbers of Python are not even read: to
    do that takes longer than all the rest.
    """

    def __init__(self) -> None:
        generator: Any = random.random
        self._python: Any = generator.__self__  # whose state is as many bytes as its type says
        header, size = object.__basicsize__, random.Random.__mro__[1].__basicsize__
        self._at, self._size = id(self._python) + header, size - header
        self._drawn: tuple[object, object] = (None, None)
        self._parts: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (self._python_state, self._set_python_state),
            (_numpy_generator, _set_numpy_generator),
            (torch.get_default_dtype, torch.set_default_dtype),
            (lambda: threads.handlers_of_process().copy(), _set_handlers),
            (lambda: threads.variables_of_process().copy(), _set_variables),
            (_folder, os.chdir),
            (lambda: sys.stdout, lambda shown: setattr(sys, "stdout", shown)),
            (observe.watchers, observe.set_watchers),
        ]
        if (device := devices.accelerator()) is not None:
            read = functools.partial(devices.random_state, device)
            self._parts.append((read, functools.partial(devices.set_random_state, device)))
        self._now: list[Any] = []

    def save(self) -> list[Any]:
        """Return all of it."""
        self._now = [read() for read, _ in self._parts]
        return self._now

    def restore(self, saved: list[Any]) -> None:
        """Put back what is another's since the last :meth:`save`."""
        for (_, write), mine, other in zip(self._parts, saved, self._now, strict=True):
            if mine is not other and (isinstance(mine, torch.Tensor) or mine != other):
                write(mine)

    def _python_state(self) -> tuple[object, object]:
        drawn = ctypes.string_at(self._at, self._size), self._python.gauss_next
        if drawn != self._drawn[0]:
            self._drawn = drawn, random.getstate()
        return self._drawn

    def _set_python_state(self, drawn: tuple[object, Any]) -> None:
        self._drawn = drawn
        random.setstate(drawn[1])


def _numpy_generator() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_bit_generator()


def _set_numpy_generator(generator: Any) -> None:
    if generator is not None:
        sys.modules["numpy"].random.set_bit_generator(generator)


def _set_handlers(handlers: dict[Any, Any]) -> None:
    present = threads.handlers_of_process()
    present.clear()
    present.update(handlers)


def _set_variables(variables: dict[bytes, bytes]) -> None:
    present = threads.variables_of_process()
    for name, value in variables.items():
        if present.get(name) is not value:
            os.environb[name] = value
    if len(present) > len(variables):
        for name in present.keys() - variables.keys():
            del os.environb[name]


def _folder() -> str | None:
    """Return the current folder; ``None`` if a rank has removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
