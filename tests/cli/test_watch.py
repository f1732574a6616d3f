"""``shardwise watch`` and ``compare``: what they print, and their mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.cli.shell import call
from tests.runs import folders

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_compare_prints_a_table_json_and_a_page(capsys: Capture, tmp_path: Path) -> None:
    one, other = (str(folders.make(tmp_path / name)) for name in ("one", "other"))
    assert call("compare", one, other) == 0
    assert "all 3 settings are the same" in capsys.readouterr().out
    assert call("compare", one, other, "--json") == 0
    assert json.loads(capsys.readouterr().out)["same"] == 3
    page = tmp_path / "page.html"
    assert call("compare", one, other, "--html", str(page)) == 0
    shown = capsys.readouterr()
    assert (shown.out, "wrote" in shown.err) == ("", True)
    assert '"name":"other"' in page.read_text()


def test_compare_says_which_values_were_not_finite(capsys: Capture, tmp_path: Path) -> None:
    one, other = (folders.make(tmp_path / name) for name in ("one", "other"))
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "loss": null}\n')
    assert call("compare", str(one), str(other)) == 0
    assert "loss in 1 step from 201" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("watch nowhere", "RUN...: found nowhere, expected the folder of a run"),
        ("watch empty", "RUN...: found empty, which has none, expected the folder of a run, with"),
        ("watch one --port 99999", "--port: found 99999, expected a port, 0 to 65535"),
        ("compare one", "RUN...: found one run, expected two or more"),
    ],
)
def test_mistakes(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folders.make(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    assert call(*arguments.split()) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_watch_serves_until_it_is_stopped_and_imports_no_torch(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm")
    program = (
        "import signal, sys; from shardwise.app.cli.main import app\n"
        # The system of a build may have started all of this with the signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try: app()\n"
        "finally: print('torch' in sys.modules)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "watch", str(root), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found is not None
        with urllib.request.urlopen(found[0], timeout=20) as answer:
            assert b"llama-tiny" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "False\n"
        assert process.wait() == 130


def test_a_page_goes_to_a_device_and_leaves_the_device(capsys: Capture, tmp_path: Path) -> None:
    one, other = (str(folders.make(tmp_path / name)) for name in ("one", "other"))
    (link := tmp_path / "link").symlink_to("/dev/null")
    assert call("compare", one, other, "--html", str(link)) == 0
    assert link.is_symlink()
    assert call("compare", one, other, "--html", str(tmp_path)) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_runs_with_text_that_no_encoding_has_are_compared(capsys: Capture, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff")
    folders.make(odd, config={"a": "\ud800"})
    other = str(folders.make(tmp_path / "other"))
    assert call("compare", str(odd), other, "--json") == 0
    capsys.readouterr().out.encode()
    page = tmp_path / "page.html"
    assert call("compare", str(odd), other, "--html", str(page)) == 0
    assert "<title>" in page.read_text(encoding="utf-8")
