"""A training that hosts may join and leave, and that continues after a loss, as a plain script.

    shardwise run --nproc 2 examples/elastic.py --out run
    shardwise run --nproc 2 --nnodes 1:4 --rdzv HOST:29400 examples/elastic.py --out /shared/run
    torchrun --standalone --nproc-per-node 2 examples/elastic.py --out run

--out is a folder that every host can see. Run it again to continue from the last checkpoint, on any
number of ranks that divides 128.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise import GracefulStop, checkpoint, fully_shard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("run"), help="folder for checkpoints")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # every rank starts with the same weights
blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
model = nn.Sequential(*blocks).to(device)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

done, newest = 0, [checkpoint.latest(options.out)]
dist.broadcast_object_list(newest)  # rank 0 decides: others may see it later
if newest[0] is not None:
    done = checkpoint.load(newest[0], model, optimizer)["step"]
if rank == 0:
    print(f"{ranks} ranks, starting after step {done}", flush=True)

with GracefulStop() as stop:
    for step in range(done + 1, options.steps + 1):
        torch.manual_seed(step)  # the same batch on any number of ranks
        x = torch.randn(128, 32).chunk(ranks)[rank].to(device)
        loss = F.mse_loss(model(x), x.roll(1, dims=1))  # the target is the input, shifted by one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping = stop.requested()  # the same answer on every rank
        if stopping or step % options.every == 0:
            path = checkpoint.step_folder(options.out, step)
            checkpoint.save(path, model, optimizer, {"step": step}, keep_last=2)
            dist.all_reduce(mean := loss.detach() / ranks)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)
        if stopping:
            stop.exit(f"Stopped after step {step}, which is saved.")
dist.destroy_process_group()
