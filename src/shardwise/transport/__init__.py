"""Transports: they move tensors between ranks, and know nothing about modules."""
