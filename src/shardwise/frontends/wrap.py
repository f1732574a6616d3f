"""The old path of :mod:`shardwise.wrap`."""

from shardwise.wrap import *  # noqa: F403
