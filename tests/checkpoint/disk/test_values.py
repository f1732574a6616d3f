"""Values: plain Python values are JSON and come back exactly; trees come back from their leaves."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.strict import parse
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk.values import TUPLE, decode, encode, leaves, unflatten
from tests.checkpoint.tilings import QUICK

_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | _DTYPES
)
_KEYS = st.recursive(
    st.text() | st.integers() | st.booleans() | st.none() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=15,
)


def _exactly(one: Any, other: Any) -> bool:
    """Equal in value and type all through; ``nan`` equals ``nan``, and ``-0.0`` not ``0.0``."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(_exactly(a, b) for a, b in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_exactly, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return bool(one == other)


@QUICK
@given(value=_VALUES)
def test_a_value_comes_back_from_json_exactly(value: Any) -> None:
    text = json.dumps(encode(value, "v"), allow_nan=False).encode()
    assert _exactly(decode(parse(text, "f"), "f"), value)


class _Number(enum.IntEnum):
    ONE = 1


class _Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_Number.ONE, r"v: found .*\._Number, expected a tensor or a plain value"),
        (_Text("x"), r"v: found .*\._Text"),
        ({"a": [1, {2}]}, r"v\.a\[1\]: found builtins\.set"),
        ({1: object()}, r"v\[1\]: found builtins\.object"),
        (torch.ones(1), r"v: found torch\.Tensor"),
        (1j, r"v: found builtins\.complex"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_its_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(value, "v")


def test_nesting_is_limited_on_both_ways() -> None:
    value: Any = 1
    for _ in range(64):
        value = [value]
    assert decode(encode(value, "v"), "f") == value
    with pytest.raises(TypeError, match=r"v(\[0\])+: found more than 64 levels of nesting"):
        encode([value], "v")
    with pytest.raises(CheckpointError, match="f: found more than 64 levels of nesting"):
        decode([value], "f")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"$tuple": [], "b": 1}, r"found \$tuple beside other keys, expected it alone"),
        ({"$tuple": 1}, r"found '\$tuple', expected \$tuple, \$bytes"),
        ({"$pickle": "gASVAA=="}, r"found '\$pickle', expected"),
        ({"$bytes": "not base64!"}, "expected base64"),
        ({"$float": "1.0"}, r"found '\$float', expected"),
        ({"$dtype": "F31"}, r"found '\$dtype', expected"),
        ({"$items": [[1]]}, "expected a key and a value"),
        ({"$items": [[1, "a"], [1, "b"]]}, "found 1, expected each key once"),
        ({"$items": [[[1], "a"]]}, "expected a hashable key"),
        ([{"a": {"$float": "1"}}], "found"),
        (math.inf, r"expected a finite number, or \$float"),
    ],
)
def test_json_that_no_value_becomes_is_refused(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^f: .*{message}"):
        decode(value, "f")


def test_a_state_is_taken_apart_down_to_its_tensors() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    state = {"a": {"w": one, "lr": 0.1}, "rows": [one, [two]], "plain": [1, [2]], "none": None}
    found = dict(leaves(("extra",), state))
    assert list(found) == [
        ("extra", "a", "w"),
        ("extra", "a", "lr"),
        ("extra", "rows", 0),
        ("extra", "rows", 1, 0),
        ("extra", "plain"),
        ("extra", "none"),
    ]
    assert found["extra", "rows", 1, 0] is two
    assert found["extra", "plain"] == [1, [2]], "a list without tensors is one value"


#: One is refused: it tells tuples from lists.
_NAMES = st.text(min_size=1).filter(lambda key: key != TUPLE)
_TREES = st.dictionaries(
    _NAMES,
    st.recursive(
        st.integers().map(lambda n: torch.tensor(n % 7)) | st.integers() | st.lists(st.integers()),
        lambda inner: (
            st.dictionaries(_NAMES, inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


@QUICK
@given(tree=_TREES, data=st.data())
def test_a_tree_comes_back_from_its_leaves_in_any_order(tree: Any, data: st.DataObject) -> None:
    found = list(leaves(("extra",), tree))
    assert unflatten(data.draw(st.permutations(found)), "f") == {"extra": tree}


def test_what_is_no_tree_and_what_lacks_items_is_refused() -> None:
    assert list(leaves(("extra",), {})) == []
    for tree in ([1], {1: 2}, (torch.ones(1),)):
        with pytest.raises(TypeError, match=r"extra: found \w+, expected a dict with string keys"):
            list(leaves(("extra",), tree))
    with pytest.raises(CheckpointError, match=r"f: extra\.rows is a list with missing items"):
        unflatten([(("extra", "rows", 1), 1)], "f")
