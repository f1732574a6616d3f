"""``shardwise inspect`` shows a plan; every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import app

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def call(monkeypatch: Patch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", "inspect", *arguments])
    with pytest.raises(SystemExit) as ended:
        app()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llama-15m", "--model: found llama-15m, expected"),
        ("--model llama-15m", "did you mean llama-150m?"),
        ("--model vit-10", "did you mean vit-10b?"),
        ("--mesh dp=2,tp", "--mesh: found 'tp' in 'dp=2,tp', expected tp=N, N a number from 1"),
        ("--mesh dp=0", "--mesh: found 'dp=0' in 'dp=0', expected dp=N"),
        ("--mesh dp=-2", "--mesh: found 'dp=-2'"),
        ("--mesh dp=2,dp=2", "--mesh: found dp twice in 'dp=2,dp=2', expected each dimension once"),
        ("--mesh dp=2,dp_shard=2", "expected one of them: they mean the same"),
        ("--mesh pp=2,dp=2", "found 'pp' in 'pp=2,dp=2', expected one of dp_replicate, dp"),
        ("--mesh tp=2,dp=4", "expected dp=4,tp=2: replicas outermost"),
        ("--mesh dp=99999", "--mesh: found dp=99999, 99,999 ranks, expected at most 4,096"),
        ("--mesh dp=4 --rank 4", "--rank: found 4, expected a rank from 0 to 3"),
        ("--mesh dp=4 --rank two", "--rank: found 'two', expected a whole number"),
        ("--svg x.svg", "--svg: found no --param, expected one"),
    ],
)
def test_mistakes_that_are_told_at_once(
    monkeypatch: Patch, capsys: Capture, arguments: str, message: str
) -> None:
    assert call(monkeypatch, *arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh dp=2,tp=3", "--mesh: found dp=2,tp=3, expected a tp that divides the 4 attention"),
        ("--param nobody", "--param: found nobody, expected the name of one of the 39 parameters"),
        ("--param *norm* --svg x.svg", "--param: found a pattern that matches 9 parameters"),
        ("--html no/where.html", "no/where.html: No such file or directory"),
    ],
)
def test_mistakes_that_need_the_model(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "--model", "llama-tiny", *arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_plan_of_a_vision_transformer_is_that_of_its_training(
    monkeypatch: Patch, capsys: Capture
) -> None:
    assert call(monkeypatch, "--model", "vit-base", "--mesh", "dp=4", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    placements = {p["name"]: p["placements"] for p in report["parameters"]}
    assert placements["vit.embeddings.position_embeddings"] == [["dp", "Shard(2)"]]
    assert placements["classifier.weight"] == [["dp", "Shard(0)"]]
    assert call(monkeypatch, "--model", "vit-base", "--json", "--param", "classifier.*") == 0
    some = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in some["parameters"]] == ["classifier.weight", "classifier.bias"]
    assert {p["tiling"] for p in some["parameters"]} == set(range(len(some["tilings"])))
    assert some["numel"] == report["numel"], "totals are those of the model"
    assert call(monkeypatch, "--model", "vit-tiny", "--mesh", "dp=2,tp=2") == 2
    assert "no tensor parallel plan" in capsys.readouterr().err


def test_a_plan_of_a_preset(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call(monkeypatch, "--model", "llama-tiny", "--mesh", "dp=2,tp=4") == 0
    shown = capsys.readouterr().out
    assert "llama-tiny: 920,704 parameters" in shown, "as many as `train lm` has"
    assert "model.layers.0..3  (4 alike)" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_config_of_transformers(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
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
    assert call(monkeypatch, "--model", str(tmp_path), "--mesh", "dp=3,tp=2", "--json") == 0
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

    assert call(monkeypatch, "--model", str(tmp_path), "--mesh", "tp=4") == 2
    assert "expected a tp that divides the 2 key and value heads" in capsys.readouterr().err


def test_values_count_in_rows(monkeypatch: Patch, capsys: Capture) -> None:
    arguments = "--model llama-tiny --mesh dp=3,tp=2 --param model.norm.weight --values --json"
    assert call(monkeypatch, *arguments.split()) == 0
    held = json.loads(capsys.readouterr().out)["values"]["model.norm.weight"]
    assert held["0"] == held["1"] == list(range(43))
    assert held["5"] == list(range(86, 128))


def test_files_are_written(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--model llama-tiny --mesh dp=4,tp=2 --html plan.html "
        "--param model.layers.3.mlp.up_proj.weight --svg up.svg --rank 3"
    )
    assert call(monkeypatch, *arguments.split()) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "wrote up.svg" in shown.err
    assert "model.layers.0..3.mlp.up_proj.weight" in Path("plan.html").read_text()
    assert Path("up.svg").read_text().startswith("<svg")
