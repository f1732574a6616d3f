"""State: what a process has to save, by name; and what is recorded about its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk.entries import TensorEntry
from shardwise.checkpoint.ranks.optimizer import optimizer_tree, parameter_names
from shardwise.checkpoint.ranks.optimizer_loading import destinations, load_optimizer_tree
from shardwise.checkpoint.ranks.saving import Handle, copies
from shardwise.checkpoint.ranks.state import (
    check_same_names,
    check_tensor,
    facts_of,
    state_of,
    ties,
)
from tests.checkpoint.small import make


def test_tensors_share_memory_and_values_are_copied() -> None:
    model, optimizer = make()
    extra: dict[str, Any] = {"rows": [torch.ones(2), 3], "seen": [1]}
    state = state_of(model, optimizer, extra)
    weight = state.tensors["model.layers.0.weight"]
    assert weight.data_ptr() == model.layers[0].weight.data_ptr()
    assert "optimizer.state.layers.0.weight.exp_avg" in state.tensors
    assert state.origins["extra.rows.0"].path == ("extra", "rows", 0)
    extra["seen"].append(2)
    values = {value.path: value.value for value in state.values}
    assert values["extra", "seen"] == [1], "training goes on while it is written"
    assert values["extra", "rows", 1] == 3


def test_a_tensor_that_can_be_saved_is_returned() -> None:
    tensor = torch.ones(2, 3).T
    assert check_tensor(tensor, "x") is tensor


def test_ties_are_recorded_by_the_first_name() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    model["c"].weight = model["a"].weight
    names = ["a.weight", "c.weight"]
    assert ties(model) == dict.fromkeys(names, names)
    facts = facts_of(model)
    assert (facts.strategy, facts.tied, facts.config) == ("", {"c.weight": "a.weight"}, {})


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ('{"model_type": "llama", "n": 1}', {"model_type": "llama", "n": 1}),
        ('{"n": 1}', {}),
        ("[]", {}),
        ("not JSON", {}),
        ('{"model_type": "llama", "n": NaN}', {}),
    ],
)
def test_a_configuration_is_recorded_if_transformers_could_read_it(
    text: str, recorded: dict[str, Any]
) -> None:
    class Config:
        def to_json_string(self) -> str:
            return text

    model = nn.Linear(1, 1)
    model.config = Config()  # type: ignore[assignment]
    assert facts_of(model).config == recorded


def test_names_that_differ_are_listed_in_short() -> None:
    check_same_names("f", set(), set())
    with pytest.raises(
        CheckpointError, match=r"^f: is of another model: a, b, c and 2 more are not"
    ):
        check_same_names("f", set("abcde"), set())
    with pytest.raises(
        CheckpointError, match=r"a is not in the checkpoint; b is not in the model$"
    ):
        check_same_names("f", {"a"}, {"b"})


def _trained(groups: list[list[int]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers; the optimizer has their parameters in groups, by number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [params[i] for i in group], "lr": 0.1 * (1 + min(group))} for group in groups]
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_state_of_an_optimizer_finds_its_parameters_in_any_order() -> None:
    model, optimizer = _trained([[0, 2], [1, 3]])
    names = parameter_names(model, model.state_dict())
    tree = optimizer_tree(optimizer, names)
    assert [group["params"] for group in tree["param_groups"]] == [
        ["0.weight", "1.weight"],
        ["0.bias", "1.bias"],
    ]
    other, loaded = _trained([[3, 1], [2, 0]])
    load_optimizer_tree(loaded, parameter_names(other, other.state_dict()), tree)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], loaded.state[its]["exp_avg"])
    assert [group["lr"] for group in loaded.param_groups] == [0.2, 0.1]


def test_an_optimizer_with_other_groups_or_parameters_is_refused() -> None:
    model, optimizer = _trained([[0, 2], [1, 3]])
    names = parameter_names(model, model.state_dict())
    tree = optimizer_tree(optimizer, names)
    other, loaded = _trained([[0, 1], [2, 3]])
    with pytest.raises(CheckpointError, match=r"no group among the 2 saved ones"):
        load_optimizer_tree(loaded, parameter_names(other, other.state_dict()), tree)
    for groups in (None, [{"params": [0]}], [1]):
        with pytest.raises(CheckpointError, match=r"param_groups"):
            load_optimizer_tree(optimizer, names, {"param_groups": groups})
    with pytest.raises(ValueError, match=r"after sharding"):
        optimizer_tree(loaded, names)


def test_saved_state_is_read_into_the_optimizers_own_or_into_its_likeness() -> None:
    model, optimizer = _trained([[0, 1, 2, 3]])
    names = parameter_names(model, model.state_dict())
    fresh = torch.optim.AdamW(model.parameters())

    def entry(name: str, key: str, shape: tuple[int, ...], dtype: str = "F32") -> TensorEntry:
        return TensorEntry(("optimizer", "state", name, key), shape, dtype, "", "", ())

    entries = [
        entry("0.weight", "exp_avg", (2, 3)),
        entry("0.weight", "step", ()),
        entry("0.weight", "row", (2,), "F64"),
    ]
    held = optimizer.state[model[0].weight]
    assert destinations(optimizer, names, entries)(entries[0]) is held["exp_avg"]
    find = destinations(fresh, names, entries)
    made = [tensor for each in entries if (tensor := find(each)) is not None]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in made] == [
        ((2, 3), torch.float32),
        ((), torch.float32),
        ((2,), torch.float64),
    ]
    with pytest.raises(CheckpointError, match=r"gone.*the optimizer has no parameter of this name"):
        find(entry("gone", "exp_avg", (2,)))


def test_copies_are_of_their_own_and_shared_where_tensors_are() -> None:
    weight = torch.arange(6.0).view(2, 3)
    made = copies({"a": weight, "b": weight, "t": weight.T, "empty": torch.empty(0)})
    assert made["a"] is made["b"]
    weight.zero_()
    assert made["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert made["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert made["t"].is_contiguous()


def test_an_error_in_the_background_is_reported_once(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("full")

    handle = Handle(fail, tmp_path / "a")
    handle.start()
    with pytest.raises(CheckpointError, match=r"^full$") as caught:
        handle.result(timeout=10)
    assert isinstance(caught.value.__cause__, OSError)
    handle.join()
    assert handle.done()
    unreported = Handle(fail, tmp_path / "b")
    unreported.start()
    with pytest.raises(CheckpointError, match=r"^full$"):
        unreported.join()
    known = Handle(fail, tmp_path / "c")
    known.start()
    known.mark_reported()
    known.join()
