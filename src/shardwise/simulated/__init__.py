"""Ranks that are threads of one process, for notebooks, debuggers and tests."""
