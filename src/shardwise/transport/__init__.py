"""What moves tensors between ranks: it knows tensors and ranks, nothing of modules."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.transport.base import FullBuffers, Reduce, Transport, Work
    from shardwise.transport.select import select_transport

__all__ = ["FullBuffers", "Reduce", "Transport", "Work", "select_transport"]


def __getattr__(name: str) -> Any:
    # When asked for, and not before: what needs no torch here is used where there is none yet.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "select" if name == "select_transport" else "base"
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
