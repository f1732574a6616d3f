"""Files of ``torch.save`` that training scripts write: model, optimizer, and whatever else."""

from __future__ import annotations

import functools
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.formats.detect import Format, open_source
from shardwise.checkpoint.formats.torchfile import read_tree
from shardwise.checkpoint.tools.convert import convert


class Colors(dict[str, int]):
    """A dict that is not a plain one; it has a state beside its items."""


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    net[0].bias.requires_grad_(False)
    return net


def _optimizer(net: nn.Module, lr: float = 0.1, decay: float = 0.0) -> torch.optim.Optimizer:
    named = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [each for each in named if not each[0].endswith("bias")]},
            {"params": [each for each in named if each[0].endswith("bias")], "weight_decay": decay},
        ],
        lr=lr,
    )


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    net(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained(decay: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = _net()
    optimizer = _optimizer(net, decay=decay)
    for seed in (1, 2):
        _step(net, optimizer, seed)
    return net, optimizer


def _by_names(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's FSDP and ``get_optimizer_state_dict`` return: names in place of numbers."""
    packed = optimizer.state_dict()
    names = [name for group in packed["param_groups"] for name in group.pop("param_names")]
    return {
        "state": {names[number]: state for number, state in packed["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
    }


def _assert_continues(
    path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, decay: float = 0.0
) -> dict[str, Any]:
    """Converted, and loaded into another model and optimizer, it trains on as it would have."""
    ours = path.parent / "ours"
    convert(path, ours, Format.SHARDWISE)
    again = _net(9)
    other = _optimizer(again, lr=0.7, decay=decay)
    extra = checkpoint.load(ours, again, other)
    for each in (net, again):
        _step(each, optimizer if each is net else other, 3)
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    return extra


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("model", "optimizer"), ("state_dict", "optimizer_states"), ("net", "opt")],
    ids=["torch's recipe", "Lightning", "names of the user's, as under Fabric"],
)
@pytest.mark.parametrize("of", ["names", "param_names"])
def test_an_optimizer_by_names_comes_along(
    tmp_path: Path, model: str, optimizer: str, of: str
) -> None:
    net, adam = _trained()
    state: Any = _by_names(net, adam) if of == "names" else adam.state_dict()
    state = [state] if optimizer == "optimizer_states" else state
    saved = {model: net.state_dict(), optimizer: state, "epoch": 3, "rng": torch.arange(4)}
    torch.save(saved, tmp_path / "x.ckpt")
    extra = _assert_continues(tmp_path / "x.ckpt", net, adam)
    assert extra["epoch"] == 3
    assert extra["rng"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("outer", ["module.", "_forward_module.", "_orig_mod."])
def test_names_that_a_wrapper_gave_its_optimizer_are_known(tmp_path: Path, outer: str) -> None:
    net, adam = _trained()
    state = adam.state_dict()
    for group in state["param_groups"]:
        group["param_names"] = [f"{outer}{name}" for name in group["param_names"]]
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "x.pt")
    _assert_continues(tmp_path / "x.pt", net, adam)


def test_an_optimizer_by_numbers_is_left_out_and_named(tmp_path: Path) -> None:
    net, _ = _trained()
    adam = torch.optim.AdamW(net.parameters())
    torch.save({"model": net.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt") as source:
        assert {path[0] for path in source.tensors} == {"model"}
        assert "numbered, without param_names" in source.about[0]


@pytest.mark.parametrize("model", ["pytorch_model_fsdp.bin", "pytorch_model.bin"])
def test_the_optimizer_of_accelerate_is_in_a_file_beside(tmp_path: Path, model: str) -> None:
    net, adam = _trained()
    folder = tmp_path / "state"
    folder.mkdir()
    torch.save(net.state_dict(), folder / model)
    torch.save(_by_names(net, adam), folder / "optimizer.bin")
    _assert_continues(folder, net, adam)


@pytest.mark.parametrize("what", ["damage", "a list"])
def test_damage_beside_a_model_concerns_who_wants_everything(tmp_path: Path, what: str) -> None:
    net, _ = _trained()
    torch.save(net.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    torch.save([1], tmp_path / "optimizer.bin")
    if what == "damage":
        (tmp_path / "optimizer.bin").write_bytes(b"damaged")
    checkpoint.load_weights(tmp_path, again := _net(9))
    assert torch.equal(again.state_dict()["0.weight"], net.state_dict()["0.weight"])
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        convert(tmp_path, tmp_path / "ours", Format.SHARDWISE)


def _unknown() -> dict[str, Any]:
    colors = Colors(red=1)
    colors.state = [colors]  # type: ignore[attr-defined]
    return {
        "an object": Namespace(a=torch.ones(2)),
        "a dict": colors,
        "a class": Namespace,
        "a function": functools.partial(print, 1),
        "inside": {"lists": [1, {"of": Path("x")}]},
        "as a key": {Format.DCP: 1},
    }


@pytest.mark.parametrize("what", _unknown())
def test_unknown_classes_block_only_who_wants_them(tmp_path: Path, what: str) -> None:
    net, _ = _trained()
    saved = {"args": _unknown()[what], "model": net.state_dict(), "step": 5}
    torch.save(saved, tmp_path / "x.pt")
    checkpoint.load_weights(tmp_path / "x.pt", again := _net(9))
    assert torch.equal(again.state_dict()["0.weight"], net.state_dict()["0.weight"])
    convert(tmp_path / "x.pt", tmp_path / "hf", Format.HF)
    with open_source(tmp_path / "x.pt") as source:
        assert source.values["extra", "step"] == 5
    with pytest.raises((CheckpointError, TypeError), match=r"extra\.args.*found"):
        convert(tmp_path / "x.pt", tmp_path / "ours", Format.SHARDWISE)
    with pytest.raises(CheckpointError, match="not needed for plain values"):
        read_tree(tmp_path / "x.pt")


def test_unknown_classes_in_a_model_are_named(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2), "v": Namespace()}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"v: found an object of argparse\.Namespace"):
        open_source(tmp_path / "x.pt")


class _Runs:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_nothing_of_an_unknown_class_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "args": _Runs()}, "x.pt")
    with open_source(Path("x.pt")) as source:
        assert source.full(("model", "w")).tolist() == [1, 1]
        with pytest.raises(CheckpointError, match=r"extra\.args: found an object"):
            source.values["extra", "args"]
    assert not Path("ran").exists()
    pickle.loads(pickle.dumps(_Runs()))
    assert Path("ran").exists()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers_are_known(tmp_path: Path, prefix: str) -> None:
    net, _ = _trained()
    saved = net.state_dict()
    renamed = {f"{prefix}{name}": value for name, value in saved.items()}
    torch.save(renamed, tmp_path / "x.pt")
    checkpoint.load_weights(tmp_path / "x.pt", again := _net(9))
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    torch.save({f"inner.module.{name}": value for name, value in saved.items()}, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match=r"inner\.module\.0"):
        checkpoint.load_weights(tmp_path / "y.pt", again)


def test_a_module_named_module_keeps_its_name(tmp_path: Path) -> None:
    net = nn.ModuleDict({"module": _net()})
    torch.save(net.state_dict(), tmp_path / "x.pt")
    checkpoint.load_weights(tmp_path / "x.pt", again := nn.ModuleDict({"module": _net(9)}))
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_groups_of_equal_settings_count_as_one(tmp_path: Path) -> None:
    """Where settings were saved by parameter, nothing tells such groups apart, nor needs to."""
    net, adam = _trained(decay=0.01)
    state = _by_names(net, adam)
    first, second = state["param_groups"]
    first["params"] += second["params"]
    state["param_groups"] = [first]
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "x.pt")
    _assert_continues(tmp_path / "x.pt", net, adam, decay=0.01)
    with pytest.raises(CheckpointError, match="found no group among the 1 saved ones"):  # 0.0
        checkpoint.load(tmp_path / "ours", other := _net(), _optimizer(other))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved", [{"best": torch.ones(2), "args": Namespace()}, None])
def test_what_lightning_saves_beside_may_be_anything(tmp_path: Path, saved: Any) -> None:
    import torch.distributed.checkpoint as dcp

    net, _ = _trained()
    dcp.save({"state_dict": net.state_dict()}, checkpoint_id=tmp_path / "x", no_dist=True)
    if saved is None:
        (tmp_path / "x/meta.pt").write_bytes(b"damaged")
    else:
        torch.save({"epoch": 2, "callbacks": saved}, tmp_path / "x/meta.pt")
    checkpoint.load_weights(tmp_path / "x", again := _net(9))
    assert torch.equal(again.state_dict()["0.weight"], net.state_dict()["0.weight"])
    with open_source(tmp_path / "x") as source:
        if saved is not None:
            assert source.values["extra", "meta", "epoch"] == 2
            assert source.full(("extra", "meta", "callbacks", "best")).tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"meta\.pt"):
        convert(tmp_path / "x", tmp_path / "ours", Format.SHARDWISE)
