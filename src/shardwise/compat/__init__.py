"""Standing in for torch's own sharding in programs that were written for it."""
