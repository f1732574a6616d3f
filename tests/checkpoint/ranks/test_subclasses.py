"""States that are tensor subclasses are saved, and come back exactly onto any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise import checkpoint, fully_shard
from shardwise._torch import c10d, dtensor
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.ranks.subclasses import SHARDS, put_together, taken_apart
from tests.checkpoint.blocked import BLOCK, Blocked
from tests.worlds import Ranks


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with torch.serialization.safe_globals([Blocked]):
        yield


def _full(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the same values in any world."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _state(rows: torch.Tensor) -> torch.Tensor:
    """A shard of a state: in blocks, if it can be divided into blocks."""
    return Blocked.of(rows) if rows.numel() and rows.numel() % BLOCK == 0 else rows.clone()


def _values(local: torch.Tensor) -> torch.Tensor:
    return local.values if isinstance(local, Blocked) else local


class _World:
    """A rank of a world that does not exist, and a parameter of it."""

    def __init__(self, full: torch.Tensor, size: int, rank: int, dim: int = 0) -> None:
        mesh = init_device_mesh("cpu", (size,))
        local = list(full.chunk(size, dim))
        local += [full.narrow(dim, 0, 0)] * (size - len(local))
        self.local = local[rank].contiguous()
        self.param = DTensor.from_local(
            self.local, mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride()
        )

    def sharded(self, local: torch.Tensor) -> DTensor:
        return dtensor.wrap_local(local, dtensor.spec_of(self.param))


def _save(full: torch.Tensor, size: int, dim: int = 0) -> dict[str, Any]:
    """What all ranks of a world save of a state."""
    shards = {}
    for rank in range(size):
        with c10d.fake_world(size, rank):
            world = _World(full, size, rank, dim)
            saved = taken_apart(world.sharded(_state(world.local)), plain_too=True)
            assert saved is not None
            shards |= saved[SHARDS]
    return {SHARDS: shards}


def _load(saved: dict[str, Any], full: torch.Tensor, size: int, dim: int = 0) -> list[torch.Tensor]:
    """The shards of all ranks of a world."""
    found = []
    for rank in range(size):
        with c10d.fake_world(size, rank):
            world = _World(full, size, rank, dim)
            found.append(dtensor.plain(put_together(saved, world.param, "the state")))
    return found


def _meant(full: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
    """The values that the shards of a world stand for."""
    return torch.cat([_values(_state(rows.contiguous())) for rows in full.chunk(size, dim)], dim)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_that_are_cut_as_before_are_what_they_were(size: int) -> None:
    full = _full((6, 4))
    for local, rows in zip(_load(_save(full, size), full, size), full.chunk(size), strict=True):
        expected = Blocked.of(rows)
        assert isinstance(local, Blocked)
        for name in ("codes", "scale", "table"):
            assert torch.equal(getattr(local, name), getattr(expected, name))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 3), (4, 6)])
@pytest.mark.parametrize("shape", [(12, 4), (12, 2, 4), (12, 8)])
def test_rows_of_whole_blocks_stay_in_blocks(
    before: int, after: int, shape: tuple[int, ...]
) -> None:
    full = _full(shape)
    shards = _load(_save(full, before), full, after)
    whole = Blocked.of(full)
    assert all(isinstance(local, Blocked) for local in shards)
    assert torch.equal(torch.cat([_values(local) for local in shards]), whole.values)
    assert torch.equal(torch.cat([local.scale for local in shards]), whole.scale)


def test_parts_that_all_shards_share_by_chance_are_not_mistaken() -> None:
    full = torch.zeros(8, 128)  # so the scales are equal, and as many as a table has elements
    [local] = _load(_save(full, 2), full, 1)
    assert isinstance(local, Blocked)
    assert local.scale.numel() == full.numel() // BLOCK
    assert local.table.numel() == 256


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [((6, 2), 2, 3), ((6, 2), 3, 2), ((8, 3), 2, 4), ((5, 4), 4, 3), ((7, 2), 3, 1)],
)
def test_blocks_that_are_divided_become_their_values(
    shape: tuple[int, ...], before: int, after: int
) -> None:
    full = _full(shape)
    shards = _load(_save(full, before), full, after)
    found = torch.cat([_values(local) for local in shards])
    assert torch.equal(found, _meant(full, before))


def test_shards_cut_along_columns_become_their_values() -> None:
    full = _full((4, 8))
    shards = _load(_save(full, 2), full, 2, dim=1)
    assert torch.equal(torch.cat(shards, 1), _meant(full, 2))


def test_values_are_not_rounded_to_the_dtype_of_a_parameter() -> None:
    full = _full((6, 2), torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"divides a block.*float32.*bfloat16"):
        _load(_save(full, 3), full, 2)


def test_ranks_without_rows_have_none() -> None:
    full = _full((2, 4))
    assert [local.numel() for local in _load(_save(full, 1), full, 4)] == [4, 4, 0, 0]


def test_an_unknown_class_is_named() -> None:
    full = _full((4, 4))
    saved = _save(full, 1)
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(CheckpointError, match=r"Blocked, which this program does not know"):
            _load(saved, full, 1)
    finally:
        torch.serialization.add_safe_globals(known)


@pytest.mark.parametrize("key", ["0:2", "0:9,0:4", "a:b,c:d", "all", "2:0,0:4"])
def test_shards_that_are_not_inside_are_refused(key: str) -> None:
    full = _full((4, 4))
    [shard] = _save(full, 1)[SHARDS].values()
    with pytest.raises(CheckpointError, match=r"the state: found shard|does not cover"):
        _load({SHARDS: {key: shard}}, full, 1)


def test_a_missing_shard_is_noticed() -> None:
    full = _full((4, 4))
    saved = _save(full, 2)
    del saved[SHARDS]["0:2,0:4"]
    with pytest.raises(CheckpointError, match="do not cover 0:4,0:4"):
        _load(saved, full, 1)


@pytest.mark.parametrize("missing", ["codes", "scale"])
def test_missing_parts_are_noticed(missing: str) -> None:
    full = _full((4, 4))
    saved = _save(full, 1)
    del saved[SHARDS]["0:4,0:4"]["parts"][missing]
    with pytest.raises(CheckpointError, match="does not accept what was saved of it"):
        _load(saved, full, 1)


# -- through shardwise.checkpoint ---------------------------------------------------------------

WEIGHTS = {"alike": (6, 4), "mixed": (5, 2)}  # on two ranks, 3 x 2 elements are no whole blocks


def _made(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in WEIGHTS.items()})
    if world_size > 1:
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> None:
    for param in model.parameters():
        rows = _full(tuple(param.shape)).chunk(world_size)[rank]
        local = _state(rows)
        state = local
        if isinstance(param, DTensor):
            state = dtensor.wrap_local(local, dtensor.spec_of(param))
        optimizer.state[param]["momentum_buffer"] = state


def _save_and_load(rank: int, world_size: int, folder: Path) -> None:
    with torch.serialization.safe_globals([Blocked]):
        model, optimizer = _made(world_size)
        _fill(model, optimizer, rank, world_size)
        checkpoint.save(folder / "saved", model, optimizer)
        checkpoint.async_save(folder / "saved-async", model, optimizer).result()
        for name in ("saved", "saved-async"):
            _, other = loaded = _made(world_size)
            checkpoint.load(folder / name, *loaded)
            for mine, its in zip(optimizer.state.values(), other.state.values(), strict=True):
                before, after = (dtensor.plain(each["momentum_buffer"]) for each in (mine, its))
                assert type(before) is type(after)
                assert torch.equal(_values(before), _values(after))


def test_a_checkpoint_has_them_and_any_world_loads_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_save_and_load, 2, tmp_path)
    model, optimizer = _made(1)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    for (name, param), kind in zip(model.named_parameters(), (Blocked, torch.Tensor), strict=True):
        state = optimizer.state[param]["momentum_buffer"]
        assert type(state) is kind, name
        assert torch.equal(_values(state), _meant(_full(tuple(param.shape)), 2))
