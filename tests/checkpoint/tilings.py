"""Random shapes and tilings for property tests."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shardwise.base.boxes import Box, full_box

QUICK = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def tilings(draw: Any, shape: tuple[int, ...], most: int = 4) -> list[Box]:
    """Boxes that cover a tensor exactly, in any order: the full box, cut up to ``most`` times."""
    boxes = [full_box(shape)]
    for _ in range(draw(st.integers(0, most))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if not shape or box.sizes[dim] < 2:
            boxes.append(box)
            continue
        at = draw(st.integers(1, box.sizes[dim] - 1))
        boxes += [_cut(box, dim, 0, at), _cut(box, dim, at, box.sizes[dim] - at)]
    return draw(st.permutations(boxes))  # type: ignore[no-any-return]


def _cut(box: Box, dim: int, first: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += first
    sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def boxes_in(draw: Any, shape: tuple[int, ...]) -> Box:
    """A box of at least one element inside a tensor."""
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(
        offsets, tuple(draw(st.integers(1, n - a)) for a, n in zip(offsets, shape, strict=True))
    )


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box of a tensor, made independently of the package."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
