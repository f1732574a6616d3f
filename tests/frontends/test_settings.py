"""Arguments of the wrappers become a mesh and settings; those without effect are reported."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from shardwise.frontends.settings import (
    UnitSettings,
    check_device,
    find_mesh,
    warn_without_effect,
)
from shardwise.frontends.strategies import Strategy
from tests.worlds import on_threads

Threads = Callable[..., list[Any]]

TABLE = {"flat": ((False, None), "never flattened"), "bucket": ((0, None), "packed anyway")}


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_arguments_that_ask_for_what_happens_anyway_are_silent() -> None:
    with no_warning():
        warn_without_effect({"flat": False, "bucket": 0, "other": 5}, TABLE, stacklevel=1)
        warn_without_effect({"flat": None, "bucket": None}, TABLE, stacklevel=1)


def test_arguments_without_effect_are_named_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="^flat: never flattened$") as caught:
        warn_without_effect({"flat": True, "bucket": 0}, TABLE, stacklevel=1)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="^bucket: packed anyway$"):
        warn_without_effect({"flat": False, "bucket": 64}, TABLE, stacklevel=1)


@on_threads(4)
def test_every_way_to_name_ranks_gives_a_mesh(rank: int, world_size: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full, none, hybrid = Strategy.FULL_SHARD, Strategy.NO_SHARD, Strategy.HYBRID_SHARD
    assert find_mesh(full, None, one) is one
    assert find_mesh(hybrid, None, two) is two
    assert find_mesh(none, None, one).shape == (4, 1), "all ranks replicate"
    assert find_mesh(full, world, None).mesh.tolist() == [0, 1, 2, 3]
    assert find_mesh(none, world, None).mesh.tolist() == [[0], [1], [2], [3]]
    groups = (two.get_group("shard"), two.get_group("replicate"))
    assert find_mesh(hybrid, groups, None).mesh.tolist() == [[0, 1], [2, 3]]
    assert find_mesh(full, None, None) is find_mesh(full, None, None), "wrappers share one mesh"
    with pytest.raises(ValueError, match="FULL_SHARD expects a 1-D mesh, found 2 dimensions"):
        find_mesh(full, None, two)
    with pytest.raises(ValueError, match=r"NO_SHARD .* expects a shape of \(N, 1\), found \(2, 2"):
        find_mesh(none, None, two)
    with pytest.raises(ValueError, match="HYBRID_SHARD expects two process groups, found one"):
        find_mesh(hybrid, world, None)
    with no_warning():
        check_device(None, one, stacklevel=1)
        check_device(torch.device("cpu"), one, stacklevel=1)
    settings = UnitSettings(ShardingStrategy.FULL_SHARD, one, None, MixedPrecision())
    assert copy.deepcopy(settings) is settings, "a copy of a model is on the same ranks"
    assert settings.device == torch.device("cpu")


@on_threads(1)
def test_device_numbers_have_no_effect_on_cpus(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.warns(UserWarning, match="device_id: 3 has no effect where ranks compute on the"):
        check_device(3, mesh, stacklevel=1)
