"""Our format under torch's own ``dcp.save`` and ``dcp.load``: the storage to hand to them."""

from shardwise.checkpoint.ranks.reader import Reader
from shardwise.checkpoint.ranks.writer import Writer

__all__ = ["Reader", "Writer"]
