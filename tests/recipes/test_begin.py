"""Whether a run may begin or go on: jobs that start again, hosts that agree, what is installed."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.core.begin import (
    agreed_options,
    check_alike,
    compared,
    decided,
    newest_step,
)
from shardwise.app.recipes.core.checkpointing import Checkpoints
from shardwise.app.recipes.core.installed import check_extras, install_line, require_installed
from shardwise.app.recipes.core.journal import RunRecord
from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.text.config import LmConfig
from shardwise.base.errors import UserError
from shardwise.elastic.world import JOB, PARENT_PID, World
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Existing, LogName, OutputConfig
from tests.recipes.digits import small_mnist, write_digits
from tests.recipes.running import refusal
from tests.recipes.small import small_config, write_model
from tests.recipes.snapshots import small_imagenet, small_vit

#: Makes a small configuration whose files are in a folder.
Make = Callable[..., RecipeConfig]


@pytest.fixture(autouse=True)
def rank_of_this_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_PID, str(os.getppid()))
    monkeypatch.setenv(JOB, "this job")


def begin(files: RunDir, monkeypatch: pytest.MonkeyPatch, job: str | None = None) -> None:
    """Begin a run, or go on with it, as a job that is not ended by what comes next."""
    with monkeypatch.context() as env:
        if job is not None:
            env.setenv(JOB, job)
        RunRecord(files, {"recipe": "lm"}, {})


def write_record(config: RecipeConfig) -> RunDir:
    """A folder as a run leaves it that has only begun."""
    files = RunDir(config.train.output.out)
    files.root.mkdir()
    files.write({"recipe": config.recipe, **config.check(World(0, 1, 0, 1)).facts()})
    return files


def save(files: RunDir) -> None:
    (files.checkpoints / "step-00000004").mkdir(parents=True)


def after_restart(files: RunDir, existing: Existing) -> Existing:
    return decided(OutputConfig(out=files.root, existing=existing)).existing


@pytest.mark.parametrize("existing", [Existing.REFUSE, Existing.RESUME, Existing.OVERWRITE])
def test_a_run_of_another_job_is_not_taken_for_the_one_that_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing
) -> None:
    """``--overwrite`` of a job whose ranks died before they began still deletes the old run."""
    files = RunDir(tmp_path)
    assert after_restart(files, existing) is existing
    begin(files, monkeypatch, "another job")
    save(files)
    assert after_restart(files, existing) is existing


@pytest.mark.parametrize("existing", [Existing.REFUSE, Existing.RESUME, Existing.OVERWRITE])
def test_what_this_job_has_saved_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing
) -> None:
    files = RunDir(tmp_path)
    begin(files, monkeypatch, "the job before")
    begin(files, monkeypatch)
    save(files)
    assert after_restart(files, existing) is Existing.RESUME


def test_a_run_that_this_job_began_and_never_saved_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunDir(tmp_path)
    begin(files, monkeypatch)
    assert after_restart(files, Existing.REFUSE) is Existing.OVERWRITE


def test_a_damaged_record_is_overwritten_as_asked(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    files.run_json.write_text("{")
    save(files)
    assert after_restart(files, Existing.OVERWRITE) is Existing.OVERWRITE


def test_what_no_job_began_belongs_to_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PARENT_PID)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    files = RunDir(tmp_path)
    begin(files, monkeypatch)
    save(files)
    assert files.read()["sessions"][0]["job"] is None
    assert after_restart(files, Existing.OVERWRITE) is Existing.OVERWRITE


# -- the newest checkpoint -------------------------------------------------------------------------


def test_there_must_be_a_checkpoint_to_resume(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    message = "--resume: found no complete checkpoint in .*/checkpoints, expected one; or use --ov"
    with pytest.raises(OptionError, match=message):
        newest_step(Checkpoints(files.checkpoints), files)


# -- the run that goes on --------------------------------------------------------------------------


def again(make: Make, folder: Path, **changes: Any) -> RecipeConfig:
    """A configuration that goes on with a run; another model is in a file of its own."""
    if changes.get("model") == "other":
        (folder / "other").mkdir()
        changes["model"] = str(write_model(folder / "other", hidden_size=12))
    return make(folder, existing=Existing.RESUME, **changes)


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (small_config, {"model": "other"}, "--model: found .*/other/config.json, another model"),
        # As where the default goes with the model.
        (small_config, {"model": "other", "seq_length": 12}, "--model: found .*, another model"),
        (small_config, {"seq_length": 12}, "--seq-length: found 12, expected 16, as in the run"),
        (small_imagenet, {"model": "resnet18"}, "--model: found resnet18, another model, expected"),
        (small_imagenet, {"model": "resnet18", "image_size": 64}, "--model: found resnet18, anoth"),
        (small_imagenet, {"image_size": 64}, "--image-size: found 64, expected 32, as in the run"),
        (small_vit, {"layers": 3}, "--layers: found 3, expected 2, as in the run to resume"),
        (small_vit, {"image_size": 64}, "--image-size: found 64, expected "),
    ],
)
def test_a_run_goes_on_only_with_its_model(
    tmp_path: Path, make: Make, changes: dict[str, Any], said: str
) -> None:
    """Of all other options, tests/cli/test_resume.py tells which may change."""
    write_record(make(tmp_path))
    assert re.match(said, refusal(again(make, tmp_path, **changes)))


def _write_other_words(folder: Path) -> None:
    (folder / "words.txt").write_text("other text " * 100)


def _write_another_model(folder: Path) -> None:
    write_model(folder, hidden_size=12)


def _write_another_digit(folder: Path) -> None:
    write_digits(folder / "mnist", training=204)


def _delete_a_picture(folder: Path) -> None:
    (folder / "snapshots" / "train" / "sea" / "0.JPEG").unlink()


@pytest.mark.parametrize(
    ("make", "change", "option"),
    [
        (small_config, _write_other_words, "--data"),
        (small_config, _write_another_model, "--model"),  # in a file of the same name
        (small_mnist, _write_another_digit, "--data-dir"),
        (small_imagenet, _delete_a_picture, "--data-dir"),
    ],
)
def test_a_run_goes_on_only_with_what_its_files_held(
    tmp_path: Path, make: Make, change: Callable[[Path], None], option: str
) -> None:
    write_record(make(tmp_path))
    change(tmp_path)
    assert refusal(again(make, tmp_path)).startswith(f"{option}: found ")


def test_a_run_of_another_recipe_does_not_go_on(tmp_path: Path) -> None:
    files = write_record(small_mnist(tmp_path))
    files.write({**files.read(), "recipe": "lm"})
    assert refusal(again(small_mnist, tmp_path)).startswith("--resume: found a run of train lm in ")


# -- several hosts ---------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, Any]:
    """What a host says about its run; changes are of the settings, or ``model`` and ``data``."""
    own = {name: changes.pop(name) for name in ("recipe", "model", "data") if name in changes}
    settings = {"seed": 0, "train": {"batch_size": 4, "out": "a", "beta1": 0.9}}
    model, data = {"settings": {"layers": 2}}, {"name": "here", "fingerprint": "1234"}
    return {
        "recipe": "lm",
        "config": {**settings, **changes},
        "model": model,
        "data": data,
        **own,
    }


def test_hosts_may_keep_their_files_in_different_places() -> None:
    there = {"name": "/mnt/there", "fingerprint": "1234"}
    check_alike(
        [facts(), facts(out="b", data=there, tokenizer="/mnt/there", existing="resume")],
        agreed_options(LmConfig.for_model("llama-tiny")),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "--seed: found 1 on host 2, expected 0, as on host 0"),
        ({"batch_size": 8}, "--batch-size: found 8 on host 2, expected 4, as on host 0"),
        ({"beta1": 0.5}, "--beta1: found .* on host 2"),
        ({"algorithm": "sgd"}, "--optimizer: found sgd on host 2"),
        ({"collective_wire": "int8"}, "--wire: found int8 on host 2"),
        ({"recipe": "mnist"}, "train: found mnist on host 2, expected lm, as on host 0"),
        ({"model": {"settings": {"layers": 3}}}, "--model: found settings with checksum "),
        ({"data": {"fingerprint": "5678"}}, "--data: found data with fingerprint 5678 on host 2"),
    ],
)
def test_a_host_that_was_started_otherwise_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_alike(
            [facts(), facts(), facts(**changes)], agreed_options(LmConfig.for_model("llama-tiny"))
        )


@pytest.mark.parametrize(("sees", "other"), [(0, 1), (1, 0)])
def test_a_host_that_does_not_see_the_run_that_goes_on_is_named(sees: int, other: int) -> None:
    names = agreed_options(LmConfig.for_model("llama-tiny"))
    hosts = [facts(existing="auto-resume"), facts(existing="auto-resume")]
    hosts[sees] = facts(seed=1, existing="resume")
    message = f"host {sees} goes on with a run, and host {other} .* does not see it: --res"
    with pytest.raises(OptionError, match=f"--seed: found .*, as on host 0; {message}"):
        check_alike(hosts, names)


@pytest.mark.parametrize("before", [{"beta1": 0.9, "beta2": 0.95}, {"betas": [0.9, 0.95]}])
def test_a_run_goes_on_with_its_betas_however_it_wrote_them(
    tmp_path: Path, before: dict[str, Any]
) -> None:
    """What a run of an older version does not say, was as by default."""
    config = small_config(tmp_path)
    inputs, files = config.check(World(0, 1, 0, 1)), RunDir(tmp_path)
    decay = {"weight_decay": config.train.optimizer.weight_decay}
    old = {"seq_length": 16, "train": {"seed": 0, "optimizer": {**before, **decay}}}
    files.write({**inputs.facts(), "config": old})
    inputs.check_same(files.read())
    other = dataclasses.replace(config.train.optimizer, beta2=0.5)
    changed = dataclasses.replace(inputs, config=config.with_train(optimizer=other))
    with pytest.raises(OptionError, match=r"--beta2: found 0\.5, expected 0\.95, as in the run to"):
        changed.check_same(files.read())


def test_the_order_of_a_models_settings_does_not_matter() -> None:
    one = facts(model={"settings": {"layers": 2, "heads": 4}})
    other = facts(model={"settings": {"heads": 4, "layers": 2}})
    assert compared(one, {}) == compared(other, {})


# -- optional packages -----------------------------------------------------------------------------


def test_packages_that_are_missing_are_named_with_what_installs_them() -> None:
    require_installed("training", ["json", "os"])
    with pytest.raises(UserError) as caught:
        require_installed("training", ["json", "no_such_package", "nor_this"])
    line = install_line(["no_such_package", "nor_this"])
    named = "training needs no_such_package and nor_this, not installed here"
    assert str(caught.value) == f"{named}: {line}"


@pytest.mark.parametrize("pip", ["pip", "uv"])
def test_the_line_installs_into_this_environment(monkeypatch: pytest.MonkeyPatch, pip: str) -> None:
    """And installs nothing of this package: that would replace a clone that is installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if pip == "pip" else None)
    monkeypatch.setattr("sys.executable", "/my envs/one/bin/python")
    python = "'/my envs/one/bin/python'"
    expected = {
        "pip": f"{python} -m pip install wandb",
        "uv": f"uv pip install --python {python} wandb",
    }
    assert install_line(["wandb"]) == expected[pip]


def test_tensorboard_is_needed_only_where_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name[0] in "tP" else 1)
    check_extras(["json"], [LogName.JSONL])
    with pytest.raises(UserError, match="--log tensorboard needs tensorboard, not"):
        check_extras(["json"], [LogName.TENSORBOARD])
    with pytest.raises(UserError, match=r"pip install pillow$"):
        check_extras(["PIL"])
