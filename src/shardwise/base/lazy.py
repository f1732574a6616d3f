"""Names and files of a package that are loaded when they are first used.

Importing torch takes seconds, and ``shardwise --help`` has no use for it.
"""

from __future__ import annotations

import ast
import functools
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    The names are those of its ``__all__``. The imports in its source say where each comes from.
    They stand under ``if TYPE_CHECKING:``, so that only type checkers follow them.

    Args:
        package: the package's ``__name__``.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = _imports_of(package)[name]
        if home == package:  # a module of the package
            value = import_module(f"{package}.{name}")
        else:
            value = getattr(__import__(home, fromlist=[name]), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *module.__all__})

    return get, names


@functools.cache
def _imports_of(package: str) -> dict[str, str]:
    """Where the source of a package imports each name from."""
    nodes = ast.walk(ast.parse(resource(f"{package}.__init__", "__init__.py")))
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@functools.cache
def resource(module: str, name: str) -> str:
    """Return the text of a file that is installed beside a module, such as a style sheet.

    Args:
        module: the module's ``__name__``.
        name: of the file, from the folder of the module.
    """
    content = pkgutil.get_data(module.rpartition(".")[0], name)
    assert content is not None, f"{name} is not installed beside {module}"
    return content.decode().strip()
