"""The page of a run, written into its folder: at the end of a session, or while it trains."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from shardwise.app.recipes.core.rundir import RunDir, write_text
from shardwise.app.runs.page import Updates, page
from shardwise.app.runs.snapshot import RunReader
from shardwise.elastic.errors import say

#: Seconds between two pages of a run that is under way, at least.
SECONDS = 10.0
#: Share of the time that goes into writing them, at most.
SHARE = 0.005


def write_report(files: RunDir) -> None:
    """Write ``report.html``, by what the folder says now.

    If it cannot be written, a line says so: it is no reason for a training to fail.
    """
    try:
        _write(files, RunReader(files.root), Updates.NEVER)
    except OSError as error:
        say(f"warning    {files.report} cannot be written ({error.strerror})")


@contextlib.contextmanager
def report_under_way(files: RunDir) -> Iterator[None]:
    """Write ``report.html`` every few seconds until the block ends, in a thread.

    If it cannot be written, a line says so once, and the training goes on.
    """
    over = threading.Event()
    thread = threading.Thread(target=_keep_writing, args=(files, over), name="shardwise-page")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _keep_writing(files: RunDir, over: threading.Event) -> None:
    reader, pause = RunReader(files.root), 0.0
    while not over.wait(pause):
        began = time.thread_time()
        try:
            _write(files, reader, Updates.RELOAD, max(SECONDS, pause))
        except OSError as error:
            say(f"warning    --page: {files.report} cannot be written ({error.strerror})")
            return
        # The first page has also read what earlier sessions recorded; the next ones need not.
        pause = max(SECONDS, (time.thread_time() - began) / SHARE) if pause else SECONDS


def write_report_of_lost(files: RunDir) -> None:
    """Write ``report.html`` of a run whose ranks could not say how it ended: they were killed."""
    if files.run_json.exists() and RunReader(files.root).read()["state"] == "lost":
        write_report(files)


def _write(files: RunDir, reader: RunReader, updates: Updates, every: float = 0.0) -> None:
    run = reader.read()
    write_text(files.report, page(run["name"], [run], updates, every))
