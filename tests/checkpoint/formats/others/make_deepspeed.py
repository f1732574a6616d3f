"""Writes checkpoints with DeepSpeed: ``torchrun ... make_deepspeed.py FOLDER STAGE DTYPE``.

Needs deepspeed 0.19.8 and torch 2.13.0; runs on CPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from net import Net, batches, groups

folder, stage, dtype = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
# What sums in shared memory would be compiled first; gloo does it as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}
if dtype != "fp32":
    config[dtype] = {"enabled": True}
model = Net(scalar=False)  # of which DeepSpeed cannot broadcast one
optimizer = torch.optim.AdamW(groups(model), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for tokens in batches():
    engine.backward(engine(tokens))
    engine.step()
engine.save_checkpoint(folder)

full = {}
for name, param in engine.module.named_parameters():
    full[name] = {"param": safe_get_full_fp32_param(param)}
    if stage == 3:
        full[name]["exp_avg"] = safe_get_full_optimizer_state(param, "exp_avg")
if dist.get_rank() == 0:
    torch.save(full, folder / "full.pt")
    print(
        {n: (v["param"].shape, v["param"].dtype) for n, v in full.items() if v["param"] is not None}
    )
dist.barrier()
