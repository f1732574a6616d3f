"""Weights alone: loaded from any format into one process, and where shards are in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from shardwise import checkpoint, fully_shard
from shardwise.checkpoint import CheckpointError, load_weights, save_hf
from shardwise.checkpoint.disk.manifest import read_manifest
from tests.threads import run_threads


@pytest.mark.parametrize("name", ["w.safetensors", "step"])
def test_loading_between_forward_and_backward_is_seen_by_autograd(
    tmp_path: Path, name: str
) -> None:
    """Bytes go straight into the parameter, which autograd does not see by itself."""
    model = torch.nn.Linear(3, 2)
    if name == "step":
        checkpoint.save(tmp_path / name, model)
    else:
        save_file(model.state_dict(), tmp_path / name)
    loss = model.weight.square().sum()
    load_weights(tmp_path / name, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_scalar_and_an_empty_parameter_are_loaded(tmp_path: Path) -> None:
    def model(value: float) -> torch.nn.ParameterDict:
        values = {"scale": torch.tensor(value), "none": torch.empty(0, 3), "one": torch.ones(1, 1)}
        return torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in values.items()})

    save_hf(tmp_path / "out", model(2.0))
    loaded = model(0.0)
    load_weights(tmp_path / "out", loaded)
    assert loaded["scale"].item() == 2.0


def test_tied_weights_are_saved_once_and_found_under_any_name(tmp_path: Path) -> None:
    def tied() -> torch.nn.Module:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        return model

    model = tied()
    save_hf(tmp_path / "out", model)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {
        "a.weight",
        "a.bias",
        "b.bias",
    }
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "a.weight"}
    save_file(state, tmp_path / "b.safetensors")
    loaded = tied()
    load_weights(tmp_path / "b.safetensors", loaded)
    assert torch.equal(loaded["a"].weight, model["a"].weight)


class _Tied(torch.nn.Module):
    """An embedding, and a head in a group of its own that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(6, 4)
        self.block = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.block(self.embed(tokens)))
        return hidden


def _saves_between_forward_and_backward(rank: int, world_size: int, folder: Path) -> None:
    model = _Tied()
    for module in (model.embed, model.block, model.head):
        fully_shard(module, reshard_after_forward=False)
    fully_shard(model)
    loss = model(torch.arange(6)).sum()
    assert not isinstance(model.head.weight, DTensor), "the full parameter of its group"
    save_hf(folder / "hf", model)
    loss = model(torch.arange(6)).sum()
    checkpoint.save(folder / "ours", model)
    loss.backward()


def test_ties_across_groups_hold_between_forward_and_backward(tmp_path: Path) -> None:
    run_threads(_saves_between_forward_and_backward, 2, tmp_path)
    assert "head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    assert read_manifest(tmp_path / "ours").facts.tied == {"head.weight": "embed.weight"}
    for name in ("hf", "ours"):
        loaded = _Tied()
        torch.nn.init.zeros_(loaded.embed.weight)
        load_weights(tmp_path / name, loaded)
        assert torch.equal(loaded.head.weight, _Tied().embed.weight), name


def test_another_model_is_named_by_what_differs(tmp_path: Path) -> None:
    names = {f"layer{i}": torch.ones(1) for i in range(5)}
    save_file(names, tmp_path / "w.safetensors")
    model = torch.nn.ParameterDict({"other": torch.ones(1), "layer0": torch.ones(1)})
    with pytest.raises(
        CheckpointError,
        match="of another model: other is not in the checkpoint; layer1, layer2, layer3 and 1 "
        "more are not in the model",
    ):
        load_weights(tmp_path / "w.safetensors", model)
    load_weights(tmp_path / "w.safetensors", model, strict=False)


def test_values_without_their_scale_are_refused(tmp_path: Path) -> None:
    """Nobody knows what scales are called: they are beside a weight in eight bits."""
    weight = torch.randn(3, 3).to(torch.float8_e4m3fn)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False))
    for name in ("0.weight_scale_inv", "0.scb"):
        save_file({"0.weight": weight, name: torch.ones(1)}, tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match=f"0.weight: found torch.float8.* and {name}"):
            load_weights(tmp_path / "w.safetensors", model, strict=False)
    save_file({"0.weight": weight, "1.bias": torch.ones(1)}, tmp_path / "w.safetensors")
    load_weights(tmp_path / "w.safetensors", model, strict=False)
    assert torch.equal(model[0].weight, weight.float()), "values that are not scaled"


def test_saving_never_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists; give another name"):
        save_hf(tmp_path / "out", torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"0\.weight: is on the meta device"):
        save_hf(tmp_path / "meta", torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
