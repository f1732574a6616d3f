"""A program as users write it: it passes ``mypy --strict``, and trains on two ranks.

Not a test of pytest's: ``wheel.py`` has mypy check it against the installed wheel, and runs it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import FSDPModule, checkpoint, fully_shard
from shardwise.diloco import OuterSGD


def main() -> None:
    """Shard, train one accumulated step, and save."""
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=True)
    sharded: FSDPModule = fully_shard(model)
    fully_shard(nn.Linear(8, 8)).set_requires_gradient_sync(False)

    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    for last in (False, True):
        sharded.set_requires_gradient_sync(last)
        loss: torch.Tensor = model(torch.randn(4, 8)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
    norm: torch.Tensor = shardwise.clip_grad_norm_(model.parameters(), max_norm=1.0)
    assert norm.isfinite()
    optimizer.step()

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save(checkpoint.step_folder(folder[0], 1), model, optimizer, {"step": 1})
    newest: Path | None = checkpoint.latest(folder[0])
    assert newest is not None
    extra = checkpoint.load(newest, model, optimizer)
    assert extra["step"] == 1
    assert checkpoint.latest("runs/lm") is None

    momentum: float = OuterSGD(momentum=0.9).momentum
    version: str = shardwise.__version__
    if dist.get_rank() == 0:
        print(f"shardwise {version}, outer momentum {momentum}")
        print("trained")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
