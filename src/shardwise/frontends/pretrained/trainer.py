"""The old path of :mod:`shardwise.pretrained.trainer`."""

from shardwise.pretrained.trainer import *  # noqa: F403
