"""Saving and loading in one process: what comes back, what is refused, what other readers see."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.storage import Reader, Writer
from tests.checkpoint.small import SHARD, make, same, save_small, train


def test_a_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = save_small(tmp_path / "a")
    other, other_optimizer = make(seed=1, steps=3)
    other_optimizer.param_groups[0]["lr"] = 3.0

    extra = checkpoint.load(tmp_path / "a", other, other_optimizer)

    assert extra["step"] == 1
    assert torch.equal(extra["noise"], torch.ones(3))
    assert other.note == "saved", "extra state of a module"
    for each in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(5)
        train(*each)
    assert same(other, model)


def test_an_optimizer_that_never_stepped_is_saved_as_it_is(tmp_path: Path) -> None:
    model, optimizer = make(steps=0)
    checkpoint.save(tmp_path / "a", model, optimizer)
    assert not optimizer.state, "saving takes no step"
    other, stepped = make(seed=1, steps=2)
    checkpoint.load(tmp_path / "a", other, stepped)
    assert not stepped.state


PLAIN = {
    "none": None,
    "truth": True,
    "count": -(2**70),
    "real": 0.1,
    "edge": [math.inf, -math.inf],
    "text": "a \u20ac \ud800 \x00",
    "bytes": b"\x00\xff",
    "pair": (1, (2.5, "x")),
    "numbered": {1: "a", (2, 3): {"b": None}},
    "dollar": {"$tuple": [1]},
    "dtype": torch.bfloat16,
    "empty": [{}, [], ()],
    "nothing": {},
}


def test_plain_values_come_back_exactly(tmp_path: Path) -> None:
    model, _ = make()
    checkpoint.save(tmp_path / "a", model, extra={**PLAIN, "nan": math.nan})
    extra = checkpoint.load(tmp_path / "a", model)
    assert math.isnan(extra.pop("nan"))
    assert extra == PLAIN
    assert all(type(extra[key]) is type(value) for key, value in PLAIN.items())


def test_tensors_of_every_kind_come_back_exactly(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 255, (6, 4, 8), generator=generator, dtype=torch.uint8)
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint32]
    dtypes += [torch.complex64, torch.float8_e4m3fn, torch.int64]
    tensors = {str(dtype): noise.view(dtype) for dtype in dtypes}
    tensors |= {
        "bool": noise > 99,
        "transposed": noise.transpose(0, 2),
        "strided": noise[::2, :, ::3],
        "conjugate": noise.view(torch.complex64).conj(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(3, 0, 2),
        "large": torch.arange(3_000_000).view(3, -1).t(),
    }
    model, _ = make()
    checkpoint.save(tmp_path / "a", model, extra={"in": {"a list": [1, tensors]}})
    found = checkpoint.load(tmp_path / "a", model)["in"]["a list"]
    assert found[0] == 1
    for name, value in tensors.items():
        assert found[1][name].dtype == value.dtype, name
        assert found[1][name].shape == value.shape, name
        mine, theirs = (t.resolve_conj().contiguous() for t in (found[1][name], value))
        assert (
            mine.numpy(force=True).tobytes() == theirs.numpy(force=True).tobytes()
            if (mine.dtype not in (torch.bfloat16, torch.float8_e4m3fn))
            else torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        ), name


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"a": {"b": object()}}, r"extra\.a\.b: found builtins\.object"),
        ({"a": [1, {2}]}, r"extra\.a\[1\]: found builtins\.set"),
        ({"a": lambda: 0}, r"extra\.a: found builtins\.function"),
        ({"a": {"$tuple": torch.ones(1)}}, r"extra\.a: found tensors beside the key '\$tuple'"),
        ({"a": torch.ones(2, device="meta")}, r"extra\.a: is on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, r"extra\.a: found layout torch.sparse_coo, expected"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, r"extra\.a: found dtype complex128"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"extra\.a\.b: two tensors"),
        ({"a\n": 1}, r"expected a name of printable characters"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    tmp_path: Path, extra: Any, complaint: str
) -> None:
    model, optimizer = make()
    with pytest.raises(CheckpointError, match=complaint):
        checkpoint.save(tmp_path / "a", model, optimizer, extra)
    assert not list(tmp_path.iterdir())


def test_extra_is_a_dict(tmp_path: Path) -> None:
    extra: Any = [1]
    with pytest.raises(TypeError, match="extra: found a list of int, expected a dict or None"):
        checkpoint.save(tmp_path / "a", *make(), extra)
    assert not list(tmp_path.iterdir())


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    save_small(tmp_path / "a")
    model, optimizer = make()
    model.layers[2] = nn.Linear(5, 4)
    with pytest.raises(CheckpointError, match=r"layers\.2\.weight: found shape \[3, 5\]"):
        checkpoint.load(tmp_path / "a", model)
    model.layers[2] = nn.Identity()
    model.more = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"more\.weight.* not in the checkpoint"):
        checkpoint.load(tmp_path / "a", model)
    checkpoint.load(tmp_path / "a", model, strict=False)
    other = torch.optim.AdamW(model.more.parameters())
    with pytest.raises(CheckpointError, match=r"found no group .* begins with more\.weight"):
        checkpoint.load(tmp_path / "a", model, other, strict=False)
    stranger = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(CheckpointError, match="which the model does not have"):
        checkpoint.save(tmp_path / "b", model, stranger)
    del optimizer


def test_a_checkpoint_of_a_model_alone_says_that_it_has_no_optimizer(tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path / "a", model)
    with pytest.raises(CheckpointError, match="found no param_groups in the checkpoint"):
        checkpoint.load(tmp_path / "a", model, optimizer)


def test_a_model_on_the_meta_device_is_told_what_to_do(tmp_path: Path) -> None:
    save_small(tmp_path / "a")
    kind = type(make()[0])
    with torch.device("meta"):
        model = kind()
    with pytest.raises(CheckpointError, match="is on the meta device; materialize it first"):
        checkpoint.load(tmp_path / "a", model)


def test_files_are_safetensors_that_any_reader_opens(tmp_path: Path) -> None:
    model, _ = save_small(tmp_path / "a")
    found = load_file(tmp_path / "a" / SHARD)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[f"model.{name}"], value), name
    assert torch.equal(found["extra.noise"], torch.ones(3))


def test_a_folder_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    save_small(tmp_path / "a")
    before = read_manifest(tmp_path / "a")
    model, _ = make(seed=1)
    with pytest.raises(CheckpointError, match="already exists, expected a new name"):
        checkpoint.save(tmp_path / "a", model)
    assert read_manifest(tmp_path / "a") == before


def test_no_pickle_is_written_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    save_small(tmp_path / "a")
    checkpoint.load(tmp_path / "a", *make(seed=1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_storage_serves_plain_dcp_too(tmp_path: Path) -> None:
    model, _ = make()
    state = {"model": {n: v for n, v in model.state_dict().items() if "extra" not in n}}
    dcp.save(state, storage_writer=Writer(tmp_path / "a"))
    found = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    dcp.load(found, storage_reader=Reader(tmp_path / "a"))
    for name, value in state["model"].items():
        assert torch.equal(found["model"][name], value), name
    with pytest.raises(dcp.api.CheckpointException, match=r"model\.x: is not a tensor"):
        dcp.save({"model": {"x": 1}}, storage_writer=Writer(tmp_path / "b"))
    with pytest.raises(dcp.api.CheckpointException, match="expected state under model"):
        dcp.save({"x": torch.ones(1)}, storage_writer=Writer(tmp_path / "b"))
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=Writer(tmp_path / "c"), planner=planner)
    with pytest.raises(dcp.api.CheckpointException, match="without enable_plan_caching"):
        dcp.save(state, storage_writer=Writer(tmp_path / "d"), planner=planner)


@pytest.mark.parametrize("saves", [checkpoint.save, checkpoint.async_save])
def test_frozen_parameters_are_left_out_where_asked(tmp_path: Path, saves: Any) -> None:
    def half_frozen(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = make(seed, steps=0)
        model.layers[0].requires_grad_(False)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        train(model, optimizer)
        return model, optimizer

    model, optimizer = half_frozen(0)
    handle = saves(tmp_path / "a", model, optimizer, ignore_frozen_params=True)
    if handle is not None:
        handle.result()
    saved = {entry.fqn for entry in read_manifest(tmp_path / "a").section("model")}
    assert "model.layers.2.weight" in saved
    assert not {name for name in saved if name.startswith("model.layers.0.")}

    other, its = half_frozen(1)
    before = other.layers[0].weight.clone()  # type: ignore[index,union-attr]
    with pytest.raises(CheckpointError, match="are not in the checkpoint"):
        checkpoint.load(tmp_path / "a", other, its)
    checkpoint.load(tmp_path / "a", other, its, ignore_frozen_params=True)
    assert torch.equal(other.layers[0].weight, before)  # type: ignore[index,union-attr]
    assert torch.equal(other.layers[2].weight, model.layers[2].weight)  # type: ignore[index,union-attr]
    assert torch.equal(*(each.state_dict()["state"][0]["exp_avg"] for each in (its, optimizer)))


@pytest.mark.parametrize(
    ("save", "name", "form"),
    [(save_file, "a.safetensors", "hf"), (torch.save, "a.pt", "torch")],
    ids=["hf", "torch"],
)
def test_a_checkpoint_of_another_format_is_refused_with_what_reads_it(
    tmp_path: Path, save: Callable[[dict[str, Any], Path], None], name: str, form: str
) -> None:
    model, path = nn.Linear(2, 2), tmp_path / name
    save(model.state_dict(), path)
    with pytest.raises(CheckpointError, match=rf"{name}: found .* \({form}\).*load_weights reads"):
        checkpoint.load(path, model)
    checkpoint.load_weights(path, model)


class _Counting(torch.optim.SGD):
    """Its states have dtypes of their own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param] = {
                "count": torch.full_like(param, 1001, dtype=torch.int64),
                "sum": torch.full_like(param, 1001, dtype=torch.float32),
                "last": torch.full_like(param, 1001),
            }


def test_states_keep_the_values_that_they_were_saved_with(tmp_path: Path) -> None:
    """Torch casts them to the dtype of the parameter, where 1001 is 1000."""
    half, full = nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2)
    for model in (half, full):
        optimizer = _Counting(model.parameters(), lr=0.1)
        optimizer.step()
        checkpoint.save(tmp_path / str(model.weight.dtype), model, optimizer)
    loaded = _Counting(half.parameters(), lr=0.1)
    expected = {"count": torch.int64, "sum": torch.float32, "last": torch.bfloat16}
    checkpoint.load(tmp_path / "torch.bfloat16", half, loaded)
    state = loaded.state[half.weight]
    assert {key: value.dtype for key, value in state.items()} == expected
    assert state["count"].unique().item() == state["sum"].unique().item() == 1001
    checkpoint.load(tmp_path / "torch.float32", half, loaded)
    state = loaded.state[half.weight]
    assert state["count"].unique().item() == 1001
    assert state["sum"].dtype == torch.bfloat16, "it had the dtype of its parameter, and has again"
