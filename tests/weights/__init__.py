"""Weights that other processes read while a model trains."""
