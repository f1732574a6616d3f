#!/usr/bin/env bash
# torch's FSDP2: under reentrant checkpointing, a block that runs twice gets the gradient of its last run alone.
#
# Guess: the gradient of both runs, as without sharding, or an error.
# Found (torch 2.13.0): the gradient of the last run, which backward reaches first. That of the other one
# stays with the full parameter, on each rank. No error, no warning. With use_reentrant=False, both count.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Linear(4, 4)

    def forward(self, x, runs, reentrant):
        x = self.first(x)
        for _ in range(runs):
            x = checkpoint(self.block, x, use_reentrant=reentrant).tanh()
        return x


def difference(runs, reentrant):
    torch.manual_seed(0)
    alone = Net()
    sharded = copy.deepcopy(alone)
    fully_shard(sharded.block)
    fully_shard(sharded)
    weight = sharded.block.weight  # the shards, as an optimizer has them
    x = torch.randn(2, 4)  # the same on all ranks
    alone(x, runs, reentrant).sum().backward()
    sharded(x, runs, reentrant).sum().backward()
    return (weight.grad.full_tensor() - alone.block.weight.grad).abs().max().item()


found = {(runs, reentrant): difference(runs, reentrant) for runs in (1, 2) for reentrant in (True, False)}
if dist.get_rank() == 0:
    for (runs, reentrant), apart in found.items():
        print(f"block runs {runs} times, use_reentrant={reentrant}: its gradient is off by {apart:.3f}")
assert found.pop((2, True)) > 0.1
assert max(found.values()) < 1e-5
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   block runs 1 times, use_reentrant=True: its gradient is off by 0.000
#   block runs 1 times, use_reentrant=False: its gradient is off by 0.000
#   block runs 2 times, use_reentrant=True: its gradient is off by 0.647
#   block runs 2 times, use_reentrant=False: its gradient is off by 0.000
