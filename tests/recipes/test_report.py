"""``--page``: the page of a run that is under way."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from shardwise.app.recipes.core import journal as report
from shardwise.app.recipes.core.journal import report_under_way, write_report, write_report_of_lost
from shardwise.app.recipes.core.rundir import RunDir
from tests.runs import folders


def test_a_page_is_written_while_a_run_is_under_way_and_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunDir(folders.make(tmp_path / "lm", steps=3))
    monkeypatch.setattr(report, "SECONDS", 0.01)
    monkeypatch.setattr(report, "SHARE", 100.0)
    written, write = threading.Semaphore(0), report.write_text

    def note(path: Path, text: str) -> None:
        write(path, text)
        written.release()

    monkeypatch.setattr(report, "write_text", note)
    with report_under_way(files):
        assert written.acquire(timeout=60)
        with files.metrics.open("a") as file:
            file.write(folders.metrics(4).splitlines()[-1] + "\n")
        for _ in range(2):  # the first may have read before
            assert written.acquire(timeout=60)
    text = files.report.read_text()
    assert 'data-updates="reload"' in text
    assert '"step":4' in text
    write_report(files)
    assert 'data-updates="never"' in files.report.read_text()


def test_a_page_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = RunDir(folders.make(tmp_path / "lm", steps=3))

    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(report, "write_text", refuse)
    with report_under_way(files):
        pass
    shown = capsys.readouterr()
    assert "cannot be written (No space left on device)" in shown.out + shown.err
    assert not write_report(files), "at its end, too"
    shown = capsys.readouterr()
    assert "cannot be written (No space left on device)" in shown.out + shown.err


def test_a_run_whose_name_no_encoding_has_gets_its_page(tmp_path: Path) -> None:
    files = RunDir(folders.make(tmp_path / os.fsdecode(b"odd\xff"), steps=3))
    write_report(files)
    assert "<title>odd?</title>" in files.report.read_text(encoding="utf-8")


def test_a_run_that_was_killed_has_a_page_that_says_so(tmp_path: Path) -> None:
    killed = folders.make(tmp_path / "killed", sessions=[folders.session(status="running")])
    (killed / "run.lock").write_text(f"process 1 on {socket.gethostname()}\n")
    ended = folders.make(tmp_path / "ended")
    for root in (killed, ended, tmp_path / "never began"):
        write_report_of_lost(RunDir(root))
    assert '"state":"lost"' in RunDir(killed).report.read_text()
    assert not RunDir(ended).report.exists(), "its own ranks have written it, or did not want to"
