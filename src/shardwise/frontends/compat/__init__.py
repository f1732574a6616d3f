"""The old path of :mod:`shardwise.compat`."""

from shardwise.compat import *  # noqa: F403
