"""Our format under torch's own ``dcp.save`` and ``dcp.load``: the storage to hand to them."""

from shardwise.checkpoint.ranks.storage import Reader, Writer

__all__ = ["Reader", "Writer"]
