"""``shardwise prove``: all three ways agree, and a difference is found."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.elastic.call import launch
from shardwise.frontends.strategies import Runtime, WantedMesh
from shardwise.insight import proof
from shardwise.insight.planning.settings import Settings
from shardwise.insight.proof import Holds, Proof, Trial, TrialOutcome
from tests.cli.shell import call, refused
from tests.programs import forked_agents

Capture = pytest.CaptureFixture[str]
_HERE = "tests.cli.test_prove"


@pytest.fixture(scope="module", autouse=True)
def _forked_ranks() -> Iterator[None]:
    with forked_agents():
        yield


class Net(nn.Module):
    """Blocks with dropout, tied parameters, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
            for _ in range(3)
        )
        self.head = nn.Linear(16, 16)
        self.tail = nn.Linear(16, 16)
        self.tail.weight = self.head.weight
        self.tail.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.tail(self.head(x)) * self.scale


def build() -> nn.Module:
    return Net()


def batch(count: int) -> torch.Tensor:
    return torch.randn(count, 16)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def test_all_ways_agree(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "proof.html"
    words = f"{_HERE}:build --batch {_HERE}:batch --step {_HERE}:loss --batch-size 8 --steps 4"
    assert call("prove", *words.split(), "--accumulate", "2", "--json", "--html", str(page)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == 0
    promised = {name for name, row in found["rows"].items() if row[2]["holds"] == "holds"}
    assert promised == {
        "losses differ by",
        "gradients differ by",
        "resumed from a checkpoint",
        "resumed on one, off by",
        "planned, with slack",
        "a rank skips a backward: RanksDivergedError",
        "a rank is killed: RankFailedError",
    }
    assert set(found["differences"]) == {
        name for name, param in Net().named_parameters() if param.requires_grad
    }
    assert found["made"].endswith(f"Python {platform.python_version()}")
    assert found["bounds"]["losses differ by"] == "≤ 0.001"
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "blocks.1.3.weight" in text


def test_a_proof_that_ends_early_keeps_what_it_has_found(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: object, args: tuple[Trial], nproc: int = 1) -> list[TrialOutcome]:
        if args[0].runtime is Runtime.SHARDWISE:
            raise KeyboardInterrupt
        return [_outcome(losses=[2.0, 1.0], resumed=[1.0])] * nproc

    monkeypatch.setattr(proof, "launch", train)
    page = tmp_path / "proof.html"
    words = f"{_HERE}:build --batch {_HERE}:batch --step {_HERE}:loss --batch-size 8 --steps 4"
    assert call("prove", *words.split(), "--html", str(page)) == 130
    assert f"what was found so far is in {page}" in capsys.readouterr().err
    kept = page.read_text()
    assert "not finished, without what follows the training by torch; 0 FAIL so far" in kept
    assert "losses differ by" in kept


class PartsFromOthers(Net):
    """Computes something else on rank 1; of several, the gradient of one bias is NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.head.bias
        if bias.requires_grad and os.environ["WORLD_SIZE"] == "2":
            bias.register_hook(lambda grad: grad * float("nan"))
        return super().forward(x) * (1.01 if os.environ["RANK"] == "1" else 1.0)


def build_other() -> nn.Module:
    return PartsFromOthers()


def test_gradients_that_differ_are_found_and_one_that_is_nan_differs_by_nan(tmp_path: Path) -> None:
    settings = Settings(mesh=WantedMesh.parse("dp=2"), batch=f"{_HERE}:batch", step=f"{_HERE}:loss")
    trials = [
        Trial(
            model=f"{_HERE}:build_other", settings=settings, runtime=each, steps=4, folder=tmp_path
        )
        for each in (None, Runtime.SHARDWISE)
    ]
    one, ours = (launch(proof.run, (each,), 2 if each.runtime else 1) for each in trials)
    assert one[0].resumed == one[0].losses[2:]
    differences = ours[0].differences
    assert max(each for each in differences.values() if each == each) > 1e-3
    assert [name for name, each in differences.items() if each != each] == ["head.bias"]

    shown = {"first.weight": [1.0, 0.0], "head.bias": [0.0, differences["head.bias"]]}
    made = Proof(model="net", ranks=2, steps=4, rows={}, differences=shown)
    assert made.to_json()["differences"]["head.bias"] == [0.0, "nan"]
    made.to_html(tmp_path / "proof.html")
    page = (tmp_path / "proof.html").read_text()
    assert page.index("head.bias") < page.index("first.weight"), "the worst first"


def test_losses_of_nan_neither_agree_nor_are_resumed() -> None:
    nan = float("nan")
    found = {each: [_outcome(losses=[2.0, nan], resumed=[nan])] for each in (None, *Runtime)}
    resumed = {each: [nan] for each in Runtime}
    settings = Settings(mesh=WantedMesh.parse("dp=2"))
    rows = dict(proof.compared(found, resumed, dict.fromkeys(Runtime, 120), settings))
    assert [name for name, row in rows.items() if row[2].holds is Holds.NO] == [
        "losses differ by",
        "resumed from a checkpoint",
        "resumed on one, off by",
    ]


def test_a_loss_may_cross_zero() -> None:
    """What is left of it there is rounding, of which a share says nothing."""
    found = {each: [_outcome(losses=[-2.0, 1e-9], resumed=[1e-9])] for each in (None, *Runtime)}
    found[Runtime.TORCH] = [_outcome(losses=[-2.0, -3e-9], resumed=[-3e-9])]
    settings = Settings(mesh=WantedMesh.parse("dp=2"))
    resumed = {each: [1e-9] for each in Runtime}
    assert not _failed(proof.compared(found, resumed, {}, settings))


def _outcome(**changes: object) -> TrialOutcome:
    values = {"losses": [2.0, 1.0], "resumed": [1.0], "seconds": 0.1, "peak": 100}
    return TrialOutcome(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"losses": [2.0, 1.01], "resumed": [1.01]}, "losses differ by"),
        ({"differences": {"a": 0.0, "b": 2e-4}}, "gradients differ by"),
        ({"differences": {"a": float("inf")}}, "gradients differ by"),
        ({"differences": {"a": 0.0, "b": float("nan")}}, "gradients differ by"),
        ({"resumed": [1.0 + 1e-12]}, "resumed from a checkpoint"),
        ({"peak": 121}, "planned, with slack"),
    ],
)
def test_what_does_not_hold_is_a_failure(changes: dict[str, object], row: str) -> None:
    found = {each: [_outcome()] for each in (None, *Runtime)}
    planned = dict.fromkeys(Runtime, 120)
    resumed = {each: [1.0] for each in Runtime}
    settings = Settings(mesh=WantedMesh.parse("dp=2"))
    assert not _failed(proof.compared(found, resumed, planned, settings))
    found[Runtime.SHARDWISE] = [_outcome(), _outcome(**changes)]
    if "differences" in changes:  # which rank 0 has
        found[Runtime.SHARDWISE].reverse()
    assert _failed(proof.compared(found, resumed, planned, settings)) == [row]


def _failed(rows: object) -> list[str]:
    found = dict(rows)  # type: ignore[call-overload]
    made = Proof(model="net", ranks=2, steps=2, rows=found, differences={})
    failed = [name for name, row in found.items() if any(c.holds is Holds.NO for c in row)]
    assert made.failures == len(failed)
    assert ("FAILS" in str(made)) == bool(failed)
    return failed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{_HERE}:build", "--batch: found none, for a Net, which takes neither"),
        ("nowhere:build", "MODEL: found nowhere:build"),
        (f"{_HERE}:build --steps 3", "--steps: found 3, expected 4 or more"),
        (f"{_HERE}:build --nproc 1", "--nproc: found 1, expected 2 or more"),
        (f"{_HERE}:build --nproc 100000", "--nproc: found 100000, expected at most"),
        (f"{_HERE}:build --html /nowhere/a.html", "--html: found /nowhere/a.html"),
        (f"{_HERE}:build --strategy hybrid", "--mesh: found dp=2 with strategy hybrid"),
    ],
)
def test_mistakes_are_one_line(capsys: Capture, words: str, message: str) -> None:
    assert message in refused(capsys, "prove", *words.split())
