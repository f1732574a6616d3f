"""Where ranks of a test look for published weights."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def keep_names_in(folder: str | Path) -> None:
    """Publish and subscribe under names that are kept in a folder, in this process."""
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
