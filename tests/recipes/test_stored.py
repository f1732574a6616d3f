"""Runs in an object store: as on a disk that all hosts share, on hosts that share nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.core import stored
from shardwise.app.recipes.core.begin import decided
from shardwise.app.recipes.core.checkpointing import Checkpoints
from shardwise.app.recipes.core.job import TrainingJob
from shardwise.app.recipes.core.journal import RunRecord
from shardwise.app.recipes.core.recipe import RecipeConfig, run_dir
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.core.stored import RunStore
from shardwise.app.recipes.text.config import LmConfig
from shardwise.base.errors import CheckpointError, StoreError, UserError
from shardwise.checkpoint.disk import fetched
from shardwise.checkpoint.disk.commit import steps
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.elastic.world import JOB, PARENT_PID, World
from shardwise.frontends.strategies import Strategy
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import DilocoConfig, Existing, OutputConfig
from tests.recipes.digits import small_mnist
from tests.recipes.running import refusal, train
from tests.recipes.small import losses, small_config
from tests.worlds import Ranks

pytest.importorskip("obstore", reason="needs obstore: install .[test]")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this host's caches, which is lost with it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "host"))
    return tmp_path / "host"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    place = place_of(f"{request.param}://{tmp_path}/store/run")
    assert isinstance(place, StorePath)
    return place


def output(url: StorePath, existing: Existing = Existing.REFUSE) -> OutputConfig:
    return OutputConfig(out=url, existing=existing)


def put(path: StorePath, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    path.write([data], len(data))


def a_run(url: StorePath) -> RunDir:
    """A run as a session leaves it, with an object of its user's beside."""
    files = run_dir(url)
    files.begin(output(url))
    files.write({"recipe": "lm"})
    files.metrics.write_text('{"step": 1, "loss": 2.5}\n')
    files.tokenizer.mkdir()
    (files.tokenizer / "tokenizer.json").write_text("{}")
    files.publish()
    put(url / "checkpoints" / "step-00000001" / "manifest.json", "x")
    put(url / "checkpoints" / "step-00000001" / "shard-00000-of-00001.safetensors", "x")
    put(url / "thesis.tex", "years")
    return files


# -- one run, whole trainings ----------------------------------------------------------------------


def in_store(config: LmConfig, tmp_path: Path, **changes: Any) -> LmConfig:
    place = place_of(f"file://{tmp_path}/store/run")
    out = dataclasses.replace(config.train.output, out=place, **changes)
    return config.with_train(output=out)


def on_host(rank: int, world_size: int, host: str, *configs: RecipeConfig) -> list[str]:
    os.environ["XDG_CACHE_HOME"] = host
    return train(rank, world_size, *configs)


def test_a_run_goes_on_where_no_disk_is_shared(ranks: Ranks, tmp_path: Path, host: Path) -> None:
    """Bit for bit the run of a host that was never lost, with its options, metrics and best."""
    options: dict[str, Any] = {"checkpoint_every": 2, "eval_every": 2, "keep_best": True}
    options["schedule"] = "constant"
    whole = small_config(tmp_path, "whole", steps=6, **options)
    half = in_store(small_config(tmp_path, steps=4, **options), tmp_path)
    again = small_config(tmp_path, steps=6, **options)
    again = in_store(again, tmp_path, existing=Existing.AUTO)
    assert ranks(on_host, 2, str(host), whole, half) == [["finished", "finished"]] * 2
    shutil.rmtree(host)
    assert ranks(on_host, 2, str(host / "another"), again) == [["finished"]] * 2

    os.environ["XDG_CACHE_HOME"] = str(host / "another")  # put back by the fixture
    assert losses(again) == losses(whole)
    assert not again.files.checkpoints.exists(), "these are in the store alone"
    place = again.files.place
    assert isinstance(place, StorePath)
    assert steps(place / "checkpoints") == [4, 6]
    assert again.files.metrics.read_bytes() == (place / "metrics.jsonl").read_small(1 << 20)
    record = again.files.read()
    assert [each["status"] for each in record["sessions"]] == ["finished", "finished"]
    assert record["sessions"][1]["from_step"] == 4
    assert record["config"]["train"]["output"]["out"] == str(place)
    assert record["best"]["step"] == whole.files.read()["best"]["step"]
    assert not [name for name in place.below() if "partial" in name], "nothing is left"


def _killed(*_: Any) -> None:
    raise StoreError("killed")


def lost_at_commit(
    rank: int, world_size: int, host: str, first: RecipeConfig, again: RecipeConfig
) -> list[str]:
    """Train, and be lost between the copy of the metrics and the second commit."""
    publish, count = RunStore.publish, 0

    def copy(store: RunStore) -> None:
        nonlocal count
        publish(store)
        count += 1
        if count > 2:  # at the beginning, and at the first commit
            RunStore.publish = _killed  # type: ignore[method-assign]
            _killed()

    RunStore.publish = copy  # type: ignore[method-assign]
    try:
        ended = on_host(rank, world_size, host, first)
    finally:
        RunStore.publish = publish  # type: ignore[method-assign]
    return [*ended, *on_host(rank, world_size, f"{host}-2", again)]


def test_metrics_are_never_behind_the_checkpoint_that_a_run_goes_on_from(
    ranks: Ranks, tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = in_store(small_config(tmp_path, checkpoint_every=2), tmp_path)
    again = in_store(small_config(tmp_path), tmp_path, existing=Existing.RESUME)
    for lost, finished in ranks(lost_at_commit, 2, str(host), first, again):
        assert re.match(r"SaveError: checkpoint of step 4: .*killed; step 2 is the last", lost)
        assert finished == "finished"
    monkeypatch.setenv("XDG_CACHE_HOME", f"{host}-2")
    assert [step for step, *_ in losses(again)] == [1, 2, 3, 4]


def overtaken(rank: int, world_size: int, host: str, config: RecipeConfig) -> list[str]:
    """Train, while another session begins between the first commit and the second."""
    publish, count = RunStore.publish, 0

    def copy(store: RunStore) -> None:
        nonlocal count
        publish(store)
        count += 1
        if count == 2:
            RunStore(store.place).claim()

    RunStore.publish = copy  # type: ignore[method-assign]
    try:
        return on_host(rank, world_size, host, config)
    finally:
        RunStore.publish = publish  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["at once", "in the background"])
def test_a_run_ends_once_a_later_session_has_begun(
    ranks: Ranks, tmp_path: Path, host: Path, how: str
) -> None:
    asynchronous = how == "in the background"
    config = small_config(tmp_path, checkpoint_every=2, async_checkpoint=asynchronous)
    config = in_store(config, tmp_path)
    for [ended] in ranks(overtaken, 2, str(host), config):
        assert ended.startswith("SaveError: checkpoint of step 4: ")
        assert re.search(
            r"sessions/00000002: found a session \(process \d+ on .*\) that has begun after this "
            r"one, number 1, expected none: .*; step 2 is the last that is saved$",
            ended,
        )
    place = config.files.place
    assert isinstance(place, StorePath)
    assert steps(place / "checkpoints") == [2]
    record = json.loads((place / "run.json").read_small(1 << 20))
    assert record["sessions"][0]["status"] == "running", "it writes to that run no more"


# -- sessions --------------------------------------------------------------------------------------


def test_the_later_of_two_sessions_goes_on(url: StorePath) -> None:
    one, other = RunStore(url), RunStore(url)
    one.claim()
    one.check_session()
    other.claim()
    other.check_session()
    with pytest.raises(CheckpointError, match=r"run/sessions/00000002: found a session \(process"):
        one.check_session()
    with pytest.raises(CheckpointError, match="found a session"):
        one.publish()


def test_a_session_knows_the_later_one_by_name_if_lists_lag(
    url: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = RunStore(url), RunStore(url)
    monkeypatch.setattr(StorePath, "iterdir", lambda path: iter(()))
    one.claim()
    other.claim()
    with pytest.raises(CheckpointError, match="sessions/00000002"):
        one.check_session()


def test_a_session_finds_that_its_run_was_deleted_and_begun_anew(url: StorePath) -> None:
    one = RunStore(url)
    one.claim()
    (url / "sessions" / "00000001").remove()
    with pytest.raises(CheckpointError, match="sessions/00000001: is missing"):
        one.check_session()
    RunStore(url).claim()
    with pytest.raises(CheckpointError, match="sessions/00000001: found a session"):
        one.check_session()


def test_what_another_session_says_of_itself_cannot_control_a_terminal(url: StorePath) -> None:
    one = RunStore(url)
    one.claim()
    put(url / "sessions" / "00000002", "\x1b[2J" + "x" * 900)
    with pytest.raises(CheckpointError) as caught:
        one.check_session()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_a_job_that_restarts_itself_is_not_in_its_own_way(
    url: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT_PID, str(os.getppid()))
    monkeypatch.setenv(JOB, "this job")
    files = run_dir(url)
    files.begin(output(url))
    RunRecord(files, {"recipe": "lm"}, {})
    files.publish()
    shutil.rmtree(files.root)  # it begins again on another host
    for existing in (Existing.REFUSE, Existing.OVERWRITE, Existing.AUTO):
        assert decided(output(url, existing)).existing is Existing.OVERWRITE, "nothing is saved"
        put(url / "checkpoints" / "step-00000001" / "manifest.json", "x")
        assert decided(output(url, existing)).existing is Existing.RESUME
        (url / "checkpoints" / "step-00000001" / "manifest.json").remove()

    def gone(*_: object) -> Any:
        raise StoreError("run.json: cannot be read (503 Service Unavailable)")

    monkeypatch.setattr(StorePath, "read_small", gone)
    with pytest.raises(StoreError, match="503"):  # that is not: this job has begun no run
        decided(output(url, Existing.OVERWRITE))


# -- what is in the way ----------------------------------------------------------------------------


def test_a_run_is_not_overwritten_unless_asked(url: StorePath) -> None:
    run_dir(url).check(output(url))
    with pytest.raises(OptionError, match=r"--resume: found no run in .*/run, expected a run"):
        run_dir(url).check(output(url, Existing.RESUME))
    a_run(url)
    for existing in (Existing.RESUME, Existing.OVERWRITE):
        run_dir(url).check(output(url, existing))
    with pytest.raises(OptionError, match=r"--out: found a run in .* already, expected another"):
        run_dir(url).check(output(url))


def test_overwriting_deletes_the_run_manifests_first_and_nothing_else(
    url: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(url)
    deleted: list[list[str]] = []
    remove = StorePath.remove

    def noted(path: StorePath, names: Any = ("",)) -> None:
        deleted.append(sorted(names))
        remove(path, names)

    monkeypatch.setattr(StorePath, "remove", noted)
    run_dir(url).begin(output(url, Existing.OVERWRITE))
    assert deleted[0] == ["checkpoints/step-00000001/manifest.json"]
    assert deleted[-1] == ["run.json"]
    assert sorted(url.below()) == ["sessions/00000001", "sessions/00000002", "thesis.tex"]


def test_objects_that_no_run_has_written_are_never_taken(url: StorePath) -> None:
    put(url / "checkpoints" / "step-00000001" / "manifest.json", "saved in code")
    for existing in (Existing.REFUSE, Existing.OVERWRITE):
        with pytest.raises(
            OptionError, match=r"--out: found other files in .*/run, such as 'check"
        ):
            run_dir(url).check(output(url, existing))
    put(place_of(f"{url}-2/notes.txt"), "mine")  # type: ignore[arg-type]
    run_dir(url.parent / "run-2x").check(output(url.parent / "run-2x"))


def test_what_needs_folders_is_refused_by_name(tmp_path: Path) -> None:
    config = in_store(small_config(tmp_path), tmp_path)
    alone, hosts = World(0, 2, 0, 2), World(0, 2, 0, 1)
    TrainingJob(config)._check_place(hosts)
    lost = config.with_train(output=output(place_of("memory:///run")))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"--out: found memory:///run, expected a folder or ano"):
        TrainingJob(lost)._check_place(alone)
    adapters = dataclasses.replace(config, lora="r=4")
    TrainingJob(adapters)._check_place(alone)
    with pytest.raises(OptionError, match=r"--out: found file.* over 2 hosts, expected a folder"):
        TrainingJob(adapters)._check_place(hosts)


def test_each_url_has_a_folder_of_its_own(host: Path) -> None:
    urls = ("s3://a/run", "s3://b/run", "gs://a/run", "s3://a/x/run", "s3://a", "s3://a/..run")
    roots = {run_dir(place_of(each)).root for each in urls}
    assert len(roots) == len(urls)
    assert {root.parent for root in roots} == {host / "shardwise" / "runs"}
    assert run_dir(place_of("s3://a/run")).root in roots


# -- copies ----------------------------------------------------------------------------------------


def test_what_has_not_changed_is_not_sent_again(
    url: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = a_run(url)
    sent: list[str] = []
    write = StorePath.write

    def noted(path: StorePath, chunks: Any, size: int) -> None:
        sent.append(path.name)
        write(path, chunks, size)

    monkeypatch.setattr(StorePath, "write", noted)
    files.publish()
    assert sent == []
    with files.metrics.open("a") as file:
        file.write('{"step": 2, "loss": 2.4}\n')
    files.publish()
    assert sent == ["metrics.jsonl"]


def test_a_new_host_has_the_files_of_the_store_and_no_others(url: StorePath, host: Path) -> None:
    files = a_run(url)
    files.sample.write_text("of a session that was lost before it was copied")
    put(url / "tokenizer" / "deep" / "template.jinja", "{{ x }}")
    put(url / "model.safetensors", "large")
    files = run_dir(url)
    files.begin(output(url, Existing.RESUME))
    found = {str(path.relative_to(files.root)) for path in files.root.rglob("*") if path.is_file()}
    assert found == {
        *("run.json", "metrics.jsonl"),
        *("tokenizer/tokenizer.json", "tokenizer/deep/template.jinja"),
    }


def test_a_run_whose_folder_was_deleted_is_not_saved_without_its_metrics(url: StorePath) -> None:
    files = a_run(url)
    shutil.rmtree(files.root)
    with pytest.raises(CheckpointError, match=r"found no run\.json, .* keep that folder"):
        files.publish()


def test_a_session_that_begins_while_another_copies_is_found(
    url: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = a_run(url)
    files.sample.write_text("x")
    write = StorePath.write

    def slow(path: StorePath, chunks: Any, size: int) -> None:
        RunStore(url).claim()
        write(path, chunks, size)

    monkeypatch.setattr(StorePath, "write", slow)
    with pytest.raises(CheckpointError, match="found a session"):
        files.publish()


def test_a_failure_to_copy_as_a_training_fails_is_said(
    url: StorePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = a_run(url)
    files.sample.write_text("x")

    def full(*_: object) -> None:
        raise StoreError("cannot be written (403 Forbidden)")

    monkeypatch.setattr(StorePath, "write", full)
    assert files.store is not None
    files.store.leave()
    assert re.search(r"warning .* is not copied to .*run: .*403 Forbidden", capsys.readouterr().err)


# -- strangers' objects ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "[]", '{"sessions": 3}', '{"recipe": ["lm"]}', "\x00{"])
def test_a_record_that_is_none_is_refused_by_its_url(url: StorePath, text: str) -> None:
    a_run(url)
    put(url / "run.json", text)
    with pytest.raises(UserError, match=rf"--out: {re.escape(str(url))}/run.json"):
        run_dir(url).read()


@pytest.mark.parametrize("text", ["[1]\n", "x" * 100_000 + "\n", '{"step": "1"}\n{"step": 2}\n'])
def test_metrics_that_are_none_are_refused_before_anything_is_fetched(
    url: StorePath, text: str
) -> None:
    a_run(url)
    put(url / "metrics.jsonl", text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        run_dir(url).check_metrics(1)


def test_large_objects_and_many_are_not_fetched(
    url: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(url)
    monkeypatch.setattr(stored, "_MOST_BYTES", 100)
    put(url / "ranks.jsonl", "x" * 101)
    with pytest.raises(UserError, match=r"run/ranks.jsonl: found 101 bytes, expected at most 100"):
        run_dir(url).begin(output(url, Existing.RESUME))
    (url / "ranks.jsonl").remove()
    monkeypatch.setattr(fetched, "_MOST_FILES", 8)
    for number in range(5):
        put(url / "earlier-options" / f"session-{number}.yaml", "")
    run_dir(url).begin(output(url, Existing.RESUME))
    put(url / "earlier-options" / "session-9.yaml", "")
    with pytest.raises(UserError, match=r"run: found 9 files, expected at most 8"):
        run_dir(url).begin(output(url, Existing.RESUME))


@pytest.mark.parametrize("name", ["../../run.json", "a/../../x", "/etc/passwd", "a//b", "a\nb"])
def test_names_never_lead_out_of_the_folder(
    url: StorePath, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = a_run(url)
    below = StorePath.below

    def hostile(path: StorePath) -> Any:
        return {**below(path), name: None} if path.name == "tokenizer" else below(path)

    monkeypatch.setattr(StorePath, "below", hostile)
    with pytest.raises(UserError, match=r"run: .*expected a URL of printable characters"):
        files.begin(output(url, Existing.RESUME))


def test_a_damaged_newest_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    place = place_of(f"file://{tmp_path}/store/run")
    assert isinstance(place, StorePath)
    config = in_store(small_config(tmp_path), tmp_path, existing=Existing.RESUME)
    files = run_dir(place)
    files.begin(output(place))
    files.write({"recipe": "lm", **config.check(World(0, 1, 0, 1)).facts()})
    files.publish()
    assert "no complete checkpoint in file://" in refusal(config)
    put(place / "checkpoints" / "step-00000008" / "shard-00000-of-00001.safetensors", "x")
    assert "no complete checkpoint" in refusal(config), "that was never committed"
    assert Checkpoints(place / "checkpoints").damage() is None
    put(place / "checkpoints" / "step-00000008" / "manifest.json", "{")
    found = Checkpoints(place / "checkpoints").damage()
    assert found is not None and found[0] == place / "checkpoints" / "step-00000008"


def test_replicas_are_trained_into_a_store(ranks: Ranks, tmp_path: Path, host: Path) -> None:
    options: dict[str, Any] = {"strategy": Strategy.DILOCO, "replicas": 2}
    options["diloco"] = DilocoConfig(local_steps=2)
    first = in_store(small_config(tmp_path, checkpoint_every=2, **options), tmp_path)
    again = in_store(small_config(tmp_path, steps=6, **options), tmp_path, existing=Existing.RESUME)
    assert ranks(on_host, 2, str(host), first, again) == [["finished"] * 2] * 2
    place = again.files.place_of_checkpoints
    assert steps(place) == steps(place / "replicas" / "1") == [4, 6]


@pytest.mark.long
def test_a_classifier_is_trained_into_a_store(ranks: Ranks, tmp_path: Path, host: Path) -> None:
    config, out = small_mnist(tmp_path), place_of(f"file://{tmp_path}/store/images")
    config = config.with_train(output=dataclasses.replace(config.train.output, out=out))
    assert ranks(on_host, 2, str(host), config) == [["finished"]] * 2
    assert isinstance(out, StorePath)
    assert {"model.safetensors", "confusion.png", "report.html"} < {*out.below()}
