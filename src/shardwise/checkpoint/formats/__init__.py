"""Checkpoint formats: each is read as a source, and most can be written from one."""
