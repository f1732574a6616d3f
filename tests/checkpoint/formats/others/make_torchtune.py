"""Writes checkpoints with torchtune: ``torchrun --nproc-per-node RANKS make_torchtune.py FOLDER``.

Needs torchtune 0.6.1, torchao 0.18.0, transformers 5.23.0 and torch 2.13.0; runs on CPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from net import Net, batches, groups
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torchtune import training
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress
from torchtune.training.memory import OptimizerInBackwardWrapper

folder = Path(sys.argv[1])
dist.init_process_group("gloo")

model: Any = Net(scalar=False)
fully_shard(model.mlp)
fully_shard(model)
optimizer = torch.optim.AdamW(groups(model), lr=0.01)
for tokens in batches():
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(model, options=options)
states = get_optimizer_state_dict(model, optimizer, options=options)
if dist.get_rank() == 0:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": full, "optimizer": states}, folder / "full.pt")
dist.barrier()
progress = TrainingProgress(
    seed=7, epochs_run=1, total_epochs=2, max_steps_per_epoch=2
).state_dict()
saver = training.DistributedCheckpointer(str(folder), str(folder))
saver.save_checkpoint(
    {**progress, training.MODEL_KEY: model.state_dict(), training.OPT_KEY: optimizer.state_dict()},
    epoch=0,
)
saver.save_checkpoint({training.MODEL_KEY: model.state_dict()}, epoch=1)
each = {param: torch.optim.AdamW([param], lr=0.01) for param in model.parameters()}
wrapper = OptimizerInBackwardWrapper({n: each[p] for n, p in model.named_parameters()})
for tokens in batches():
    model(tokens).backward()
    for inner in each.values():
        inner.step()
        inner.zero_grad()
full = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    torch.save({"model": full}, folder / "full2.pt")
saver.save_checkpoint(
    {**progress, training.MODEL_KEY: model.state_dict(), training.OPT_KEY: wrapper.state_dict()},
    epoch=2,
)
dist.destroy_process_group()
