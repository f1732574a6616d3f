"""The layout of a model over the ranks of a mesh: which rank holds what.

The package itself is callable: ``shardwise.inspect(model)``. ``api.py`` has the ways to make a
report, and ``read.py`` reads the layouts. The report (``report.py``) is a value made of ``grid.py``
and ``tiling.py``; ``text.py``, ``page.py`` and ``picture.py`` show it.
"""

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """The class of this module, which makes it callable as ``shardwise.inspect(model)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from shardwise.inspect.api import inspect

        return inspect(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
