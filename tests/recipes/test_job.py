"""A training as the launcher starts it: which folder it takes, and what is left to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.core import job as job_module
from shardwise.app.recipes.core.job import Folder, TrainingJob
from shardwise.app.recipes.core.position import Position, TrainingSpan
from shardwise.app.recipes.core.recipe import Inputs, RecipeConfig
from shardwise.app.recipes.core.rundir import RunDir, locked
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError, as_json
from shardwise.insight.schema.training import Existing, OutputConfig, SgdConfig, TrainConfig

ALONE = World(0, 1, 0, 1)


@dataclass(frozen=True, kw_only=True)
class ToyConfig(RecipeConfig):
    """A configuration that has nothing but what every training has."""

    recipe = "toy"

    train: TrainConfig

    def check(self, world: World) -> Checked:
        return Checked(self)

    def check_world(self, world: World) -> None:
        if world.size > 4:
            raise OptionError("--nproc", world.size, "4 at most")

    def check_dry_run(self, world: World) -> None: ...


@dataclass(frozen=True)
class Checked(Inputs):
    """The same, checked."""

    config: ToyConfig

    @property
    def span(self) -> TrainingSpan:
        return TrainingSpan.of(self.train, per_epoch=10)

    def facts(self) -> dict[str, Any]:
        return {"config": as_json(self.config), "model": {}, "data": {}}

    def check_same(self, before: Mapping[str, Any]) -> None: ...


def job_of(out: Path, folder: Folder = Folder.DEFAULT, **changes: Any) -> TrainingJob:
    output = OutputConfig(out=out, existing=changes.pop("existing", Existing.REFUSE))
    settings = {"steps": 10, "batch_size": 2, **changes}
    config = ToyConfig(train=TrainConfig(**settings, optimizer=SgdConfig(lr=0.1), output=output))
    return TrainingJob(config, folder)


def make_runs(default: Path, *names: str, status: str = "finished") -> None:
    for name in names:
        files = RunDir(default.with_name(name))
        files.root.mkdir()
        files.write({"recipe": "toy", "sessions": [{"status": status}]})


# -- numbered folders ------------------------------------------------------------------------------


def test_a_new_run_takes_the_first_free_number_and_says_why(tmp_path: Path) -> None:
    default = tmp_path / "toy"
    make_runs(default, "toy", "toy-2")
    job = job_of(default)
    job.choose_folder()
    assert job.config.train.output.out == tmp_path / "toy-3"
    assert job.chosen == (
        f"run        {tmp_path}/toy-3; {default} has a run; --resume --out {default} continues it"
    )


@pytest.mark.parametrize("existing", [Existing.RESUME, Existing.AUTO])
def test_a_resumed_run_is_the_newest(tmp_path: Path, existing: Existing) -> None:
    default = tmp_path / "toy"
    make_runs(default, "toy", "toy-2")
    job = job_of(default, existing=existing)
    job.choose_folder()
    assert job.chosen == f"run        {tmp_path}/toy-2; the newest run beside {default}"
    assert job.config.train.output == OutputConfig(out=tmp_path / "toy-2", existing=existing)


@pytest.mark.parametrize(
    ("folder", "existing"),
    [
        (Folder.NAMED, Existing.REFUSE),
        (Folder.NAMED, Existing.RESUME),
        (Folder.DEFAULT, Existing.OVERWRITE),
    ],
)
def test_a_folder_that_was_asked_for_stays(
    tmp_path: Path, folder: Folder, existing: Existing
) -> None:
    """``--overwrite`` deletes: it never deletes a run that the user did not mean."""
    default = tmp_path / "toy"
    make_runs(default, "toy", "toy-2")
    job = job_of(default, folder, existing=existing)
    before = job.config
    job.choose_folder()
    assert job.chosen is None
    assert job.config is before


@pytest.mark.parametrize("existing", list(Existing))
def test_nothing_is_said_where_the_default_folder_is_free(
    tmp_path: Path, existing: Existing
) -> None:
    job = job_of(tmp_path / "toy", existing=existing)
    job.choose_folder()
    assert job.chosen is None
    assert job.config.train.output.out == tmp_path / "toy"
    assert not (tmp_path / "toy").exists(), "choosing a folder makes none"


# -- before ranks start ----------------------------------------------------------------------------


def test_hosts_are_noted_and_change_nothing_else(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    before = job.config.train
    job.span_hosts()
    expected = dataclasses.replace(before.sharding, over_hosts=True)
    assert job.config.train == dataclasses.replace(before, sharding=expected)


def test_a_world_that_does_not_fit_is_refused_before_data_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--nproc: found 8, expected 4 at most"):
        job_of(tmp_path).config.check_world(World(0, 8, 0, 8))


def test_hosts_agree_on_settings_and_not_on_places(tmp_path: Path) -> None:
    jobs = [job_of(tmp_path / name, seed=5) for name in ("here", "there")]
    for job in jobs:
        job.check(ALONE)
    one, other = (job.options() for job in jobs)
    assert one == other
    assert one["train"] == "toy"
    assert one["--seed"] == 5
    assert "--out" not in one


def test_a_second_run_cannot_lock_the_folder(tmp_path: Path) -> None:
    first, second = job_of(tmp_path / "toy"), job_of(tmp_path / "toy")
    for job in (first, second):
        job.check(ALONE)
    refused = pytest.raises(OptionError, match="--out: found a run that is under way")
    with locked(first.config.files), refused, locked(second.config.files):
        pass
    with locked(second.config.files):
        pass


def reached(position: Position, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the newest checkpoint be at a position."""
    monkeypatch.setattr(job_module, "check_folder", lambda inputs: position)


@pytest.mark.parametrize(
    ("position", "changes", "shown"),
    [
        (Position(10, 20), {}, "step 10 of 10. To go on, say --resume with more --steps."),
        (
            Position(3, 10),
            {"steps": None, "epochs": 1},
            "epoch 1.00 of 1 (step 3). To go on, say --resume with more --epochs.",
        ),
        (
            Position(6, 10),
            {"epochs": 1},
            "epoch 1.00 of 1 (step 6). To go on, say --resume with more --epochs.",
        ),
    ],
)
def test_a_run_that_is_complete_says_how_to_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    position: Position,
    changes: dict[str, Any],
    shown: str,
) -> None:
    make_runs(tmp_path / "toy", "toy")
    job = job_of(tmp_path / "toy", **changes)
    job.check(ALONE)
    reached(position, monkeypatch)
    assert job.check_folder() == f"Nothing to do: the run in {tmp_path}/toy is at {shown}"


def test_a_run_without_its_results_goes_on_to_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(tmp_path / "toy", "toy", status="running")
    job = job_of(tmp_path / "toy")
    job.check(ALONE)
    reached(Position(10, 20), monkeypatch)
    assert job.check_folder() is None


def test_an_example_that_is_left_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two epochs of 10 examples, one example is left: it takes a step of any world."""
    make_runs(tmp_path / "toy", "toy")
    job = job_of(tmp_path / "toy", steps=None, epochs=2)
    job.check(World(0, 3, 0, 3))
    reached(Position(2, 19), monkeypatch)
    assert job.check_folder() is None
    reached(Position(3, 24), monkeypatch)
    message = job.check_folder()
    assert message is not None
    assert "epoch 2.40 of 2" in message


def test_a_rank_trains_with_what_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.app.recipes.core import training

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(training, "train", lambda *given: calls.append(given))
    monkeypatch.setattr(ToyConfig, "assemble", lambda config: "assemble")
    config = job_of(tmp_path).config
    job = TrainingJob(config, options="seed: 0")
    with pytest.raises(AssertionError, match=r"check\(\) comes first"):
        job.run(ALONE, None)  # type: ignore[arg-type]
    job.check(ALONE)
    job.run(ALONE, None)  # type: ignore[arg-type]
    assert calls == [(Checked(config), "assemble", ALONE, None, "seed: 0", None)]
