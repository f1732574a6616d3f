"""Real files of DeepSpeed, torchtune and torch_xla: read as they are, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.formats.detect import Format, open_source
from shardwise.checkpoint.tools.convert import convert
from shardwise.checkpoint.tools.survey import list_checkpoints
from tests.checkpoint.formats.others.net import Net, groups
from tests.checkpoint.formats.test_torch_xla import drawn

FILES = Path(__file__).parent / "others" / "files"


def _assert_loads(path: Path, full: Mapping[str, Tensor], *, scalar: bool = False) -> None:
    """The weights load as they are, ties and all, whatever the model held before."""
    model = Net(scalar=scalar)
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.zeros_(tensor)
    checkpoint.load_weights(path, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, full[name].to(value.dtype)), name
    assert model.head.weight is model.emb.weight


# ---- DeepSpeed ----


def _of_deepspeed(folder: Path) -> dict[str, Tensor]:
    saved = torch.load(folder / "full.pt", weights_only=True)
    full = {name: each["param"] for name, each in saved.items()}
    return {**full, "head.weight": full["emb.weight"], "mask": Net(scalar=False).mask}


def test_model_states_of_deepspeed_are_the_model(tmp_path: Path) -> None:
    for stage, dtype in (("stage1-fp32", torch.float32), ("stage2-bf16", torch.bfloat16)):
        folder = FILES / "deepspeed" / stage
        file = folder / "global_step2" / "mp_rank_00_model_states.pt"
        full = {name: value.to(dtype) for name, value in _of_deepspeed(folder).items()}
        full["mask"] = full["mask"].bfloat16()
        _assert_loads(file, full)
        convert(file, tmp_path / stage, Format.SHARDWISE)
        _assert_loads(tmp_path / stage, full)
        with open_source(file) as source:
            assert {info.dtype for path, info in source.tensors.items() if path[1] != "mask"} == {
                "F32" if dtype == torch.float32 else "BF16"
            }


@pytest.mark.parametrize("stage", ["stage1-fp32", "stage2-bf16", "stage3-bf16"])
def test_parts_of_deepspeed_are_refused_by_name(stage: str) -> None:
    folder = FILES / "deepspeed" / stage
    parts = [*folder.rglob("*_optim_states.pt"), *folder.rglob("zero_*_model_states.pt")]
    assert len(parts) == (6 if stage.startswith("stage3") else 2)
    for path in (folder, folder / "global_step2", *parts):
        with pytest.raises(CheckpointError, match=r"DeepSpeed's ZeRO; its zero_to_fp32\.py"):
            open_source(path)
        with pytest.raises(CheckpointError, match=r"DeepSpeed's ZeRO; its zero_to_fp32\.py"):
            checkpoint.load_weights(path, Net(scalar=False))
    with pytest.raises(CheckpointError, match=r"DeepSpeed's ZeRO; its zero_to_fp32\.py"):
        list_checkpoints(folder)


def test_a_universal_checkpoint_of_deepspeed_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "zero" / "emb.weight").mkdir(parents=True)
    (tmp_path / "zero" / "emb.weight" / "fp32.pt").touch()
    with pytest.raises(CheckpointError, match=r"universal checkpoint; its zero_to_fp32\.py"):
        open_source(tmp_path)


# ---- torchtune ----


def test_torchtune_gives_its_weights_and_says_that_states_have_no_names(tmp_path: Path) -> None:
    folder = FILES / "torchtune"
    full = torch.load(folder / "full.pt", weights_only=True)
    _assert_loads(folder / "dist_epoch_0", full)
    convert(folder / "dist_epoch_0", tmp_path / "ours", Format.SHARDWISE)
    model = Net(scalar=False)
    optimizer = torch.optim.AdamW(groups(model), lr=0.5)
    with pytest.raises(CheckpointError, match=r"numbers do not tell .* load the model alone"):
        checkpoint.load(tmp_path / "ours", model, optimizer)
    assert not optimizer.state
    extra = checkpoint.load(tmp_path / "ours", model)
    assert (extra["seed"], extra["epochs_run"]) == (7, 1)
    assert torch.equal(model.emb.weight, full["emb.weight"])


# ---- torch_xla ----


class Untied(Net):
    """The model as torch_xla trains it."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__(scalar=scalar)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


OUTER = [("scale",), ("emb.weight",), ("head.weight",)]
INNER = ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight")
#: The parameters of each shard, in the order of the optimizer, and what its rows are a multiple of.
SHARDS: dict[str, tuple[list[tuple[str, ...]], int]] = {
    "mixed": ([*OUTER, INNER], 128),
    "dim0": ([*OUTER, *((name,) for name in INNER)], 1),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_of_torch_xla_on_three_ranks(name: str, tmp_path: Path) -> None:
    folder, scalar = FILES / "torch_xla", name == "mixed"
    full = torch.load(folder / f"{name}_full.pt", weights_only=True)
    file = folder / f"{name}_rank-00000001-of-00000003.pth"
    _assert_loads(file, full, scalar=scalar)

    convert(file, tmp_path / "ours", Format.SHARDWISE)
    model = Untied(scalar=scalar)
    named = dict(model.named_parameters())
    shards, multiple = SHARDS[name]
    states = drawn(shards, full, 3, multiple)
    first = list(states)[: 2 if scalar else 3]
    optimizer = torch.optim.AdamW(
        [
            {"params": [named[n] for n in first]},
            {"params": [named[n] for n in states if n not in first]},
        ]
    )
    checkpoint.load(tmp_path / "ours", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    for param_name, param in named.items():
        assert torch.equal(param, full[param_name]), param_name
        assert torch.equal(optimizer.state[param]["exp_avg"], states[param_name]), param_name
        assert optimizer.state[param]["step"] == 2


def test_whole_files_of_torch_xla() -> None:
    folder = FILES / "torch_xla"
    full = torch.load(folder / "whole_full.pt", weights_only=True)
    _assert_loads(folder / "xm.pt", full, scalar=True)
    with pytest.raises(CheckpointError, match=r"serialization\.load returns with torch\.save"):
        open_source(folder / "xser.pt")
