"""The old path of :mod:`shardwise.timeline`."""

from shardwise.timeline import *  # noqa: F403
