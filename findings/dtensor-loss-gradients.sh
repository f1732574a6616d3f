#!/usr/bin/env bash
# DTensor: gradients of mse_loss are as many times too large as there are ranks. The loss is right.
#
# Guess: the gradient of a DTensor is that of the full tensor.
# Found (torch 2.13.0): for mse_loss with reduction="mean" on Shard(0) it is world_size times that, while
# the same loss, written as (a - b).square().mean(), has the right one.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(1.0, 9.0).view(4, 2)
alone = full.clone().requires_grad_()
F.mse_loss(alone, torch.zeros_like(alone)).backward()


def gradient(loss):
    sharded = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    value = loss(sharded, torch.zeros_like(sharded))
    value.backward()
    assert value.full_tensor().item() == 25.5, value
    return sharded.grad.full_tensor()


times = gradient(F.mse_loss) / alone.grad
by_hand = gradient(lambda a, b: (a - b).square().mean()) / alone.grad
if dist.get_rank() == 0:
    print("gradient, as a multiple of the right one:", times[0, 0].item(), "by hand:", by_hand[0, 0].item())
assert torch.equal(times, torch.full((4, 2), 2.0)), times
assert torch.equal(by_hand, torch.ones(4, 2)), by_hand
dist.destroy_process_group()
PROGRAM
