"""Tools for existing checkpoints: list, verify, compare, convert, consolidate."""
