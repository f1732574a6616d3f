"""The running statistics of batch norm, which are not sharded, made the same on all ranks.

In training every rank normalises by the statistics of its own part of the batch, and moves its
running mean and variance towards them. So ranks drift apart. Here they are averaged after every
step: since a running value is a linear function of what it was moved by, it is then the one that
would have been moved by the mean over ranks. All data count, and evaluations and checkpoints see
the same values on every rank. (DDP takes those of rank 0, and so of one part of the data.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardwise.transport.peers import naming_lost_peer

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """The batch norms of a model that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]


class RunningStatistics:
    """The running means and variances of a model.

    Args:
        model: what has batch norms, or none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @torch.no_grad()
    def average(self) -> None:
        """Average over all ranks of the default process group. Every rank calls it."""
        # Asked each time: materialising a model replaces its buffers.
        mine = [
            value
            for norm in batch_norms(self._model)
            for value in (norm.running_mean, norm.running_var)
            if value is not None
        ]
        if not mine or dist.get_world_size() == 1:
            return
        flat = torch.cat([value.flatten() for value in mine])
        with naming_lost_peer(None, "the average of running statistics"):
            dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for value, part in zip(mine, torch.split(flat, [v.numel() for v in mine]), strict=True):
            value.copy_(part)
