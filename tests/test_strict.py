"""Strict JSON: as Python reads it where it is JSON, and refused with its place where it is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.strict import (
    MAX_DEPTH,
    MAX_INT,
    Collisions,
    Fields,
    check_depth,
    check_number,
    check_shape,
    check_text,
    parse,
    shorten,
)
from shardwise.checkpoint import CheckpointError
from tests.checkpoint.tilings import QUICK

_SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
_JSON = st.recursive(
    _SCALARS.filter(lambda x: not isinstance(x, float) or math.isfinite(x)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@QUICK
@given(value=_JSON)
def test_json_is_parsed_as_python_parses_it(value: Any) -> None:
    assert parse(json.dumps(value).encode(), "f") == value


@QUICK
@given(text=st.binary(max_size=40) | st.text(alphabet='[]{}",:1eNa ', max_size=30).map(str.encode))
def test_any_bytes_are_parsed_or_refused(text: bytes) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = ...
    try:
        found = parse(text, "f")
    except CheckpointError:
        return  # also what Python accepts, but is not JSON
    assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{} {}", "is not valid JSON"),
        (b"[1,]", "is not valid JSON"),
        (b"\xef\xbb\xbf{}", "is not valid JSON"),
        (b"NaN", "found the number NaN"),
        (b"[-Infinity]", "found the number -Infinity"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "found the key 'c' twice in one object"),
        (b"1" * 5000, "is not valid JSON"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "is nested too deeply"),
        (b"[" * 10**5, "is nested too deeply"),
        (b"[" + b"[]," * 2**21 + b"[]]", "takes up to .* bytes in memory"),
    ],
    ids=lambda value: value[:20].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_what_python_accepts_beyond_json_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^f: .*{message}"):
        parse(text, "f")


@pytest.mark.parametrize("deep", [[], {}])
def test_the_deepest_nesting_is_accepted_and_one_more_is_not(deep: Any) -> None:
    value = deep
    for _ in range(MAX_DEPTH - 1):
        value = [value] if isinstance(deep, list) else {"k": value}
    check_depth(value, "f")
    with pytest.raises(CheckpointError, match="found more than 200 levels"):
        check_depth([value], "f")


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda f: f.any("k"), ..., r"^f, entry: has no 'k'"),
        (lambda f: f.text("k"), 1, "found 1, expected a string"),
        (lambda f: f.text("k"), "a\x1b[2J", "expected printable characters"),
        (lambda f: f.text("k"), "\ud800", "expected printable characters"),
        (lambda f: f.number("k"), True, "found True, expected an integer from 0"),
        (lambda f: f.number("k"), 1.0, "found 1.0, expected an integer"),
        (lambda f: f.number("k"), -1, "found -1, expected an integer"),
        (lambda f: f.number("k"), MAX_INT + 1, "expected an integer from 0"),
        (lambda f: f.number("k", least=2, most=3), 4, "expected an integer from 2 to 3"),
        (lambda f: f.real("k"), -0.5, "expected a finite number, 0 or more"),
        (lambda f: f.real("k"), math.inf, "expected a finite number"),
        (lambda f: f.real("k"), math.nan, "expected a finite number"),
        (lambda f: f.real("k"), "1", "expected a finite number"),
        (lambda f: f.numbers("k", 3), [1, 2, 3, 4], "found '4 items', expected at most 3"),
        (lambda f: f.numbers("k", 3), [1, -2], "found -2, expected an integer"),
        (lambda f: f.numbers("k", 3), [1, True], "found True, expected an integer"),
        (lambda f: f.numbers("k", 3), "12", "expected a list"),
        (lambda f: f.items("k", 3), {"0": 1}, "found dict of 1, expected a list"),
        (lambda f: f.object("k"), [1], "found list of 1, expected an object"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_its_name(
    read: Callable[[Fields], Any], value: Any, message: str
) -> None:
    fields = Fields({} if value is ... else {"k": value}, "f, entry")
    with pytest.raises(CheckpointError, match=message) as caught:
        read(fields)
    assert "'k'" in str(caught.value)


def test_fields_of_the_right_type_are_returned() -> None:
    fields = Fields({"t": "é", "n": 3, "r": 2, "l": [1, 0], "i": ["a", {}], "o": {"x": 1}}, "f")
    assert (fields.text("t"), fields.number("n"), fields.real("r")) == ("é", 3, 2.0)
    assert (fields.numbers("l", 2), fields.items("i", 2)) == ((1, 0), ["a", {}])
    assert fields.object("o") == {"x": 1}
    assert list(fields.all()) == ["t", "n", "r", "l", "i", "o"]
    for other in ([], "t", None, 1):
        with pytest.raises(CheckpointError, match=r"^f: found .*, expected an object"):
            Fields(other, "f")


def test_numbers_texts_and_shapes_that_are_possible_pass() -> None:
    assert check_number(0, "f") == 0
    assert check_number(MAX_INT, "f") == MAX_INT
    assert check_text("layers.0.weight", "f") == "layers.0.weight"
    check_shape((2**20, 2**20), 4, "f")
    for shape in ((2**62, 4), (0, 2**63), (2**40, 2**40)):  # strides count in an empty one too
        with pytest.raises(CheckpointError, match=r"f, bytes of shape \["):
            check_shape(shape, 4, "f")


def test_keys_with_one_hash_are_refused_before_they_slow_a_dict() -> None:
    prime = 2**61 - 1  # Python's hash of an integer is its remainder
    collisions = Collisions("f")
    for i in range(16):
        collisions.check(i * prime)
    with pytest.raises(CheckpointError, match="found '17 keys with the same hash'"):
        collisions.check(16 * prime)
    for _ in range(100):
        collisions.check("the same string")
    with pytest.raises(TypeError):
        collisions.check([])


@QUICK
@given(value=_JSON)
def test_a_value_in_a_message_is_short(value: Any) -> None:
    assert len(shorten(value)) <= 80


def test_a_huge_or_recursive_value_is_shortened_at_once() -> None:
    node: Any = []
    for _ in range(100):
        node = [node] * 10
    assert shorten(node) == "list of 10"
    assert shorten(10**5000) == "a huge number"
    assert shorten("x" * 10**6).endswith("...")
