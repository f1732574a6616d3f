"""The command line as a shell calls it, in this process."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from shardwise.app.cli import main
from shardwise.base import progress


def call(*words: str) -> int:
    """Run ``shardwise WORDS``; return its exit code."""
    argv = mock.patch.object(sys, "argv", ["shardwise", *words])
    # On a busy machine anything may take long enough to say so.
    quiet = mock.patch.object(progress, "QUICK", 1e6)
    with argv, quiet, pytest.raises(SystemExit) as ended:
        main.app()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run what is a mistake of its user; return the one line that it says."""
    capsys.readouterr()
    code, (out, err) = call(*words), capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err[:-1].isprintable()
    return err
