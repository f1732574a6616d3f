"""What the server has imported from which ranks are forked: see :mod:`tests.harness`."""

from __future__ import annotations

from shardwise.launch.importing import importing

with importing():
    import pytest  # noqa: F401

    import shardwise.sharding.api
    import shardwise.sharding.grad
    import shardwise.sharding.init  # noqa: F401
