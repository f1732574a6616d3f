"""Models and data in an object store: a training is that of a folder, and errors name the URL."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.app.recipes.text.config import LmConfig
from shardwise.base.errors import UserError
from shardwise.elastic.world import World
from shardwise.insight.planning.presets import find_settings, is_code
from tests.cli.shell import call
from tests.pretrained.small import assert_same, full_tensors
from tests.recipes.running import train
from tests.recipes.small import losses, write_text
from tests.recipes.text.plain import tuned
from tests.recipes.text.published import publish
from tests.worlds import Ranks

pytest.importorskip("obstore", reason="needs obstore: install .[test]")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "host"))
    return tmp_path / "host"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The folder of the store, with a model in several files, and two texts."""
    folder = tmp_path / "store"
    publish(folder / "model")
    (folder / "texts" / "more").mkdir(parents=True)
    words = write_text(folder / "texts").read_text()
    (folder / "texts" / "more" / "words.txt").write_text(words[::-1])
    (folder / "texts" / ".hidden").write_text("no text")
    return folder


def from_store(tmp_path: Path, store: Path, out: str, **changes: Any) -> LmConfig:
    """A training of which model and data are URLs."""
    given = {"data": (f"file://{store}/texts",), "seq_length": 16, **changes}
    config = tuned(tmp_path, store / "model", out, **given)
    url = f"file://{store}/model"
    return dataclasses.replace(config, model=url, pretrained=url)


def _on_host(rank: int, world_size: int, host: str, run: Callable[..., Any], *given: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = host
    run(rank, world_size, *given)


def test_data_are_fetched_once_and_that_is_said(
    tmp_path: Path, store: Path, host: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = from_store(tmp_path, store, "run")
    summaries = [config.check(World(0, 1, 0, 1)).text.summary for _ in range(2)]
    line = rf"fetching   file://{store}/texts, [0-9.]+ KiB, to {host}/shardwise/fetched/texts-\w+\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    assert summaries == [f"file://{store}/texts, streamed, 2 files"] * 2


def test_a_training_is_that_of_the_same_files_in_folders(
    ranks: Ranks, tmp_path: Path, store: Path, host: Path
) -> None:
    lora = {"lora": "r=2", "merge": True}
    here = tuned(
        *(tmp_path, store / "model", "here"), data=(str(store / "texts"),), seq_length=16, **lora
    )
    there = from_store(tmp_path, store, "there", **lora)
    ranks(_on_host, 2, str(host), train, here, there)
    assert losses(there) == losses(here)
    record = there.files.read()
    assert record["config"]["pretrained"] == f"file://{store}/model"
    assert record["config"]["data"] == [f"file://{store}/texts"]
    named = json.loads((there.files.adapters / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == f"file://{store}/model"
    merged = [each.files.merged / "model.safetensors" for each in (here, there)]
    assert merged[0].read_bytes() == merged[1].read_bytes()
    assert not [*host.rglob("*.safetensors")], "weights are read where they are"
    assert not [*host.rglob(".hidden")]


def _load(rank: int, world_size: int, *names: str) -> None:
    first, second = (full_tensors(shardwise.from_pretrained(name)) for name in names)
    assert_same(first, second)


def test_every_rank_reads_its_part(ranks: Ranks, store: Path, host: Path) -> None:
    ranks(_on_host, 2, str(host), _load, str(store / "model"), f"file://{store}/model")


def test_generate_and_plan_take_urls(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = []
    for name in (str(store / "model"), f"file://{store}/model"):
        assert call("generate", name, "--prompt", "shard", "--max-tokens", "9") == 0
        said.append(capfd.readouterr().out)
    assert said[0] == said[1]
    url = f"file://{store}/model"
    assert find_settings(url) == find_settings(str(store / "model"))
    assert not is_code(url)


def test_a_run_does_not_go_on_with_other_weights(tmp_path: Path, store: Path) -> None:
    config = from_store(tmp_path, store, "run", lora="r=2")
    before = config.check(World(0, 1, 0, 1)).facts()
    assert config.check(World(0, 1, 0, 1)).facts() == before
    weights = store / "model" / "model.safetensors"
    shutil.copy(weights, weights.with_suffix(".new"))
    weights.with_suffix(".new").rename(weights)
    with pytest.raises(UserError, match=r"--from: found file://.*/model, whose weights have chan"):
        config.check(World(0, 1, 0, 1)).check_same(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ("{}/none",)}, r"^--data: found nothing at file://\S+/none, expected a file"),
        ({"data": ("{}/model/tokenizer.json", "s3://me:secret@b/x")}, r"^--data: found a URL s3:"),
        ({"data": ("ftp://b/x",)}, r"^--data: found ftp://b/x, expected a folder, or a URL of an"),
        ({"data": ("{}/run",)}, r"^--data: found file://\S+/run, a run, expected text"),
        ({"chat": ("{}/none",), "data": ()}, r"^--chat: found nothing at file://\S+/none"),
        ({"pretrained": "{}/none"}, r"^--from: file://\S+/none: found no checkpoint; expected"),
        (
            {"pretrained": "{}/m.safetensors"},
            r"^--from: found file://\S+, a file, expected the fol",
        ),
        ({"pretrained": "{}/bare"}, r"^--from: found file://\S+/bare without config.json"),
        ({"pretrained": "s3://me:secret@b/x"}, r"^--from: found a URL s3://\.\.\. with a user na"),
    ],
)
def test_errors_are_one_line_with_url_and_option(
    tmp_path: Path, store: Path, changes: dict[str, Any], message: str
) -> None:
    (store / "run").mkdir()
    (store / "run" / "run.json").write_text("{}")
    (store / "bare").mkdir()
    shutil.copy(store / "model" / "model.safetensors", store / "bare")

    def named(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(named, value))
        return value.format(f"file://{store}")

    changes = {key: named(value) for key, value in changes.items()}
    if "pretrained" in changes:
        changes["model"] = changes["pretrained"]
    config = dataclasses.replace(from_store(tmp_path, store, "out"), **changes)
    with pytest.raises(UserError, match=message) as refused:
        config.check(World(0, 1, 0, 1))
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_credentials_in_a_url_are_never_shown(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("generate", "s3://me:secret@b/x"),
        ("train", "lm", "--tokenizer", "s3://me:secret@b/x"),
    ):
        assert call(*words) == 2
    said = capfd.readouterr()
    assert said.err.count("found a URL s3://... with a user name") == 2
    assert "secret" not in said.err + said.out
    with pytest.raises(ValueError, match=r"found a URL s3://\.\.\. with a user name") as refused:
        shardwise.from_pretrained("s3://me:secret@b/x")
    assert "secret" not in str(refused.value)
