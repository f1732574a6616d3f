"""The files that a timeline is kept in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk.files import read_small, replace_file
from shardwise.checkpoint.disk.strict import parse, refuse
from shardwise.insight.timeline.page import page, trace
from shardwise.insight.timeline.steps import Timeline, together

#: Files in the folder of a timeline.
TIMELINE, TRACE, PAGE = "timeline.json", "trace.json", "timeline.html"

_PARTS = "rank-*.json"
_MOST_BYTES = 1 << 29  # a recording stops long before


def write(timeline: Timeline, folder: str | Path) -> None:
    """Write the timeline, the trace for Perfetto, and the page. Each is complete, or is not.

    Args:
        timeline: what was recorded.
        folder: where to; it is made if it does not exist.

    Raises:
        OSError: the folder cannot be written to.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    replace_file(root / TIMELINE, _dumps(timeline.to_json()))
    replace_file(root / TRACE, _dumps(trace(timeline)))
    # A name or an error may hold half a surrogate pair, which no encoding has.
    replace_file(root / PAGE, page(timeline).encode(errors="replace"))


def read(path: str | Path) -> Timeline:
    """Read the timeline that a recording wrote.

    If the recording was cut short, what each rank has left in the folder is put together.

    Args:
        path: the folder that :func:`~shardwise.timeline.record` wrote to, or its
            ``timeline.json``.

    Raises:
        CheckpointError: a file is damaged, or there is none.
    """
    root = Path(path)
    whole = root / TIMELINE if root.is_dir() else root
    if root.is_dir() and not os.path.lexists(whole):
        return read_parts(root)
    return Timeline.from_json(_parsed(whole), str(whole))


def read_parts(folder: Path) -> Timeline:
    """Put together what ranks have left in a folder, each by itself.

    Raises:
        CheckpointError: a file is damaged, or there is none.
    """
    parts = sorted(folder.glob(_PARTS))
    if not parts:
        refuse(str(folder), "no timeline", f"a folder with {TIMELINE}, or with {_PARTS}")
    return together(Timeline.from_json(_parsed(part), str(part)) for part in parts)


def make_folder(folder: Path) -> None:
    """Make a folder for a recording, without what an earlier one wrote to it.

    Raises:
        OSError: it cannot be made, or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*(folder / name for name in (TIMELINE, TRACE, PAGE)), *folder.glob(_PARTS)):
        path.unlink(missing_ok=True)


def leave(mine: Timeline, folder: Path) -> None:
    """Write what one rank knows, when ranks cannot put it together.

    The last one to do so writes what all have left.

    Raises:
        CheckpointError: what another rank has left is damaged.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    [rank] = mine.ranks
    replace_file(folder / f"rank-{rank.rank:05}.json", _dumps(mine.to_json()))
    with _one_at_a_time(folder):
        write(read_parts(folder), folder)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep other ranks out, where the file system can: not on every network file system."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _dumps(value: Any) -> bytes:
    """Return JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _parsed(path: Path) -> Any:
    return parse(read_small(path, _MOST_BYTES), str(path))
