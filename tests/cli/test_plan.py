"""``shardwise plan``: a table, JSON or a page; every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.app.cli import run as cli_run
from shardwise.app.recipes.core.recipe import PLAN_FILE
from shardwise.base import devices
from tests.cli.shell import call, refused
from tests.recipes.small import write_model

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


_NETS = "tests.cli.test_plan"


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))


def batch(count: int) -> torch.Tensor:
    return torch.zeros(count, 4)


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("llama-80b", "MODEL: found llama-80b, expected llama-tiny"),
        ("llama-80b", "did you mean llama-8b?"),
        (
            "nowhere:build",
            "MODEL: found nowhere:build (ModuleNotFoundError: No module named 'nowhere')",
        ),
        ("llama-tiny --mesh dp=2,tp", "--mesh: found 'tp' in 'dp=2,tp'"),
        ("llama-tiny --mesh dp=200000", "--mesh: found dp=200000, 200,000 ranks, expected at most"),
        ("llama-tiny --strategy hybrid", "--mesh: found dp=8 with strategy hybrid, expected the"),
        ("llama-tiny --mesh dp=2,tp=3", "--mesh: found dp=2,tp=3, expected a tp that divides"),
        ("llama-tiny --batch-size 0", "--batch-size: found 0, expected 1 or more"),
        ("llama-tiny --seq-length 9999", "--seq-length: found 9,999, expected at most 1,024"),
        ("llama-tiny --image-size 32", "--image-size: found 32, expected none: llama-tiny takes"),
        ("vit-tiny --seq-length 9", "--seq-length: found 9, expected none: vit-tiny takes images"),
        ("llama-tiny --optimizer lamb", "--optimizer: found lamb, expected one of adamw"),
        (
            "llama-tiny --optimizer nowhere:sgd",
            "--optimizer: found nowhere:sgd (ModuleNotFoundError: No module named",
        ),
        ("llama-tiny --device h100 --transport shm", "--transport: found shm, expected auto"),
        (
            "llama-tiny --mesh dp=2 --wire tp:int8",
            "--wire: found the dimension tp, expected",
        ),
        ("llama-tiny --device h1000", "--device: found h1000 (did you mean h100?), expected"),
        ("llama-tiny --device h100 --link ib-4", "--link: found ib-4"),
        ("llama-tiny --device-file no.toml", "no.toml"),
        (
            "llama-tiny --recompute-every 2 --device h100 --fit device",
            "--recompute-every: found 2, expected --activation-checkpointing too",
        ),
        ("llama-tiny --fit much", "--fit: found much, expected a size such as 80GiB, or 'device'"),
        (
            f"{_NETS}:build --batch {_NETS}:batch --mesh dp=1 --device h100 --fit 9B",
            "--fit: nothing fits",
        ),
        (f"{_NETS}:build --batch {_NETS}:batch --fit 99B", "--fit: found no --device"),
    ],
)
def test_mistakes_are_one_line(capsys: Capture, arguments: str, message: str) -> None:
    assert message in refused(capsys, "plan", *arguments.split())


def test_a_page_that_cannot_be_written_is_refused_first(capsys: Capture, tmp_path: Path) -> None:
    for page in (tmp_path, tmp_path / "none" / "plan.html"):
        said = refused(capsys, "plan", "nowhere:build", "--html", str(page))
        assert said.startswith(f"error: --html: found {page}")


def test_json_is_one_object(capsys: Capture) -> None:
    words = f"{_NETS}:build --batch {_NETS}:batch --mesh dp=4 --device h100 --link ib-200 --json"
    assert call("plan", *words.split()) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    found = json.loads(shown.out)
    assert found["fits"] is True
    assert found["ranks"][0]["ranks"] == 4
    assert found["step"]["bytes_sent"]["dp"] > 0
    assert set(found["step"]["parts"]) == {"compute", "exposed_communication", "optimizer", "host"}


def test_a_table_is_for_people(capsys: Capture) -> None:
    assert call("plan", *f"{_NETS}:build --batch {_NETS}:batch --mesh dp=2".split()) == 0
    shown = capsys.readouterr().out
    assert f"model      {_NETS}:build, 40 parameters" in shown
    assert "peak: " in shown


def test_a_model_in_code_is_found_in_the_current_folder(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "nets_of_a_user.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))\n"
        "def batch(count):\n"
        "    return torch.zeros(count, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = "nets_of_a_user:build --batch nets_of_a_user:batch --mesh dp=2"
    assert call("plan", *words.split()) == 0
    assert "nets_of_a_user:build, 60 parameters" in capsys.readouterr().out


def test_a_page_is_written(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = f"{_NETS}:build --batch {_NETS}:batch --mesh dp=2 --html {page}"
    assert call("plan", *words.split()) == 0
    assert capsys.readouterr() == ("", f"written to {page}\n")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(capsys: Capture) -> None:
    words = f"{_NETS}:build --batch {_NETS}:batch --mesh dp=2 --html /dev/full"
    assert call("plan", *words.split()) == 1
    assert capsys.readouterr().err == "error: cannot write: No space left on device\n"


# -- before a training -----------------------------------------------------------------------------


def _train(monkeypatch: Patch, folder: Path, launch: Callable[..., int]) -> int:
    """Train a small model, with ``--plan``, in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli_run, "run_job", launch)
    model = write_model(folder, num_hidden_layers=1).name
    words = f"train lm --plan --nproc 2 --device cpu --seq-length 16 --model {model}"
    return call(*words.split(), "--batch-size", "1")


@pytest.mark.usefixtures("no_world")
def test_a_training_says_first_what_it_needs_and_its_ranks_find_the_plan(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    plans: list[dict[str, Any]] = []

    def launch(*_: object) -> int:
        plans.append(json.loads(Path(os.environ[PLAN_FILE]).read_text()))
        return 0

    assert _train(monkeypatch, tmp_path, launch) == 0
    assert plans[0]["settings"]["mesh"] == {"dp_shard": 2}
    assert "at the peak of a rank" in capsys.readouterr().out


@pytest.mark.usefixtures("no_world")
def test_a_training_that_cannot_fit_is_not_started(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: 200 << 10)

    def launch(*_: object) -> int:
        raise AssertionError("it was started")

    assert _train(monkeypatch, tmp_path, launch) == 2
    shown = capsys.readouterr()
    assert "does not fit" in " ".join(shown.out.split())  # lines are as wide as the terminal
    assert "error: --plan: found" in shown.err


# -- torch's own FSDP2 -----------------------------------------------------------------------------

_BY_TORCH = f"{_NETS}:build --batch {_NETS}:batch --mesh dp=2"


def test_plans_for_torchs_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for runtime in ("shardwise", "torch"):
        words = f"{_BY_TORCH} --runtime {runtime} --json"
        assert call("plan", *words.split()) == 0
        found[runtime] = json.loads(capsys.readouterr().out)
    assert found["torch"]["settings"]["runtime"] == "torch"
    both = [found[name]["ranks"][0]["bytes"]["parameters"] for name in found]
    assert both[0] == both[1] > 0


def test_compares_both_runtimes(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", *f"{_BY_TORCH} --compare".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = [line for line in lines if line.startswith("memory of a rank")]
    assert head.split()[-3:] == ["shardwise", "torch", "difference"]
    assert any(line.startswith("peak") for line in lines)
    assert call("plan", *f"{_BY_TORCH} --compare --json".split()) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"shardwise", "torch"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--runtime jax", "--runtime: found 'jax', expected one of shardwise, torch"),
        ("--runtime torch --transport shm", "--transport: found shm, expected none given"),
        ("--runtime torch --wire reduce=int8", "--wire: found gather=fp32,reduce=int8"),
        ("--runtime torch --step-in-backward", "--step-in-backward: found in-backward"),
        ("--compare --fit 1GiB", "--compare: found --fit beside it"),
        ("--compare --html x.html", "--compare: found --html beside it"),
    ],
)
def test_what_torchs_fsdp2_does_not_have(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "plan", *f"{_BY_TORCH} {arguments}".split())
