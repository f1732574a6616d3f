"""Metrics for Weights & Biases: the keys of ``metrics.jsonl``, with or without an account."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.app.recipes.core.journal import (
    FileJournal,
    RunRecord,
    StepMetrics,
)
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.core.sinks import Wandb, open_sinks
from shardwise.base.errors import UserError
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Existing, LogName, OutputConfig
from shardwise.runs.metrics_file import read_metrics
from tests.recipes.running import train
from tests.recipes.small import losses, small_config
from tests.waiting import wait_until
from tests.worlds import Ranks


class FakeWandb:
    """The package, without its service."""

    def __init__(self) -> None:
        self.began: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.ended: list[int] = []
        self.error: Exception | None = None
        self.Settings = dict

    def init(self, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.began.append(options)
        return SimpleNamespace(
            log=self._log, define_metric=lambda *a, **k: None, finish=self._finish
        )

    def _log(self, values: dict[str, float]) -> None:
        if self.error is not None:
            raise self.error
        self.logged.append(values)

    def _finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWandb:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_NAME", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def test_every_sink_gets_the_keys_of_the_metrics(tmp_path: Path, wandb: FakeWandb) -> None:
    files = RunDir(tmp_path)
    record = RunRecord(files, {}, {})
    journal = FileJournal(files, record, "tokens", 0, [Wandb(tmp_path, record.identity, {"a": 1})])
    journal.step(StepMetrics(1, 2.5, 1.0, 0.1, 64.0, 9.0, 30.0, mfu=0.5))
    journal.evaluated(1, {"validation_loss": 2.0})
    journal.close()
    expected = read_metrics(files.metrics)
    del expected[0]["eta_s"]  # no curve
    assert wandb.logged == expected
    assert wandb.ended == [0]
    again = RunRecord(files, {}, {})
    FileJournal(files, again, "tokens", 1, [Wandb(tmp_path, again.identity, {})]).close(
        ValueError("it diverged")
    )
    first, second = wandb.began
    assert first["id"] == second["id"], "a run that is resumed goes on in its curves"
    assert first["resume"] == "allow"
    assert (first["name"], first["project"], first["config"]) == (
        tmp_path.name, "shardwise", {"a": 1},
    )  # fmt: skip
    assert wandb.ended == [0, 1]


def test_without_an_account_nobody_is_asked_to_log_in(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mode() -> str | None:
        open_sinks({LogName.WANDB}, tmp_path, 0, "x", {})
        found: str | None = wandb.began[-1]["mode"]
        return found

    assert mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    os.chmod(tmp_path / "netrc", 0o600)
    assert mode() is None
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert mode() == "offline", "the account is one of another server"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert mode() is None
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode() is None, "the package reads the variable itself"
    (tmp_path / "netrc").write_text("machine machine machine")
    monkeypatch.delenv("WANDB_MODE")
    assert mode() == "offline"


def test_a_run_that_cannot_begin_says_what_to_do(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.error = RuntimeError("no such\nproject")
    with pytest.raises(UserError, match=r"--log wandb: found RuntimeError \(no such project\)"):
        Wandb(tmp_path, "x", {})


def test_a_training_goes_on_when_its_curves_do_not(
    tmp_path: Path, wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Wandb(tmp_path, "x", {})
    wandb.error = ConnectionError("gone")
    for step in (1, 2):
        sink.write(step, {"loss": 1.0})
    sink.close(None)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("its curves end here (ConnectionError: gone)") == 1
    assert wandb.ended == []


def test_names_of_logs_are_checked() -> None:
    def logs(text: str, **more: Any) -> set[str]:
        return {each.value for each in OutputConfig(out=Path("x"), log=text, **more).logs}

    assert logs("jsonl") == {"jsonl"}
    assert logs("wandb, tensorboard") == {"jsonl", "wandb", "tensorboard"}
    for wrong in ("", "wandb,", "mlflow", "wandb;jsonl"):
        with pytest.raises(OptionError, match=r"--log: found .* expected names among jsonl, tens"):
            logs(wrong)


def _train_offline(rank: int, world_size: int, *configs: Any) -> list[str]:
    import warnings

    warnings.simplefilter("ignore")  # of the package's own
    os.environ["WANDB_MODE"] = "offline"
    return train(rank, world_size, *configs)


def test_a_run_is_logged_offline_by_the_package_itself(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    first = small_config(tmp_path, steps=2, log="wandb")
    longer = small_config(tmp_path, steps=3, log="wandb", existing=Existing.RESUME)
    assert ranks(_train_offline, 2, first, longer) == [["finished"] * 2] * 2
    assert [step for step, _, _ in losses(longer)] == [1, 2, 3]
    folders = [path for path in longer.files.wandb.iterdir() if path.name.startswith("offline-run")]
    identity = json.loads(longer.files.run_json.read_text())["identity"]
    assert [path.name.rpartition("-")[2] for path in folders] == [identity] * 2
    wanted = [b"tokens_per_s", b"grad_norm", b"memory_mib", b"validation_loss"]
    for folder in folders:
        [file] = folder.glob("*.wandb")
        # Its service writes on after the run has ended.
        wait_until(lambda file=file: all(key in file.read_bytes() for key in wanted))
