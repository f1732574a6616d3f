"""Where this user's caches are."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for caches of Shardwise, which need not exist.

    Raises:
        RuntimeError: there is no home folder, and ``XDG_CACHE_HOME`` is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "shardwise"
