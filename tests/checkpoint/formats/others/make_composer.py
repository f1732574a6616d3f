"""Writes checkpoints with Composer: on each rank, ``python make_composer.py FOLDER``.

Needs mosaicml 0.32.1 and torch 2.13.0; runs on CPUs.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torchmetrics.image  # noqa: F401  # looks for torchvision, too

for name in ("", ".transforms", ".datasets", ".utils", ".models", ".ops"):
    sys.modules[f"torchvision{name}"] = MagicMock()  # has no build for CPUs; images are not needed
import torch
import torch.distributed as dist
from composer.checkpoint.save import save_checkpoint_to_disk
from composer.core import State
from composer.devices import DeviceCPU
from composer.models import ComposerModel
from composer.utils import FSDPConfig, ParallelismConfig
from composer.utils import checkpoint as files
from net import Net, batches, groups
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(scalar=False)

    def forward(self, batch: Any) -> Any:
        return self.net(batch)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return outputs


folder = Path(sys.argv[1])
dist.init_process_group("gloo")
model = Model()
model.net = FullyShardedDataParallel(model.net, use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(groups(model), lr=0.01)
for tokens in batches():
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()

for kind in ("sharded", "full"):
    state = State(
        model=model,
        rank_zero_seed=7,
        run_name="small",
        device=DeviceCPU(),
        optimizers=optimizer,
        parallelism_config=ParallelismConfig(fsdp=FSDPConfig(state_dict_type=kind)),
    )
    state.schedulers = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    rank = dist.get_rank() if kind == "sharded" else 0
    name = f"__{rank}_0.distcp" if kind == "sharded" else "ep0-ba2-rank0.pt"
    files.save_checkpoint(state, str(folder / kind / name))
    files.save_checkpoint(
        state, str(folder / f"{kind}-weights" / name.replace("distcp", "pt")), weights_only=True
    ) if kind == "full" else None
    save_checkpoint_to_disk(
        str(folder / f"{kind}-parts"), state, {"sharded_checkpoint": kind == "sharded"}
    )

options = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = {
    "model": get_model_state_dict(model, options=options),
    "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
}
if dist.get_rank() == 0:
    torch.save(full, folder / "full.pt")
dist.barrier()
dist.destroy_process_group()
