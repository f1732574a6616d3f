"""Inputs and outputs of modules are trees of tensors; other leaves and identities survive."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardwise.sharding.tree import map_tensors, tensors_and_those_in_objects

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    value: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class FrozenBox:
    value: Any


def _one() -> torch.Tensor:
    return torch.ones(2)


TREES: dict[str, Any] = {
    "tensor": _one(),
    "tuple": (_one(), 3, "text", None),
    "list": [_one(), [_one(), (_one(),)]],
    "dict": {"a": _one(), "b": {"c": [_one()]}},
    "ordered dict": OrderedDict(first=_one(), second=5),
    "named tuple": Pair(_one(), Pair(_one(), 1)),
    "dataclass": Box(_one()),
    "frozen dataclass": FrozenBox([_one()]),
    "packed sequence": pack_sequence([_one(), torch.ones(1)]),
    "model output": CausalLMOutputWithPast(loss=_one(), logits=_one()),
}


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    found, inside = tensors_and_those_in_objects(tree)
    return found + inside


@pytest.mark.parametrize("name", TREES)
def test_every_tensor_is_mapped_and_types_are_kept(name: str) -> None:
    tree = TREES[name]
    floats = [t for t in _tensors_in(tree) if t.is_floating_point()]
    assert floats

    mapped = map_tensors(lambda t: t * 2 if t.is_floating_point() else t, tree)

    assert type(mapped) is type(tree)
    doubled = [t for t in _tensors_in(mapped) if t.is_floating_point()]
    assert len(doubled) == len(floats)
    for new, old in zip(doubled, floats, strict=True):
        assert torch.equal(new, old * 2), "the caller's own tree must not change"


@pytest.mark.parametrize("name", TREES)
def test_a_tree_without_changes_is_returned_as_it_is(name: str) -> None:
    tree = TREES[name]
    assert map_tensors(lambda t: t, tree) is tree


def test_other_values_pass_through() -> None:
    mapped = map_tensors(
        lambda t: t + 1, {"x": _one(), "mode": "train", "n": 3, "box": Box(_one())}
    )
    assert (mapped["mode"], mapped["n"], mapped["box"].note) == ("train", 3, "kept")


def test_model_outputs_agree_by_key_and_by_attribute() -> None:
    output = map_tensors(lambda t: t + 1, CausalLMOutputWithPast(loss=_one(), logits=_one()))
    assert torch.equal(output.loss, output["loss"])
    assert output.loss[0] == 2
