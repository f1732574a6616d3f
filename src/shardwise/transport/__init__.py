"""Transports: they move tensors between ranks, and know nothing about modules."""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.transport.base import FullBuffers, Reduce, Transport, Work
    from shardwise.transport.select import select_transport

__all__ = ["FullBuffers", "Reduce", "Transport", "Work", "select_transport"]

_HOME = dict.fromkeys(__all__, "shardwise.transport.base")
_HOME["select_transport"] = "shardwise.transport.select"

if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
