"""Which part of a checkpoint of torch's is the model, whatever names a program saved it under."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import StatePath
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.formats.layouts import flat_groups, grouped, sections
from shardwise.checkpoint.formats.torchfile import read_tree

Paths = tuple[StatePath, ...]

#: Paths of tensors and of values, and the sections that they belong to.
LAYOUTS: dict[str, tuple[Paths, Paths, Paths]] = {
    "model and optimizer, as Accelerate names them": (
        (("model", "0.weight"), ("optimizer", "state", "0.weight", "exp_avg")),
        (("optimizer", "param_groups", 0, "lr"), ("step",)),
        (
            ("model", "0.weight"),
            ("optimizer", "state", "0.weight", "exp_avg"),
            ("optimizer", "param_groups", 0, "lr"),
            ("extra", "step"),
        ),
    ),
    "names of the user's, as under Lightning Fabric": (
        (("net", "0.weight"), ("opt", "state", "0.weight", "exp_avg"), ("ema", "mean")),
        (("opt", "param_groups", 0, "lr"),),
        (
            ("model", "0.weight"),
            ("optimizer", "state", "0.weight", "exp_avg"),
            ("extra", "ema", "mean"),
            ("optimizer", "param_groups", 0, "lr"),
        ),
    ),
    "torchtitan": (
        (
            ("0.weight",),
            ("frozen",),
            ("optimizer", "state.0.weight.exp_avg"),
            ("train_state", "step"),
        ),
        (
            ("1._extra_state", "note"),
            ("optimizer", "param_groups.0.weight.lr"),
            ("lr_scheduler", "last_epoch"),
            ("dataloader", "dp_rank_0"),
        ),
        (
            ("model", "0.weight"),
            ("model", "frozen"),
            ("optimizer", "state", "0.weight", "exp_avg"),
            ("extra", "train_state", "step"),
            ("model", "1._extra_state", "note"),
            ("optimizer", "param_groups", "0.weight", "lr"),
            ("extra", "lr_scheduler", "last_epoch"),
            ("extra", "dataloader", "dp_rank_0"),
        ),
    ),
    "torchtitan without an optimizer": (
        (("0.weight",), ("train_state", "step")),
        (),
        (("model", "0.weight"), ("extra", "train_state", "step")),
    ),
    "a state dict alone": (
        (("0.weight",), ("model",)),
        (("0._extra_state",), ("note",)),
        (("model", "0.weight"), ("model", "model"), ("model", "0._extra_state"), ("extra", "note")),
    ),
    "one object": (
        (("app", "model", "0.weight"), ("app", "optim", "state", "0.weight", "exp_avg")),
        (),
        (("model", "0.weight"), ("optimizer", "state", "0.weight", "exp_avg")),
    ),
    "Composer": (
        (
            ("state", "model", "0.weight"),
            ("state", "optimizers", "AdamW", "state", "0.weight", "exp_avg"),
            ("rng", 0, "torch"),
        ),
        (("state", "optimizers", "AdamW", "param_groups", 0, "lr"), ("state", "timestamp", "n")),
        (
            ("model", "0.weight"),
            ("optimizer", "state", "0.weight", "exp_avg"),
            ("extra", "rng", 0, "torch"),
            ("optimizer", "param_groups", 0, "lr"),
            ("extra", "timestamp", "n"),
        ),
    ),
    "an optimizer alone": (
        (("state", "0.weight", "exp_avg"),),
        (("param_groups", 0, "lr"),),
        (("optimizer", "state", "0.weight", "exp_avg"), ("optimizer", "param_groups", 0, "lr")),
    ),
    "two optimizers": (
        (("model", "w"), ("g", "state", "w", "exp_avg"), ("d", "state", "w", "exp_avg")),
        (("g", "param_groups", 0, "lr"), ("d", "param_groups", 0, "lr")),
        (
            ("model", "w"),
            ("extra", "g", "state", "w", "exp_avg"),
            ("extra", "d", "state", "w", "exp_avg"),
            ("extra", "g", "param_groups", 0, "lr"),
            ("extra", "d", "param_groups", 0, "lr"),
        ),
    ),
    "an optimizer of each parameter, as torchtune saves those that step in backward": (
        (
            ("model", "a"),
            ("optimizer", "a", "state", "0", "exp_avg"),
            ("optimizer", "b", "state", "0", "exp_avg"),
        ),
        (("optimizer", "a", "param_groups", 0, "lr"),),
        (
            ("model", "a"),
            ("extra", "optimizer", "a", "state", "0", "exp_avg"),
            ("extra", "optimizer", "b", "state", "0", "exp_avg"),
            ("extra", "optimizer", "a", "param_groups", 0, "lr"),
        ),
    ),
    "a model with a module named state": (
        (("model", "state.weight"), ("optimizer", "state", "state.weight", "exp_avg")),
        (),
        (("model", "state.weight"), ("optimizer", "state", "state.weight", "exp_avg")),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_entry_finds_its_section(name: str) -> None:
    tensors, values, expected = LAYOUTS[name]
    assert tuple(sections([*tensors, *values], frozenset(tensors))) == expected


def test_parameters_of_equal_settings_are_a_group() -> None:
    paths: Paths = tuple(
        ("optimizer", "param_groups", name, key)
        for name in ("a", "b.c", "d")
        for key in ("lr", "eps")
    )
    settings = {("a", "lr"): 1.0, ("b.c", "lr"): 2.0, ("d", "lr"): 1.0}
    found = flat_groups(paths)
    read = [
        (name, {key: settings.get((name, key), 0.5) for key in each})
        for name, each in found.items()
    ]
    assert list(grouped(read)) == [
        {"lr": 1.0, "eps": 0.5, "params": ["a", "d"]},
        {"lr": 2.0, "eps": 0.5, "params": ["b.c"]},
    ]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "DeepSpeed's ZeRO.*zero_to_fp32",
        ),
        ("pytorch_model_fsdp_rank1.bin", "Accelerate, one for each rank.*SHARDED_STATE_DICT"),
    ],
)
def test_files_of_others_that_are_not_read_are_named(
    tmp_path: Path, file: str, message: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model_fsdp.bin", "epoch=1.ckpt"])
def test_models_in_files_of_torch_save_are_read(tmp_path: Path, file: str) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / file)
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    with open_source(tmp_path / file if file.endswith("ckpt") else tmp_path) as source:
        assert source.full(("model", "w")).tolist() == [1, 1]


def test_several_models_beside_each_other_ask_which(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"pytorch_model_fsdp_{number}").mkdir()
        (tmp_path / f"pytorch_model_fsdp_{number}" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=r"several models: .*_0, .*_1; name one"):
        open_source(tmp_path)


def test_a_model_in_one_file_of_composer_is_found(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "optimizers": {"AdamW": {}},
        "timestamp": {"total_wct": datetime.timedelta(days=1, seconds=2)},
        "metadata": {"torch_version": torch.__version__},
    }
    saved = {"state": state, "rng": [{"numpy": np.random.RandomState(0).get_state()}]}
    torch.save(saved, tmp_path / "ep1.pt")
    with open_source(tmp_path / "ep1.pt") as source:
        assert source.tensors.keys() == {("model", "w")}
    assert read_tree(tmp_path / "ep1.pt")["state"]["timestamp"] == {"total_wct": 86402.0}
    torch.save({"w": np.ones(2)}, tmp_path / "arrays.pt")
    with pytest.raises(
        CheckpointError, match=r"w: found an object of numpy.ndarray, expected plain values"
    ):
        open_source(tmp_path / "arrays.pt")
