"""What files of ranks have beside the model and the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.ranks.xla import rank_file
from shardwise.checkpoint.tools.convert import convert
from tests.checkpoint.formats.test_torch_xla import FILES, Net


def _add(source: Path, target: Path, **more: Any) -> None:
    state = torch.load(source, weights_only=True)
    torch.save({**state, **more}, target)


def test_what_files_of_torch_xla_have_beside_becomes_extra(tmp_path: Path) -> None:
    for rank in range(2):
        source = rank_file(f"{FILES}/plain", rank, 2)
        target = rank_file(f"{tmp_path}/a", rank, 2)
        _add(source, target, epoch=3, seed=rank, random=torch.full((2,), rank))
    convert(rank_file(f"{tmp_path}/a", 0, 2), tmp_path / "ours", Format.SHARDWISE)
    extra = checkpoint.load(tmp_path / "ours", Net(scalar=False))
    assert extra["epoch"] == 3
    assert extra["seed"].values == (0, 1)
    assert [each.tolist() for each in extra["random"].values] == [[0, 0], [1, 1]]


def test_what_is_no_plain_value_is_named_and_left_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = checkpoint.save_rank_checkpoint(f"{tmp_path}/a", model)
    _add(path, path, args=1j, epoch=3)
    with pytest.warns(UserWarning, match="no plain values under 'args'; it is left out"):
        convert(path, tmp_path / "ours", Format.SHARDWISE)
    assert checkpoint.load(tmp_path / "ours", model) == {"epoch": 3}


@pytest.mark.parametrize("groups", ["fewer", "more", "others"])
def test_other_groups_are_refused_before_anything_changes(groups: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def copies(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [dict(each) for each in groups]  # torch adds settings to those it is given

    two: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    checkpoint.save(tmp_path / "a", model, torch.optim.SGD(copies(two), lr=0.5))
    checkpoint.save_rank_checkpoint(f"{tmp_path}/r", model, torch.optim.SGD(copies(two), lr=0.5))
    made = {
        "fewer": [{"params": [model.weight]}],
        "more": [*two, {"params": []}],
        "others": [{"params": [model.weight, model.bias]}],
    }
    optimizer = torch.optim.SGD(copies(made[groups]), lr=0.25)
    with torch.no_grad():
        model.weight.fill_(7)
    for load, path in (
        (checkpoint.load, str(tmp_path / "a")),
        (checkpoint.load_rank_checkpoint, f"{tmp_path}/r"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match="group"):
            load(path, model, optimizer)  # type: ignore[operator]
        assert model.weight.eq(7).all()
        assert optimizer.param_groups[0]["lr"] == 0.25
