"""What runs next is what ran next last time; backward runs the other way round."""

from __future__ import annotations

from typing import Any, cast

from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import RunOrder


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def _groups(names: str) -> dict[str, ParamGroup]:
    return {name: cast(ParamGroup, _Named(name)) for name in names}


def _name(group: ParamGroup | None) -> str | None:
    return None if group is None else cast(Any, group).name


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
    for name in "ac":  # a forward that is over, its backward to come
        order.leave_forward(groups[name])
    order.begin_forward()
    for name in "ab":
        order.leave_forward(groups[name])
    order.abort_forward()

    assert _name(order.enter_backward(groups["c"])) == "a"
    assert order.enter_backward(groups["b"]) is None
