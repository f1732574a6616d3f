"""What moves tensors between ranks: it knows tensors and ranks, nothing of modules."""

from shardwise.transport.base import FullBuffers, Reduce, Transport, Work
from shardwise.transport.select import select_transport

__all__ = ["FullBuffers", "Reduce", "Transport", "Work", "select_transport"]
