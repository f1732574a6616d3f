"""Checkpoints that are whole or not there, never run code, and load on any mesh."""
