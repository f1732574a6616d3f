"""The old path of :mod:`shardwise.pretrained`."""

from shardwise.pretrained import *  # noqa: F403
