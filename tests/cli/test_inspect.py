"""``shardwise inspect`` shows a plan; every mistake is one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import call, refused

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llama-15m", "--model: found llama-15m, expected"),
        ("--model llama-15m", "did you mean llama-150m?"),
        ("--model vit-10", "did you mean vit-10b?"),
        ("--mesh dp=2,tp", "--mesh: found 'tp' in 'dp=2,tp', expected tp=N, N a number from 1"),
        ("--mesh dp=0", "--mesh: found 'dp=0', expected dp=N"),
        ("--mesh dp=-2", "--mesh: found 'dp=-2'"),
        ("--mesh dp=2,dp=2", "--mesh: found dp twice in 'dp=2,dp=2', expected each dimension once"),
        ("--mesh dp=2,dp_shard=2", "expected one of them: they mean the same"),
        (
            "--mesh pp=2,dp=2",
            "found 'pp=2' in 'pp=2,dp=2', expected NAME=N with a name among",
        ),
        ("--mesh tp=2,dp=4", "expected dp=4,tp=2: replicas outermost"),
        ("--mesh dp=99999", "--mesh: found dp=99999, 99,999 ranks, expected at most 4,096"),
        ("--mesh dp=4 --rank 4", "--rank: found 4, expected a rank from 0 to 3"),
        ("--mesh dp=4 --rank two", "--rank: found 'two', expected a whole number"),
        ("--svg x.svg", "--svg: found no --param, expected one"),
    ],
)
def test_mistakes_that_are_found_without_the_model(
    capsys: Capture, arguments: str, message: str
) -> None:
    assert message in refused(capsys, "inspect", *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh dp=2,tp=3", "--mesh: found dp=2,tp=3, expected a tp that divides the 4 attention"),
        ("--param nobody", "--param: found nobody, expected the name of one of the 39 parameters"),
        ("--param *norm* --svg x.svg", "--param: found a pattern that matches 9 parameters"),
        ("--html no/where.html", "no/where.html: No such file or directory"),
    ],
)
def test_mistakes_that_are_found_with_the_model(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("inspect", "--model", "llama-tiny", *arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_plan_of_a_vision_transformer_is_that_of_its_training(capsys: Capture) -> None:
    assert call("inspect", "--model", "vit-base", "--mesh", "dp=4", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    placements = {p["name"]: p["placements"] for p in report["parameters"]}
    assert placements["vit.embeddings.position_embeddings"] == [["dp", "Shard(2)"]]
    assert placements["classifier.weight"] == [["dp", "Shard(0)"]]
    assert call("inspect", "--model", "vit-base", "--json", "--param", "classifier.*") == 0
    some = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in some["parameters"]] == ["classifier.weight", "classifier.bias"]
    assert {p["tiling"] for p in some["parameters"]} == set(range(len(some["tilings"])))
    assert some["numel"] == report["numel"], "totals are those of the model"
    assert call("inspect", "--model", "vit-tiny", "--mesh", "dp=2,tp=2") == 2
    assert "no tensor parallel plan" in capsys.readouterr().err


def test_a_plan_of_a_preset(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call("inspect", "--model", "llama-tiny", "--mesh", "dp=2,tp=4") == 0
    shown = capsys.readouterr().out
    assert "llama-tiny: 920,704 parameters" in shown, "as many as `train lm` has"
    assert "model.layers.0..3  (4 alike)" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_config_of_transformers(capsys: Capture, tmp_path: Path) -> None:
    """Its own vocabulary; grouped heads; an embedding that is the head too; uneven rows."""
    settings = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert call("inspect", "--model", str(tmp_path), "--mesh", "dp=3,tp=2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    parameters = {each["name"]: each for each in found["parameters"]}
    embedding = parameters["model.embed_tokens.weight"]
    assert embedding["aliases"] == ["lm_head.weight"]
    assert embedding["shape"] == [101, 32]
    blocks = found["tilings"][embedding["tiling"]]["blocks"]
    rows = {each["ranks"][0]: each["spans"][0] for each in blocks}
    # 51 and 50 rows by tp, each over three ranks of dp in chunks of 17.
    assert rows == {
        0: [[0, 17]],
        2: [[17, 17]],
        4: [[34, 17]],
        1: [[51, 17]],
        3: [[68, 17]],
        5: [[85, 16]],
    }
    down = parameters["model.layers.1.mlp.down_proj.weight"]
    assert down["placements"] == [["dp", "Shard(0)"], ["tp", "Shard(1)"]]

    assert call("inspect", "--model", str(tmp_path), "--mesh", "tp=4") == 2
    assert "expected a tp that divides the 2 key and value heads" in capsys.readouterr().err


def test_values_count_in_rows(capsys: Capture) -> None:
    arguments = "--model llama-tiny --mesh dp=3,tp=2 --param model.norm.weight --values --json"
    assert call("inspect", *arguments.split()) == 0
    held = json.loads(capsys.readouterr().out)["values"]["model.norm.weight"]
    assert held["0"] == held["1"] == list(range(43))
    assert held["5"] == list(range(86, 128))


def test_files_are_written(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--model llama-tiny --mesh dp=4,tp=2 --html plan.html "
        "--param model.layers.3.mlp.up_proj.weight --svg up.svg --rank 3"
    )
    assert call("inspect", *arguments.split()) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "wrote up.svg" in shown.err
    assert "model.layers.0..3.mlp.up_proj.weight" in Path("plan.html").read_text()
    assert Path("up.svg").read_text().startswith("<svg")


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 8,
    "id2label": {str(i): f"label {i}" for i in range(7)},
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "id2label": {str(i): f"label {i}" for i in range(7)},
}


def write_run(
    folder: Path,
    mesh: object,
    *,
    recipe: str = "lm",
    model: dict[str, object] | None = None,
    config: dict[str, object] | None = None,
) -> None:
    """The files of a run that say what was trained, and on which mesh."""
    folder.mkdir()
    record = {
        "recipe": recipe,
        "config": {"train": {"sharding": {"strategy": "full"}}, **(config or {})},
        "model": {"name": "small"},
        "sessions": [{"mesh": {"dp_shard": 99}}, {"mesh": mesh}],
    }
    (folder / "run.json").write_text(json.dumps(record))
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))


def report_of(monkeypatch: Patch, capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert call("inspect", *arguments, "--json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_run_is_shown_on_the_mesh_of_its_last_session(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), {"dp_replicate": 2, "dp_shard": 3}, model=LLAMA)
    report = report_of(monkeypatch, capsys, "run")
    assert report["model"] == "small of run"
    assert report["mesh"] == {
        "names": ["dp_replicate", "dp_shard"],
        "shape": [2, 3],
        "ranks": list(range(6)),
    }
    embedding = next(p for p in report["parameters"] if p["name"] == "model.embed_tokens.weight")
    assert embedding["shape"] == [101, 32], "the vocabulary of its tokenizer"
    other = report_of(monkeypatch, capsys, "run", "--mesh", "dp=2,tp=2")
    assert other["mesh"]["names"] == ["dp", "tp"]
    assert other["numel"] == report["numel"]


@pytest.mark.parametrize(
    ("recipe", "model", "head"),
    [
        ("vit", VIT, ("classifier.weight", [7, 24])),
        ("imagenet", RESNET, ("classifier.1.weight", [7, 16])),
        ("mnist", None, ("head.3.weight", [10, 64])),
    ],
)
def test_runs_of_every_recipe(
    monkeypatch: Patch,
    capsys: Capture,
    tmp_path: Path,
    recipe: str,
    model: dict[str, object] | None,
    head: tuple[str, list[int]],
) -> None:
    folder = tmp_path / "run"
    write_run(folder, {"dp_shard": 2}, recipe=recipe, model=model)
    report = report_of(monkeypatch, capsys, str(folder))
    shapes = {each["name"]: each["shape"] for each in report["parameters"]}
    assert shapes[head[0]] == head[1]
    assert len({each["group"] for each in report["parameters"]}) > 1


def test_a_run_whose_model_was_one_group(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    write_run(folder, {"dp_shard": 2}, recipe="mnist", config={"nested": False})
    report = report_of(monkeypatch, capsys, str(folder))
    assert {each["group"] for each in report["parameters"]} == {""}


def test_one_replica_of_a_run_with_diloco(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    """Replicas are not copies of each other."""
    folder = tmp_path / "run"
    config: dict[str, object] = {"train": {"sharding": {"strategy": "diloco"}}}
    mesh = {"dp_replicate": 2, "dp_shard": 3}
    write_run(folder, mesh, recipe="mnist", config=config)
    report = report_of(monkeypatch, capsys, str(folder))
    assert report["mesh"]["names"] == ["dp_shard"]
    assert len(report["ranks"]) == 3


@pytest.mark.parametrize(
    ("mesh", "model", "arguments", "message"),
    [
        ({"dp_shard": 2}, LLAMA, "empty", "RUN: found no run in empty, expected a folder with run"),
        ({"dp_shard": 2}, None, "run", "RUN: found no run/config.json, expected the model's"),
        (None, LLAMA, "run", "RUN: found no mesh in run/run.json, expected that of a session"),
        ({"pp": 2}, LLAMA, "run", "RUN: run/run.json, 'mesh': found 'pp=2', expected NAME=N with"),
        ({"dp_shard": 2}, LLAMA, "run --model llama-tiny", "--model: found llama-tiny with a RUN"),
        ({"dp_shard": 2}, LLAMA, "run --rank 2", "--rank: found 2, expected a rank from 0 to 1"),
        ({"dp_shard": 2}, LLAMA, "run --mesh tp=3", "--mesh: found tp=3, expected a tp that divid"),
    ],
)
def test_mistakes_about_runs(
    monkeypatch: Patch,
    capsys: Capture,
    tmp_path: Path,
    mesh: object,
    model: dict[str, object] | None,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    write_run(Path("run"), mesh, model=model)
    assert call("inspect", *arguments.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("run.json", "RUN: run/run.json: is not valid JSON"),
        ("config.json", "RUN: found run/config.json, no JSON"),
    ],
)
def test_a_damaged_run_is_a_mistake_about_run(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path, file: str, message: str
) -> None:
    """Not about ``--out`` or ``--model``, which nobody gave."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "config.json"):
        (folder / name).write_text("{}")
    (folder / file).write_text("{")
    assert call("inspect", "run") == 2
    assert message in capsys.readouterr().err
