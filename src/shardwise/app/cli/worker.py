"""The old path of :mod:`shardwise.worker`."""

from shardwise.worker import *  # noqa: F403
