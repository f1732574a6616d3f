"""Names and files of a package that are loaded when they are first used.

Importing torch takes seconds, and ``shardwise --help`` has no use for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module, resources
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: the package's ``__name__``.
        homes: the module that defines each name; for a module's own name, the module itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name])
        value = home if homes[name].endswith(f".{name}") else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


@functools.cache
def resource(module: str, name: str) -> str:
    """Return the text of a file that is installed beside a module, such as a style sheet.

    Args:
        module: the module's ``__name__``.
        name: of the file, from the folder of the module.
    """
    package = resources.files(module.rpartition(".")[0])
    return package.joinpath(name).read_text(encoding="utf-8").strip()
