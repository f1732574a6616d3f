"""The smallest complete program: shard a model, train it, and print what each rank holds.

torchrun --standalone --nproc-per-node 2 examples/fully_shard_minimal.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise import fully_shard

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # every rank starts with the same weights
blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
model = nn.Sequential(*blocks)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding: it sees the shards

held = sum(parameter.to_local().numel() for parameter in model.parameters())
total = sum(parameter.numel() for parameter in model.parameters())
print(f"rank {rank} of {ranks} holds {held:,} of {total:,} parameters", flush=True)

torch.manual_seed(1 + rank)  # and trains on its own data
for step in range(60):
    x = torch.randn(64, 32)
    loss = F.mse_loss(model(x), x.roll(1, dims=1))  # the target is the input, shifted by one
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")
dist.destroy_process_group()
