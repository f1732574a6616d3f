"""Weights that other processes read while a model trains, one version at a time."""
