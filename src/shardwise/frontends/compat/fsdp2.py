"""The old path of :mod:`shardwise.compat.fsdp2`."""

from shardwise.compat.fsdp2 import *  # noqa: F403
from shardwise.compat.fsdp2 import __getattr__ as __getattr__
