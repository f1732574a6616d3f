"""Who holds what: the layout of a model over the ranks of a mesh, for people and for programs.

The package is what users call: ``shardwise.inspect(model)``. From the bottom up: ``tiling.py`` and
``grid.py`` are values, ``read.py`` makes a ``report.py`` of a model, ``planning.py`` of a model
that is not there; ``text.py``, ``plain.py``, ``draw.py`` and ``page.py`` show it.
"""

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """This module, which is also the function that ``shardwise`` shows under its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from shardwise.inspect.api import inspect

        return inspect(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
