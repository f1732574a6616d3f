"""The finalizer of SplitMix64, from which all pseudorandom choices of our own come."""

from __future__ import annotations


def mix(number: int) -> int:
    """Mix 64 bits so that each depends on all of them."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31
