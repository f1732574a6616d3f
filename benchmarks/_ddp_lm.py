"""The decoder of ``diloco_sweep.py`` in torch's DistributedDataParallel, with its bf16 hook."""

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from _worlds import World, stop_server
from diloco_sweep import Contender, Settings, Training
from shardwise.app.recipes.text.data import load_text


def _hook(group: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Do what torch's hook does, which DDP refuses by its name without a GPU."""
    assert group is None
    return bf16_compress_hook(None, bucket)


class _Rank:
    """One host's training.

    Args:
        contender: of the inner optimizer.
        settings: of all hosts.
        dtype: of gradients on the wire: ``fp32``, or ``bf16`` with torch's hook.
    """

    def __init__(self, contender: Contender, settings: Settings, dtype: str) -> None:
        self._settings = settings
        self._nbytes = {"fp32": 4, "bf16": 2}[dtype]
        text = load_text((), settings.length)
        self._training = Training(contender, settings, 1, text, part=dist.get_rank())
        self._elements = self._training.model.read().shape[1]
        wrapped = DistributedDataParallel(self._training.model)
        if dtype == "bf16":
            wrapped.register_comm_hook(None, _hook)
        self._training.forward = wrapped

    def train(self) -> dict[str, Any]:
        """Train; return the losses of all seeds, and the bytes of gradients sent for one seed."""
        for step in range(self._settings.steps):
            self._training.step(step)
        ranks = dist.get_world_size()
        ring = 2 * (ranks - 1) / ranks  # gloo's all-reduce sends so many times the tensor
        return {"losses": self._training.judge(), "sent": ring * self._nbytes * self._elements}


def train_in_ddp(contender: Contender, settings: Settings, dtype: str) -> dict[str, Any]:
    """Train in one process for each host; return the figures.

    The bytes are those of a ring, counted and not measured. See :class:`_Rank` for the arguments.
    """
    began = time.perf_counter()
    with World("ddp", settings.replicas, _Rank, contender, settings, dtype, timeout=3600) as world:
        found: dict[str, Any] = world.call("train")[0]
    stop_server()
    return found | {"seconds": time.perf_counter() - began}
