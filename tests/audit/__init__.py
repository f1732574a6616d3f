"""Tests of ``shardwise.audit``, and of what ``DTensor`` computes wrongly."""
