"""The tools that see, check and save shards work on models that torch's own FSDP2 shards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import checkpoint
from shardwise.base.observe import Activity
from tests.harness import run_ranks
from tests.threads import run_threads
from tests.with_fsdp2.models import BLOCKS, WAYS, Way, batch, full, shard, train

each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def _run(fn: Any, way: Way, *args: Any) -> list[Any]:
    return run_threads(fn, 2 if len(way.shape) == 1 else 4, way, *args)


# -- who holds what --------------------------------------------------------------------------------


def _inspected(rank: int, world_size: int, way: Way) -> None:
    model = shard(way)
    report = shardwise.inspect(model)
    assert [each.name for each in report.parameters] == [n for n, _ in model.named_parameters()]
    assert report.numel == sum(p.numel() for p in model.parameters())
    assert {"0", "1", "2", ""} == {each.group for each in report.parameters}
    text = str(report)
    assert "up.weight" in text
    assert f"{sum(p.numel() for p in model.parameters()):,}" in text


@each_way
def test_inspect(way: Way) -> None:
    _run(_inspected, way)


# -- what happens in a step ------------------------------------------------------------------------


def _recorded(rank: int, world_size: int, way: Way) -> Counter[tuple[Activity, str]]:
    model = shard(way)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank, range(1))
    alone = shard(way)
    other = torch.optim.AdamW(alone.parameters())
    train(alone, other, rank, range(1))
    with shardwise.timeline.record(model=model) as recording:
        losses = train(model, optimizer, rank, range(1, 3))
    assert losses == train(alone, other, rank, range(1, 3)), "watching changes nothing"
    assert recording.timeline is not None
    spans = recording.timeline.ranks[0].spans
    assert all(span.end is not None for span in spans)
    return Counter((span.activity, span.name) for span in spans)


@each_way
def test_a_timeline_shows_what_each_group_does(way: Way) -> None:
    found = _run(_recorded, way)[0]
    steps, gathers = 2, 2 if way.reshard else 1
    for name in ["the root group", *map(str, range(BLOCKS))]:
        is_root = name == "the root group"
        assert found[Activity.FORWARD, name] == steps, name
        assert found[Activity.BACKWARD, name] == steps, name
        assert found[Activity.ALL_GATHER, name] == (steps if is_root else steps * gathers), name
        assert found[Activity.REDUCE_SCATTER, name] == steps, name
        assert found[Activity.ALL_REDUCE, name] == (steps if "replicate" in way.names else 0)
    assert found[Activity.OPTIMIZER, "AdamW"] == steps


def _accumulated(rank: int, world_size: int, way: Way) -> None:
    model, alone = shard(way), shard(way)
    with shardwise.timeline.record(model=model) as recording:
        for each in (model, alone):
            for micro in range(2):
                each.set_requires_gradient_sync(micro == 1)
                each(batch(rank, micro)).square().mean().backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())
    assert recording.timeline is not None
    spans = recording.timeline.ranks[0].spans
    kinds = Counter(span.activity for span in spans)
    assert kinds[Activity.REDUCE_SCATTER] == BLOCKS + 1
    assert kinds[Activity.BACKWARD] == 2 * (BLOCKS + 1)


def test_a_timeline_of_accumulated_gradients() -> None:
    _run(_accumulated, Way())


# -- checkpoints -----------------------------------------------------------------------------------


def _saved(rank: int, world_size: int, way: Way, folder: Path) -> None:
    model = shard(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank, range(2))
    checkpoint.async_save(folder / "later", model, optimizer, {"step": 2}).result()
    checkpoint.save(folder / "now", model, optimizer, {"step": 2})
    others = {"the same": (way, {})}
    others["freed"] = (Way(way.shape, way.names, not way.reshard, way.param_dtype), {})
    others["ours"] = (way, {"with_": shardwise.fully_shard})
    before = full(model)
    losses = train(model, optimizer, rank, range(2, 4))
    for name, (other, given) in others.items():
        for saved in ("now", "later"):
            again = shard(other, seed=1, **given)
            loaded = torch.optim.AdamW(again.parameters(), lr=0.5)
            assert checkpoint.load(folder / saved, again, loaded)["step"] == 2
            for key, value in full(again).items():
                assert torch.equal(value, before[key]), (name, key)
            found = train(again, loaded, rank, range(2, 4))
            assert found == pytest.approx(losses, rel=1e-2 if way.param_dtype else 1e-6), name


@each_way
def test_checkpoints_go_into_either_runtime(way: Way, tmp_path: Path) -> None:
    run_ranks(_saved, 2 if len(way.shape) == 1 else 4, way, tmp_path)


def _loaded_elsewhere(rank: int, world_size: int, folder: Path, way: Way, expected: Any) -> None:
    model = shard(Way((world_size,)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(folder, model, optimizer)
    for name, value in full(model).items():
        assert torch.equal(value, expected[name])


def _save(rank: int, world_size: int, way: Way, folder: Path) -> dict[str, torch.Tensor]:
    model = shard(way)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank, range(1))
    checkpoint.save(folder, model, optimizer)
    return full(model)


@each_way
def test_checkpoints_go_onto_other_numbers_of_ranks(way: Way, tmp_path: Path) -> None:
    expected = _run(_save, way, tmp_path / "saved")[0]
    run_ranks(_loaded_elsewhere, 3, tmp_path / "saved", way, expected)


# -- norms -----------------------------------------------------------------------------------------


def _clipped(rank: int, world_size: int, way: Way) -> None:
    model, other = shard(way), shard(way)
    for each in (model, other):
        each(batch(rank, 0)).square().mean().backward()
    norm: Any = shardwise.clip_grad_norm_(model.parameters(), 0.1)
    if "tp" in way.names:  # of which torch's cannot stack the norms
        grads = [p.grad.full_tensor() for p in other.parameters()]
        wanted = torch.stack([g.norm() for g in grads]).norm()
    else:
        found: Any = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        wanted = found.full_tensor()
    torch.testing.assert_close(norm.full_tensor() if hasattr(norm, "full_tensor") else norm, wanted)
    after = torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-3, atol=1e-5)
    assert dist.get_world_size() == world_size


@each_way
def test_gradients_are_clipped_over_several_meshes(way: Way) -> None:
    _run(_clipped, way)
