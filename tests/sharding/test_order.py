"""What runs next is what ran next last time; backward runs the other way round."""

from __future__ import annotations

from typing import Any, cast

from shardwise.sharding.group import ParamGroup
from shardwise.sharding.order import RunOrder


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def _groups(names: str) -> dict[str, ParamGroup]:
    return {name: cast(ParamGroup, _Named(name)) for name in names}


def _name(group: ParamGroup | None) -> str | None:
    return None if group is None else cast(Any, group).name


def _forward(order: RunOrder, groups: dict[str, ParamGroup], names: str) -> list[str | None]:
    order.begin_forward()
    expected = [_name(order.enter_forward(groups[name])) for name in names]
    order.end_forward()
    return expected


def test_the_first_forward_expects_nothing_and_the_second_follows_it() -> None:
    order, groups = RunOrder(), _groups("abc")
    assert _forward(order, groups, "abc") == [None, None, None]
    assert _forward(order, groups, "abc") == ["b", "c", None]


def test_another_order_ends_the_expectations_of_this_forward_only() -> None:
    order, groups = RunOrder(), _groups("abc")
    _forward(order, groups, "abc")
    assert _forward(order, groups, "acb") == ["b", None, None]
    assert _forward(order, groups, "acb") == ["c", "b", None]


def test_a_shorter_and_a_longer_forward() -> None:
    order, groups = RunOrder(), _groups("abc")
    _forward(order, groups, "ab")
    assert _forward(order, groups, "abc") == ["b", None, None]
    assert _forward(order, groups, "a") == ["b"]


def test_backward_is_the_reverse_with_multiplicity() -> None:
    order, groups = RunOrder(), _groups("ab")
    for name in "aba":  # a runs twice
        order.leave_forward(groups[name])

    assert [_name(order.enter_backward(groups[name])) for name in "aba"] == ["b", "a", None]


def test_a_second_backward_through_one_forward_expects_nothing() -> None:
    order, groups = RunOrder(), _groups("ab")
    for name in "ab":
        order.leave_forward(groups[name])
    order.enter_backward(groups["b"])
    assert order.enter_backward(groups["b"]) is None


def test_nothing_is_kept_after_a_backward() -> None:
    order, groups = RunOrder(), _groups("ab")
    order.leave_forward(groups["a"])
    order.end_backward()
    assert order.enter_backward(groups["a"]) is None


def test_a_forward_that_raised_leaves_no_trace() -> None:
    order, groups = RunOrder(), _groups("abc")
    _forward(order, groups, "abc")
    order.leave_forward(groups["a"])  # a forward that is over, its backward to come
    order.begin_forward()
    for name in "ab":
        order.enter_forward(groups[name])
        order.leave_forward(groups[name])
    order.abort_forward()

    assert _forward(order, groups, "abc") == ["b", "c", None], "what it expected before"
    order.leave_forward(groups["c"])
    assert _name(order.enter_backward(groups["c"])) == "a"
    assert order.enter_backward(groups["b"]) is None
