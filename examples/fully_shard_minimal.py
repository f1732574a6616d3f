"""Sharded training, whole, on CPU.

torchrun --standalone --nproc-per-node 2 examples/fully_shard_minimal.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

torch.manual_seed(0)  # every rank starts from the same weights
blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
model = nn.Sequential(*blocks)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding: it sees shards

torch.manual_seed(1 + dist.get_rank())  # and learns from data of its own
for step in range(60):
    x = torch.randn(64, 32)
    loss = F.mse_loss(model(x), x.roll(1, dims=1))  # shift the input
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9 and dist.get_rank() == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")

dist.destroy_process_group()
