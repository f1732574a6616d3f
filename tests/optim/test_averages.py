"""``AveragedModel`` of torch keeps the averages of a sharded model in shards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from tests.sharding.nets import Net, batches, run_backward, seeded, sharded_net, step_all
from tests.worlds import on_threads


@on_threads(2)
def test_averages_are_sharded_and_are_those_of_the_whole_model(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    net, whole = sharded_net(), seeded(Net)
    mine, theirs = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for model in (net, whole)
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, whole)]
    for step in range(3):
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
        step_all(optimizers)
        mine.update_parameters(net)
        theirs.update_parameters(whole)
    for average, p in zip(mine.module.parameters(), net.parameters(), strict=True):
        assert isinstance(average, DTensor)
        assert isinstance(p, DTensor)
        assert average.to_local().shape == p.to_local().shape
    x = batches(1, 9)[0]
    torch.testing.assert_close(mine(x), theirs(x))
    shardwise.checkpoint.save(tmp_path / "averages", mine.module)
    loaded = sharded_net()
    shardwise.checkpoint.load(tmp_path / "averages", loaded)
    torch.testing.assert_close(loaded(x), theirs(x))
