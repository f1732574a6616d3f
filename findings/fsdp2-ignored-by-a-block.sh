#!/usr/bin/env bash
# FSDP2: what a block's fully_shard ignores, the root's does not take: it trains apart on every rank.
#
# Guess: ignored_params is for that call, and fully_shard(model) takes whatever is left.
# Found (torch 2.13.0): the root never looks into modules that were sharded before it. The parameters stay
# plain tensors, their gradients are not reduced, and ranks drift apart without a warning.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 2))
norm = model[0][0]
fully_shard(model[0], ignored_params=set(norm.parameters()))
fully_shard(model)

torch.manual_seed(1 + rank)
model(torch.randn(3, 4)).square().mean().backward()
print(f"rank {rank}: {type(norm.weight.data).__name__}, gradient {norm.weight.grad.tolist()}")
gradients = [torch.empty(4) for _ in range(2)]
dist.all_gather(gradients, norm.weight.grad)
assert type(norm.weight.data) is torch.Tensor
assert not torch.allclose(*gradients), gradients
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   rank 0: Tensor, gradient [0.058333273977041245, -0.006241311319172382, 0.027815373614430428, 0.02201385423541069]
#   rank 1: Tensor, gradient [0.11976554989814758, 0.06534220278263092, 0.0002786176046356559, 0.035033077001571655]
