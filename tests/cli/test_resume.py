"""A run that goes on is what it was started as, unless the command line says otherwise."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import pytest

from shardwise.app.cli import train
from shardwise.app.cli.options import Options, Setting
from shardwise.app.cli.run import LaunchConfig
from shardwise.app.recipes.core.job import TrainingJob
from shardwise.app.recipes.core.recipe import Inputs
from shardwise.diloco.settings import WireFormat
from shardwise.frontends.strategies import Strategy
from shardwise.insight.schema.option import OnResume, OptionError, as_json
from shardwise.insight.schema.sharding import parse_wires
from tests.cli.shell import call
from tests.recipes.small import RECIPES

pytestmark = pytest.mark.usefixtures("no_world")

#: Values that are read, or looked for.
_SPECIAL: dict[str, Any] = {
    "--wire": parse_wires("int8"),
    "--diloco-wire": WireFormat("int8"),
    "--timeline": "5-8",
    "--log": "wandb",
}
_MODELS = {"lm": "llama-34m", "imagenet": "resnet18", "vit": "vit-huge"}


def another(setting: Setting, recipe: str) -> Any:
    """A value that is not the default."""
    value, kind = setting.default, setting.kind
    if setting.key in _SPECIAL:
        return _SPECIAL[setting.key]
    if setting.key == "--model":
        return _MODELS[recipe]
    if setting.key == "--strategy" and recipe == "lm":
        return Strategy.DILOCO
    if get_origin(kind) is tuple:
        return ("one", "two")
    if isinstance(kind, enum.EnumMeta):
        return next(each for each in kind if each is not value)
    if kind == os.PathLike[str]:  # of this host, or a URL
        return Path("other")
    made = {bool: lambda: not value, int: lambda: (value or 1) + 1, float: lambda: (value or 1) / 2}
    return made[kind]() if kind in made else kind("other")


def changed(config: Any, keys: tuple[str, ...], value: Any) -> Any:
    name, *within = keys
    if within:
        value = changed(getattr(config, name), tuple(within), value)
    return dataclasses.replace(config, **{name: value})


def settings_of(recipe: str) -> Iterator[Setting]:
    yield from train._options_of(recipe).settings()


def other_run(recipe: str, root: Path) -> Any:
    """A run whose options all have other values than by default; no weights that it starts from."""
    config = train._options_of(recipe).default
    for setting in settings_of(recipe):
        if setting.key not in ("--from", "--resume"):
            config = changed(config, setting.keys, another(setting, recipe))
    config = config.with_train(output=dataclasses.replace(config.train.output, out=root))
    (root / "checkpoints" / "step-00000001").mkdir(parents=True)
    record = {"recipe": recipe, "config": as_json(config), "sessions": []}
    (root / "run.json").write_text(json.dumps(record))
    return config


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainingJob, LaunchConfig]]:
    """The jobs that commands would have started."""
    jobs: list[tuple[TrainingJob, LaunchConfig]] = []
    monkeypatch.setattr(train, "run", lambda job, launch: jobs.append((job, launch)))
    return jobs


@pytest.mark.parametrize("how", ["--resume", "--auto-resume --nproc 3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_that_is_not_named_is_as_in_the_run(
    started: list[Any], recipe: str, how: str
) -> None:
    expected = other_run(recipe, Path("run"))
    assert call("train", recipe, "--out", "run", *how.split()) == 0
    [(job, launch)] = started
    assert launch == LaunchConfig(nproc=3 if "nproc" in how else None)
    for setting in settings_of(recipe):
        found, wanted = job.config, expected
        for key in setting.keys:
            found, wanted = getattr(found, key), getattr(wanted, key)
        kept = setting.option.on_resume.is_kept or setting.key == "--out"
        assert (found == wanted) == kept, setting.key
    assert "lr: " in job.options_file


def test_what_is_named_is_taken_from_the_line_then_the_file_then_the_run(
    started: list[Any],
) -> None:
    other_run("lm", Path("run"))
    Path("more.yaml").write_text("lr: 0.5\nwarmup: 7\nstrategy: full\n")
    line = "--config more.yaml --lr 0.25 --clip-grad 9 --epochs none --steps 5 --accumulate 3"
    assert call("train", "lm", "--out", "run", "--resume", *line.split()) == 0
    config = started[0][0].config
    optimizer, sharding = config.train.optimizer, config.train.sharding
    assert (optimizer.lr, optimizer.warmup, optimizer.clip_grad) == (0.25, 7, 9.0)
    assert optimizer.beta1 == 0.45, "as in the run"
    assert (sharding.strategy, config.train.diloco) == (Strategy.FULL_SHARD, None)
    assert (sharding.replicas, sharding.mesh) == (None, None), "they went with the other strategy"
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert (config.train.accumulate, config.batch_tokens) == (3, None)


def test_the_newest_run_is_gone_on_with_and_a_new_one_begins_with_defaults(
    started: list[Any],
) -> None:
    other_run("mnist", Path("runs/mnist"))
    other_run("mnist", Path("runs/mnist-2"))
    assert call("train", "mnist", "--resume") == 0
    assert call("train", "mnist") == 0
    (resumed, _), (new, _) = started
    assert resumed.config.train.output.out == Path("runs/mnist-2")
    assert resumed.config.train.batch_size == 65
    assert new.config.train.batch_size == 64


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", "found 'many', expected a whole number for batch-size"),
        ([4], "found '[4]', expected another type for batch-size"),
        (True, "found 'True', expected another type for batch-size"),
        (0, "--batch-size: found 0, expected 1 or more (run/run.json)"),
    ],
)
def test_a_run_that_says_what_cannot_be_is_named(
    capsys: pytest.CaptureFixture[str], value: Any, message: str
) -> None:
    Path("run").mkdir()
    record = {"recipe": "lm", "config": {"train": {"batch_size": value}}}
    Path("run/run.json").write_text(json.dumps(record))
    assert call("train", "lm", "--out", "run", "--resume") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("log", "goes_to"), [({}, "jsonl"), ({"log": "wandb"}, "wandb")])
def test_a_run_of_an_earlier_version_keeps_what_has_another_name_now(
    started: list[Any], log: dict[str, str], goes_to: str
) -> None:
    other_run("lm", Path("run"))
    file = Path("run/run.json")
    record = json.loads(file.read_text())
    of_output = record["config"]["train"]["output"]
    del of_output["log"]
    of_output |= {"tensorboard": True, **log}
    file.write_text(json.dumps(record))
    assert call("train", "lm", "--out", "run", "--resume") == 0
    assert started[0][0].config.train.output.log == f"{goes_to},tensorboard"


def test_a_section_of_a_run_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options would be as by default, and the run would go on as another one."""
    Path("run").mkdir()
    Path("run/run.json").write_text('{"recipe": "lm", "config": {"train": {"optimizer": [0.5]}}}')
    assert call("train", "lm", "--out", "run", "--resume") == 2
    assert "run/run.json: found '[0.5]' where optimizer is, expected" in capsys.readouterr().err


@dataclasses.dataclass
class AsAsked(Inputs):
    """A configuration whose model and data are always the same."""

    config: Any

    def facts(self) -> dict[str, Any]:
        model = {"name": "m", "settings": {}}
        return {"config": as_json(self.config), "model": model, "data": {"fingerprint": "1"}}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_that_differs_is_a_change_or_refused(recipe: str) -> None:
    options: Options[Any] = train._options_of(recipe)
    before = AsAsked(options.default).facts()
    for setting in options.settings():
        now = AsAsked(changed(options.default, setting.keys, another(setting, recipe)))
        rule = setting.option.on_resume
        names = [name.partition("/")[0] for name in (*setting.flags, setting.key)][:1]
        assert list(now.changes(before)) == (names if rule.is_kept else []), setting.key
        if rule is OnResume.FIXED:
            with pytest.raises(
                OptionError, match=f"^{re.escape(setting.key)}: .* as in the run to resume"
            ):
                now.check_same(before)
        else:
            now.check_same(before)


def test_a_setting_that_this_version_does_not_have_is_a_change() -> None:
    run = AsAsked(train._options_of("lm").default)
    before = run.facts()
    before["config"]["train"] |= {"tokens_ahead": 2, "of_no_use": None}
    assert run.changes(before) == {"--tokens-ahead": (2, None)}


def test_the_guide_has_the_rule_of_every_option() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z]\w+) \| .*? \| (.*?) \|$", guide, re.MULTILINE))
    rules: dict[OnResume, set[str]] = {rule: set() for rule in OnResume}
    for options in (Options(default=LaunchConfig()), *map(train._options_of, RECIPES)):
        for setting in options.settings():
            names = [name for name in setting.flags or [setting.key] if name[:5] != "--no-"]
            rules[setting.option.on_resume].update(names)
    for rule, names in rules.items():
        if rule is not OnResume.KEPT:
            assert set(re.findall(r"`(--[\w-]+)`", rows[rule.name.title()])) == names, rule
