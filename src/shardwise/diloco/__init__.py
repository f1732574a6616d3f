"""Training over slow links: many inner steps on each replica, then one outer step for all.

After DiLoCo (Douillard et al., arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.diloco.api import DiLoCo
    from shardwise.diloco.settings import OuterSGD, Streaming, WireFormat

__all__ = ["DiLoCo", "OuterSGD", "Streaming", "WireFormat"]

# As in the package above: importing torch takes seconds, and names are fetched when first used.
_HOME = {
    "DiLoCo": "shardwise.diloco.api",
    "OuterSGD": "shardwise.diloco.settings",
    "Streaming": "shardwise.diloco.settings",
    "WireFormat": "shardwise.diloco.settings",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
