"""``shardwise checkpoint``: what it shows and writes, and how it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise import checkpoint
from tests.checkpoint.meshes import Setup, build, fill, give_state
from tests.cli.shell import call
from tests.harness import run_ranks

Capture = pytest.CaptureFixture[str]


def _save(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = build(Setup("mlp", (world_size,)), seed=0)
    give_state(optimizer)
    for step in (10, 20):
        fill(model, optimizer)
        checkpoint.save(checkpoint.step_folder(folder, step), model, optimizer, {"step": step})
        with torch.no_grad():
            model.layers[0].bias.add_(0.5)  # type: ignore[index,union-attr,operator]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two complete checkpoints, one that lacks a file, and one being written."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(_save, 2, folder / "checkpoints")
    broken = folder / "checkpoints" / "step-00000030"
    broken.mkdir()
    (broken / "manifest.json").write_bytes(
        (folder / "checkpoints" / "step-00000020" / "manifest.json").read_bytes()
    )
    (folder / "checkpoints" / ".step-00000040.partial").mkdir()
    return folder


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


class Shell:
    """Runs the command line in this process."""

    def __init__(self, capsys: Capture) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Run it, and expect an exit code; what it printed: to stderr if it failed."""
        ended = call("checkpoint", *map(str, arguments))
        shown = self._capsys.readouterr()
        assert ended == code, shown
        if code == 0:
            assert not shown.err
            return shown.out
        return shown.err or shown.out

    def json(self, *arguments: object, code: int = 0) -> Any:
        """Run it with ``--json``."""
        return json.loads(self(*arguments, "--json", code=code))

    def refused(self, *arguments: object, code: int = 2) -> str:
        """Run it, and expect one line on stderr."""
        message = self(*arguments, code=code)
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        return message


@pytest.fixture
def shell(capsys: Capture) -> Shell:
    return Shell(capsys)


# -- showing --


def test_ls_tells_which_are_complete(shell: Shell, run: Path) -> None:
    lines = [line.split() for line in shell("ls", run).splitlines()]

    assert lines[0] == ["step", "size", "state", "ranks", "mesh", "strategy", "format"]
    states = {line[0]: line[3:] for line in lines[1:5]}
    assert states["10"] == ["complete", "2", "shard=2", "full", "shardwise"]
    assert states["20"] == states["10"]
    assert states["30"] == ["incomplete", "shardwise"]
    assert states["40"] == ["incomplete"]
    assert "shard-00000-of-00002.safetensors: is missing" in " ".join(lines[5])
    assert "being written or deleted, or was left by a killed process" in " ".join(lines[6])

    found = shell.json("ls", run / "checkpoints")
    assert [(each["step"], each["complete"]) for each in found] == [
        (10, True),
        (20, True),
        (30, False),
        (40, False),
    ]
    assert found[0]["world_size"] == 2
    (alone,) = shell.json("ls", run / "checkpoints" / "step-00000010")
    assert alone == found[0]


def test_ls_of_a_folder_without_any(shell: Shell, tmp_path: Path) -> None:
    assert shell("ls", tmp_path) == f"no checkpoints in {tmp_path}\n"
    assert "found nothing at nowhere" in shell.refused("ls", "nowhere")


def test_show_names_parameters_shapes_dtypes_and_placements(shell: Shell, run: Path) -> None:
    shown = shell("show", run)

    assert "step-00000020" in shown, "the newest complete one"
    assert "saved by 2 ranks, mesh shard=2, full" in shown
    assert "model: 6 tensors" in shown
    lines = [line.split() for line in shown.splitlines()]
    start = lines.index(["layers.0"])
    assert lines[start + 1] == ["weight", "5x7", "F32", "Shard(0)"]
    assert "extra.step" not in shown
    assert "extra.step = 20" in shell("show", run, "--values")

    found = shell.json("show", run, "--values")
    weight = next(each for each in found["tensors"] if each["name"] == "layers.0.weight")
    assert weight == {
        "section": "model",
        "name": "layers.0.weight",
        "shape": [5, 7],
        "dtype": "F32",
        "nbytes": 140,
        "placements": "Shard(0)",
    }
    assert found["values"]["extra.step"] == "20"


def test_verify_of_a_run_tells_of_a_newer_checkpoint_that_is_damaged(
    shell: Shell, run: Path
) -> None:
    warning = shell("verify", run, code=1)
    assert "step-00000030 is newer but not complete: " in warning
    assert "shard-00000-of-00002.safetensors" in warning


def test_verify_names_file_parameter_and_piece(shell: Shell, run: Path, tmp_path: Path) -> None:
    whole = run / "checkpoints" / "step-00000020"
    assert "every checksum is right" in shell("verify", whole)
    assert shell.json("verify", whole)["damaged"] == []

    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 3))
    checkpoint.save(tmp_path / "hurt", model)
    (file,) = (tmp_path / "hurt").glob("shard*")
    data = bytearray(file.read_bytes())
    data[data.index(model[1].weight.detach().numpy().tobytes()) + 5] ^= 64
    file.write_bytes(data)

    shown = shell("verify", tmp_path / "hurt", code=1)
    assert (
        "file shard-00000-of-00001.safetensors, parameter 1.weight, piece model.1.weight" in shown
    )
    assert "damaged in 1 place" in shown
    (damage,) = shell.json("verify", tmp_path / "hurt", code=1)["damaged"]
    assert damage["parameter"] == "1.weight"

    file.write_bytes(data[:-9])
    shown = shell("verify", tmp_path / "hurt", code=1)
    assert "parameter 0.weight and 3 others, piece all" in shown
    assert shown.count("shard-00000-of-00001.safetensors: found") == 1, "a file is named once"

    (tmp_path / "hurt" / "manifest.json").write_text("{")
    assert "manifest.json: is not valid JSON" in shell.refused("verify", tmp_path / "hurt", code=1)


def test_diff_tells_what_differs(shell: Shell, run: Path) -> None:
    a, b = (run / "checkpoints" / f"step-000000{step}" for step in (10, 20))
    assert "hold the same" in shell("diff", a, a)

    found = shell.json("diff", a, b, code=1)["differences"]
    assert [each["name"] for each in found] == ["extra.step"]

    save_file({"x": torch.zeros(3)}, "a.safetensors")
    save_file({"x": torch.tensor([0.0, 0.5, float("nan")])}, "b.safetensors")
    (only,) = shell.json("diff", "a.safetensors", "b.safetensors", code=1)["differences"]
    assert (only["count"], only["max_abs"]) == (2, "nan")
    shown = shell("diff", "a.safetensors", "b.safetensors", code=1)
    assert shown.splitlines()[3].split() == ["model.x", "value", "F32", "F32", "nan", "2"]
    assert shown.splitlines()[-1] == "1 difference"


def _six_layers(change: float = 0.0) -> dict[str, torch.Tensor]:
    names = [f"layers.{i}.{name}" for i in range(6) for name in ("up.weight", "down.weight")]
    values = {name: torch.full((4, 2), float(i)) for i, name in enumerate(names)}
    for i, name in enumerate(names):
        values[name][0, 0] += change * i
    return {"embed.weight": torch.zeros(3, 2), **values}


def test_show_folds_layers_that_are_alike(shell: Shell) -> None:
    save_file(_six_layers(), "a.safetensors")
    lines = [line.split() for line in shell("show", "a.safetensors").splitlines()]
    start = lines.index(["name", "shape", "dtype"])
    assert sorted(lines[start + 1 : start + 5]) == sorted(
        [
            ["embed.weight", "3x2", "F32"],
            ["layers.0..5", "(6", "alike)"],
            ["down.weight", "4x2", "F32"],
            ["up.weight", "4x2", "F32"],
        ]
    )
    assert len(lines) == start + 5
    every = shell("show", "a.safetensors", "--layers")
    assert all(f"layers.{i}\n" in re.sub(" +\n", "\n", every) for i in range(6))
    assert len(shell.json("show", "a.safetensors")["tensors"]) == 13


def test_diff_folds_layers_that_differ_alike(shell: Shell) -> None:
    """The largest difference of a row's members, and the elements of all of them."""
    save_file(_six_layers(), "a.safetensors")
    other = _six_layers(change=0.25)
    other["layers.3.up.weight"] = torch.zeros(4, 3)
    save_file(other, "b.safetensors")
    shown = shell("diff", "a.safetensors", "b.safetensors", code=1)
    lines = [line.split() for line in shown.splitlines()]
    assert ["down.weight", "value", "F32", "F32", "2.75", "6"] in lines
    assert ["model.layers.0..5", "(6", "alike)"] in lines
    assert ["model.layers.1,2,4,5", "(4", "alike)"] in lines, "0.up.weight has not changed"
    assert ["up.weight", "value", "F32", "F32", "2.5", "4"] in lines
    assert ["up.weight", "shape", "[4,", "2]", "[4,", "3]"] in lines
    assert lines[-1] == ["11", "differences"]
    every = shell("diff", "a.safetensors", "b.safetensors", "--layers", code=1)
    assert "alike" not in every
    assert len(shell.json("diff", "a.safetensors", "b.safetensors", code=1)["differences"]) == 11


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_a_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Names are folded and stay whole; nothing is cut off."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    name = "model.layers.0.post_attention_layernorm." + "very_long_" * 3 + "weight"
    save_file({name: torch.zeros(40, 110, 3), "only.in.a": torch.zeros(2)}, "a.safetensors")
    save_file({name: torch.ones(40, 110, 3)}, "b.safetensors")
    for command, code in (("show a.safetensors", 0), ("diff a.safetensors b.safetensors", 1)):
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shell(*command.split(), code=code))
        assert max(map(len, shown.splitlines())) <= width, shown
        assert "…" not in shown


# -- writing --


def test_consolidate_makes_what_others_load(shell: Shell, run: Path) -> None:
    assert shell("consolidate", run, "a.safetensors", "--buffer", "8KiB").startswith("wrote a.safe")
    shell("consolidate", run, "a.pt")
    shell("consolidate", run, "all.pt", "--everything")
    assert "in 4 files" in shell("consolidate", run, "folder", "--max-shard-size", "0.1kB")

    state = load_file("a.safetensors")
    assert len(state) == 6
    for name, value in torch.load("a.pt", weights_only=True).items():
        assert torch.equal(value, state[name])
    assert torch.load("all.pt", weights_only=True)["extra"] == {"step": 20}
    assert "exists" in shell.refused("consolidate", run, "a.pt")
    shell("consolidate", run, "a.pt", "--force")


def test_convert_goes_everywhere_and_back(shell: Shell, run: Path) -> None:
    shell("convert", run, "dcp", "--to", "dcp")
    shell("convert", "dcp", "ours", "--to", "shardwise")
    told = shell("convert", "ours", "hf", "--to", "hf", "--max-shard-size", "150")
    assert "from_pretrained needs hf/config.json; the source has none, so add one" in told
    assert "hold the same" in shell("diff", run, "ours")
    formats = {each["path"]: each["format"] for each in shell.json("ls", ".")}
    assert formats == {"dcp": "dcp", "hf": "hf", "ours": "shardwise"}
    assert "without checksums" in shell.refused("verify", "dcp")


def test_convert_says_what_transformers_will_miss(shell: Shell, run: Path) -> None:
    shell("convert", run, "ours", "--to", "shardwise")
    Path("ours/config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    told = shell("convert", "ours", "hf", "--to", "hf")
    assert "AutoTokenizer needs a tokenizer in hf; the source has none, so add one" in told
    Path("ours/tokenizer.json").write_text("{}")
    assert "note:" not in shell("convert", "ours", "hf", "--to", "hf", "--force")


# -- refusing --


def test_ctrl_c_is_one_line_too(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.checkpoint.tools.convert.write_single", interrupted)
    save_file({"a": torch.ones(3)}, "good.safetensors")
    assert shell.refused("consolidate", "good.safetensors", "out.safetensors", code=130) == (
        "error: stopped\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["good.safetensors"], "nothing is left"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("show nowhere", 2, "found nothing at nowhere, expected a checkpoint"),
        ("show empty", 1, "empty: found no checkpoint; expected manifest.json (shardwise)"),
        ("show notes.txt", 1, "notes.txt: found no checkpoint"),
        ("show bad.safetensors", 1, "bad.safetensors"),
        ("show bad.pt", 1, "bad.pt: is not a file of torch.save"),
        ("consolidate bad.pt out.safetensors", 1, "bad.pt: is not a file of torch.save"),
        ("consolidate good.safetensors out.ckpt", 2, "found a destination .ckpt"),
        ("consolidate good.safetensors no/out.pt", 2, "found no folder no; make it first"),
        ("consolidate good.safetensors good.safetensors --force", 2, "contains, the checkpoint"),
        ("consolidate good.safetensors out.pt --max-shard-size 1GB", 2, "requires a folder"),
        ("consolidate good.safetensors out --everything", 2, "--everything requires"),
        ("consolidate good.safetensors out.pt --buffer many", 2, "--buffer: found 'many'"),
        ("consolidate good.safetensors out.pt --buffer 1", 2, "buffer: found 1 bytes"),
        ("consolidate good.safetensors", 2, "DST"),
        ("convert good.safetensors out --to onnx", 2, "--to: found 'onnx', expected one of"),
        ("convert good.safetensors out --to dcp --max-shard-size 1GB", 2, "with --to hf only"),
        ("convert good.safetensors out", 2, "--to"),
        ("convert good.safetensors taken --to dcp", 2, "taken exists"),
        ("convert good.safetensors taken --to dcp --force", 2, "thesis.tex, which is not part"),
        ("diff good.safetensors nowhere", 2, "found nothing at nowhere"),
        ("verify good.safetensors", 2, "without checksums"),
        ("burn good.safetensors", 2, "burn"),
    ],
)
def test_mistakes_are_one_line(
    shell: Shell, tmp_path: Path, arguments: str, code: int, message: str
) -> None:
    Path("empty").mkdir()
    Path("notes.txt").touch()
    Path("bad.safetensors").write_bytes(b"\xff" * 40)
    Path("bad.pt").write_bytes(b"\xff" * 40)
    save_file({"a": torch.ones(3)}, "good.safetensors")
    Path("taken").mkdir()
    Path("taken", "thesis.tex").touch()
    before = sorted(path for path in tmp_path.rglob("*"))

    assert message in shell.refused(*arguments.split(), code=code)

    assert sorted(path for path in tmp_path.rglob("*")) == before, "nothing was made or left"


@pytest.mark.parametrize("command", ["ls", "verify", "show", "diff", "consolidate", "convert"])
def test_help_has_an_example(shell: Shell, command: str) -> None:
    shown = shell(command, "--help")
    assert "Example" in shown
    assert f"shardwise checkpoint {command} " in shown
