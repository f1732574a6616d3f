"""Ranks on a grid are shown in row-major order, in lines that a page can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise._torch import c10d
from shardwise.insight.inspect.grid import Grid, Line, coordinates_in, grid_of, names_of, reachable

CUBE = Grid(("pp", "dp", "tp"), (2, 2, 3), tuple(range(12)))


def test_coordinates_are_in_row_major_order() -> None:
    assert CUBE.size == 12
    assert CUBE.coordinates[7] == (1, 0, 1)
    assert str(CUBE) == "pp=2 x dp=2 x tp=3"


def test_lines_of_a_cube_have_panels() -> None:
    assert list(CUBE.lines(8)) == [
        Line("pp 0", "0", (0, 1, 2)),
        Line("pp 0", "1", (3, 4, 5)),
        Line("pp 1", "0", (6, 7, 8)),
        Line("pp 1", "1", (9, 10, 11)),
    ]


def test_long_lines_are_broken() -> None:
    row = Grid(("dp",), (5,), tuple(range(5)))
    assert list(row.lines(2)) == [
        Line("", "0-1", (0, 1)),
        Line("", "2-3", (2, 3)),
        Line("", "4-4", (4,)),
    ]


def in_a_world(size: int, check: Callable[[], Any]) -> Any:
    with c10d.fake_world(size):
        return check()


def test_names_of_dimensions() -> None:
    def check() -> list[tuple[str, ...]]:
        named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        bare = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (2, 2, 1))]
        return [names_of(mesh) for mesh in (named, *bare)]

    assert in_a_world(4, check) == [
        ("a", "b"),
        ("shard",),
        ("replicate", "shard"),
        ("dim 0", "dim 1", "dim 2"),
    ]


def test_siblings_of_a_mesh_have_coordinates_too() -> None:
    def check() -> dict[int, tuple[int, ...]]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        return coordinates_in(mesh["dp"])

    assert in_a_world(6, check) == {0: (0,), 3: (1,), 1: (0,), 4: (1,), 2: (0,), 5: (1,)}


@pytest.mark.parametrize(
    ("used", "ranks", "shown"),
    [
        (("dp",), {0, 2}, "dp=2"),
        (("tp",), {0, 1}, "tp=2"),
        (("dp", "tp"), {0, 1, 2, 3}, "dp=2 x tp=2"),
    ],
)
def test_the_grid_has_the_dimensions_that_a_model_uses(
    used: tuple[str, ...], ranks: set[int], shown: str
) -> None:
    """Of a mesh of pipeline, data and tensor parallelism, from the view of rank 0."""

    def check() -> tuple[set[int], str]:
        root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        meshes: list[DeviceMesh] = [root[name] for name in used]
        found = reachable(meshes, 0)
        return found, str(grid_of(meshes, found))

    assert in_a_world(8, check) == (ranks, shown)


def test_ranks_on_no_common_mesh_are_numbered() -> None:
    def check() -> Grid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return grid_of([mesh], {0, 3})

    assert in_a_world(4, check) == Grid(("rank",), (2,), (0, 3))
