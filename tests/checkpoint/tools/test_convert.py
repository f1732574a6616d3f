"""From any format to any other and back, and telling what two checkpoints differ in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.formats.detect import Format, open_source
from shardwise.checkpoint.formats.source import (
    LEAST_BUFFER,
)
from shardwise.checkpoint.tools.convert import consolidate, convert
from shardwise.checkpoint.tools.diff import Difference, differences
from tests.checkpoint.meshes import Setup, build, filled, wrong


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with an optimizer, and values of all kinds."""
    model, optimizer = filled(Setup("conv", None))
    extra = {
        "step": 7,
        "nested": {"a": [1, [2, 3]], "b": [{"c": (1, 2)}, None], "d": {}},
        "rng": torch.arange(5, dtype=torch.uint8),
        "epsilon": float("inf"),
    }
    checkpoint.save(tmp_path / "saved", model, optimizer, extra)
    return tmp_path / "saved"


def _assert_loads(path: Path) -> dict[str, Any]:
    model, optimizer = build(Setup("conv", None), seed=7)
    extra = checkpoint.load(path, model, optimizer)
    assert not wrong(model, optimizer)
    return extra


def _diff(first: Path, second: Path) -> list[Difference]:
    with open_source(first) as a, open_source(second) as b:
        return list(differences(a, b, buffer=8 * LEAST_BUFFER))


@pytest.mark.parametrize("buffer", [LEAST_BUFFER, 2**20])
def test_everything_comes_back_through_torchs_format(
    saved: Path, tmp_path: Path, buffer: int
) -> None:
    convert(saved, tmp_path / "dcp", Format.DCP, buffer=buffer)
    convert(tmp_path / "dcp", tmp_path / "again", Format.SHARDWISE, buffer=buffer)

    assert _diff(saved, tmp_path / "dcp") == []
    assert _diff(saved, tmp_path / "again") == []
    extra = _assert_loads(tmp_path / "again")
    assert extra["step"] == 7
    assert extra["epsilon"] == float("inf")
    assert extra["nested"] == {"a": [1, [2, 3]], "b": [{"c": (1, 2)}, None], "d": {}}
    assert extra["rng"].tolist() == [0, 1, 2, 3, 4]


def test_weights_come_back_through_every_format(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "1", Format.HF, max_shard_size=1000, buffer=LEAST_BUFFER)
    convert(tmp_path / "1", tmp_path / "2", Format.DCP)
    convert(tmp_path / "2", tmp_path / "3", Format.HF)
    convert(tmp_path / "3", tmp_path / "4", Format.SHARDWISE)
    convert(tmp_path / "4", tmp_path / "5", Format.SHARDWISE, buffer=LEAST_BUFFER)

    model, _ = build(Setup("conv", None), seed=7)
    checkpoint.load(tmp_path / "5", model)
    assert not wrong(model, torch.optim.SGD(model.parameters()))
    assert len(read_manifest(tmp_path / "5").files) == 1
    assert all(diff.what == "missing" for diff in _diff(saved, tmp_path / "5"))
    with pytest.raises(ValueError, match="use consolidate"):
        convert(saved, tmp_path / "torch", Format.TORCH)


@pytest.mark.parametrize("run", [True, False], ids=["in the run", "in the checkpoint"])
def test_config_json_is_copied_and_tied_weights_are_written_once(tmp_path: Path, run: bool) -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "other": nn.LayerNorm(4)})
    model["embed"], model["head"] = nn.Embedding(6, 4), nn.Linear(4, 6)
    model["twin"] = nn.Linear(4, 6, bias=False)  # as many rows, other values
    model["head"].weight = model["embed"].weight
    saved = tmp_path / "run" / "checkpoints" / "step-00000001"
    saved.parent.mkdir(parents=True)
    checkpoint.save(saved, model)
    config = {"model_type": "llama", "vocab_size": 6, "tie_word_embeddings": True}
    text = json.dumps(config)
    ((tmp_path / "run" if run else saved) / "config.json").write_text(text)
    moved: list[int] = []

    convert(tmp_path / "run", tmp_path / "hf", Format.HF, watch=lambda total: moved.append)

    names = set(model.state_dict())
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == names - {"head.weight"}
    assert (tmp_path / "hf" / "config.json").read_text() == text
    assert sum(moved) == sum(tensor.nbytes for tensor in model.state_dict().values())

    consolidate(tmp_path / "run", tmp_path / "folder")
    assert (tmp_path / "folder" / "config.json").read_text() == text


def test_tied_weights_are_written_once_unless_who_reads_them_will_not_tie_them(
    tmp_path: Path,
) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6)})
    model["head"].weight = model["embed"].weight
    names = set(model.state_dict())
    for name, said in {
        "none": None,
        "untied": {"model_type": "llama", "vocab_size": 6, "tie_word_embeddings": False},
        "unknown": {"vocab_size": 6, "tie_word_embeddings": True},
        "no object": ["model_type"],
    }.items():
        checkpoint.save(tmp_path / name, model)
        if said is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(said))
        convert(tmp_path / name, tmp_path / f"{name}-hf", Format.HF)
        found = load_file(tmp_path / f"{name}-hf" / "model.safetensors")
        assert set(found) == (names if name == "untied" else names - {"head.weight"}), name
        assert (tmp_path / f"{name}-hf" / "config.json").exists() == (name == "untied")
    # Other formats do not say what was tied: equal values may be equal by chance.
    convert(tmp_path / "none", tmp_path / "dcp", Format.DCP)
    convert(tmp_path / "dcp", tmp_path / "dcp-hf", Format.HF)
    assert set(load_file(tmp_path / "dcp-hf" / "model.safetensors")) == names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_our_format_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"a": torch.ones(2)}, "when": 1 + 2j}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)

    with pytest.raises(CheckpointError, match=r"extra\.when: found .*complex"):
        convert(tmp_path / "dcp", tmp_path / "ours", Format.SHARDWISE)

    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


# ---- differences ----


def test_differences_in_names_shapes_dtypes_and_values_are_told(tmp_path: Path) -> None:
    def save(name: str, tensors: dict[str, torch.Tensor], **extra: Any) -> Path:
        model = nn.Module()
        for key, value in tensors.items():
            model.register_buffer(key, value)
        checkpoint.save(tmp_path / name, model, None, extra)
        return tmp_path / name

    huge = 2**60
    same = {"same": torch.ones(3), "nan": torch.tensor([float("nan"), 1.0])}
    first = save(
        "a",
        {
            **same,
            "gone": torch.ones(2),
            "shape": torch.ones(2, 3),
            "dtype": torch.ones(2),
            "value": torch.arange(10_000.0),
            "broken": torch.ones(2),
            "long": torch.tensor([huge, 1]),
        },
        step=1,
        only="a",
    )
    second = save(
        "b",
        {
            **same,
            "shape": torch.ones(3, 2),
            "dtype": torch.ones(2, dtype=torch.float64),
            "value": torch.arange(10_000.0).index_fill(0, torch.tensor([17, 9000]), 0.5),
            "broken": torch.tensor([1.0, float("nan")]),
            "long": torch.tensor([huge + 1, 1]),
            "new": torch.ones((), dtype=torch.bfloat16),
        },
        step=2,
    )

    found = {diff.name: diff for diff in _diff(first, second)}

    assert found.pop("model.gone") == Difference("model.gone", "missing", "F32 [2]", "")
    assert found.pop("model.new") == Difference("model.new", "missing", "", "BF16 []")
    assert found.pop("model.shape") == Difference("model.shape", "shape", "[2, 3]", "[3, 2]")
    assert found.pop("model.dtype") == Difference("model.dtype", "dtype", "F32", "F64", 0.0, 0)
    assert found.pop("model.value") == Difference("model.value", "value", "F32", "F32", 8999.5, 2)
    broken = found.pop("model.broken")
    assert (broken.count, str(broken.max_abs)) == (1, "nan")
    assert found.pop("model.long").count == 1, "integers are compared exactly"
    assert found.pop("extra.step") == Difference("extra.step", "value", "1", "2")
    assert found.pop("extra.only") == Difference("extra.only", "missing", "'a'", "")
    assert not found
