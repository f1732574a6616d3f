"""Boxes: the elements they have, where these are stored, and whether boxes cover a tensor."""

from __future__ import annotations

import math
import sys
from types import FrameType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.boxes import Box, boxes_of_span, is_tiling
from tests.checkpoint.tilings import QUICK, boxes_in, part_of, shapes, tilings


def _elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """The elements of a box, by their index in row-major order."""
    found: list[int] = part_of(torch.arange(math.prod(shape)).view(shape), box).flatten().tolist()
    return found


@QUICK
@given(shape=shapes, data=st.data())
def test_an_intersection_has_the_elements_of_both_and_its_place_in_each(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = one.intersection(other)
    expected = set(_elements(shape, one)) & set(_elements(shape, other))
    assert (set(_elements(shape, common)) if common else set()) == expected
    assert common == other.intersection(one)
    if common is None:
        return
    tensor = torch.arange(math.prod(shape)).view(shape)
    relative = common.relative_to(one.offsets)
    assert relative.is_inside(one.sizes)
    assert torch.equal(part_of(part_of(tensor, one), relative), part_of(tensor, common))


@QUICK
@given(shape=shapes, data=st.data())
def test_a_box_has_its_elements_in_runs_from_the_first_to_the_last(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    box = data.draw(boxes_in(shape))
    elements = _elements(shape, box)
    assert box.numel == len(elements)
    assert box.span(shape) == (min(elements), max(elements) + 1)
    runs = list(box.runs(shape))
    assert [each for first, count in runs for each in range(first, first + count)] == elements
    assert len(runs) == 1 or box.sizes != shape, "a full tensor is one run"


def test_an_empty_box_has_no_span_and_no_elements() -> None:
    box = Box((2, 1), (0, 3))
    assert (box.numel, box.span((4, 4))) == (0, (0, 0))


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        (Box((0, 0), (2, 3)), True),
        (Box((1, 2), (1, 1)), True),
        (Box((2, 0), (0, 3)), True),
        (Box((2, 0), (1, 3)), False),
        (Box((0, -1), (1, 1)), False),
        (Box((0, 3), (1, -1)), False),
        (Box((0,), (1,)), False),
    ],
)
def test_a_box_is_inside_a_tensor_or_is_not(box: Box, inside: bool) -> None:
    assert box.is_inside((2, 3)) is inside


def test_a_span_is_the_boxes_of_the_picture() -> None:
    #   . . # # #     elements 2 .. 15 of 4 x 5
    #   # # # # #
    #   # # # # #
    #   # . . . .
    assert list(boxes_of_span((4, 5), 2, 16)) == [
        Box((0, 2), (1, 3)),
        Box((1, 0), (2, 5)),
        Box((3, 0), (1, 1)),
    ]


@given(shape=shapes, data=st.data())
def test_the_boxes_of_a_span_are_its_elements_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(first, numel))
    boxes = list(boxes_of_span(shape, first, end))
    elements = torch.arange(numel).view(shape)
    found = [part_of(elements, box).flatten() for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(first, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("boxes", "shape", "fills"),
    [
        ([Box((0, 0), (2, 3))], (2, 3), True),
        ([Box((0, 0), (1, 3)), Box((1, 0), (1, 3))], (2, 3), True),
        ([Box((0, 0), (2, 1)), Box((0, 1), (1, 2)), Box((1, 1), (1, 2))], (2, 3), True),
        ([Box((), ())], (), True),
        ([], (0, 3), True),
        ([], (), False),
        ([], (2,), False),
        ([Box((0,), (1,)), Box((0,), (1,))], (2,), False),
        ([Box((0,), (2,)), Box((1,), (1,))], (3,), False),
        ([Box((), ()), Box((), ())], (), False),
    ],
)
def test_boxes_cover_a_tensor_or_do_not(
    boxes: list[Box], shape: tuple[int, ...], fills: bool
) -> None:
    assert is_tiling(boxes, shape) is fills


def test_boxes_may_be_cut_in_any_way() -> None:
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    boxes = [Box(offsets, sizes) for offsets, sizes in pinwheel]
    assert is_tiling([*boxes, Box((1, 1), (1, 1))], (3, 3))
    assert not is_tiling([*boxes, Box((0, 0), (1, 1))], (3, 3)), "a gap, and an overlap as large"


def test_checking_boxes_takes_work_in_proportion_to_them() -> None:
    def cut(count: int) -> tuple[list[Box], tuple[int, ...]]:
        """Cuts within cuts, in the last two of many dimensions."""
        lead = (1,) * 20
        boxes, left = [], [0, 0]
        for depth in range(15):
            dim = depth % 2
            sizes = [count - left[0], count - left[1]]
            sizes[dim] = 1
            boxes.append(Box((0,) * 20 + tuple(left), (*lead, *sizes)))
            left[dim] += 1
        rest = count - left[0], count - left[1]
        boxes += [
            Box((*(0,) * 20, left[0] + row, left[1]), (*lead, 1, rest[1])) for row in range(rest[0])
        ]
        return boxes, (*lead, count, count)

    boxes, shape = cut(400)
    calls = 0

    def count_calls(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_calls)
    try:
        assert is_tiling(boxes, shape)
    finally:
        sys.setprofile(None)
    assert calls < 5 * len(boxes) * len(shape)


@QUICK
@given(shape=shapes, data=st.data())
def test_any_tiling_covers_and_no_part_of_it_does(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(tilings(shape))
    assert is_tiling(boxes, shape)
    at = data.draw(st.integers(0, len(boxes) - 1))
    assert not is_tiling(boxes[:at] + boxes[at + 1 :], shape), "a gap"
    assert not is_tiling([*boxes, boxes[at]], shape), "an overlap"


@QUICK
@given(shape=shapes, data=st.data())
def test_boxes_cover_where_each_element_is_in_one(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """As many elements as the tensor has, in boxes that may overlap and leave gaps."""
    boxes = data.draw(tilings(shape))
    box = boxes[0]
    moves = [
        Box((*box.offsets[:dim], 0, *box.offsets[dim + 1 :]), box.sizes)
        for dim in range(len(shape))
    ]
    boxes[0] = data.draw(st.sampled_from([box, *moves]))
    counts = torch.zeros(shape)
    for each in boxes:
        part_of(counts, each).add_(1)
    assert is_tiling(boxes, shape) is bool((counts == 1).all())
