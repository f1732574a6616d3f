#!/usr/bin/env bash
# DTensor: `F.mse_loss` of a sharded tensor has the right value, and a gradient that is too large by the number of
# ranks. `(p - target).square().mean()`, the same formula, is right in both.
#
# Guess: both are right, or both are refused. A loss whose value is right has the gradient that belongs to it.
# Found (torch 2.13.0, two ranks): the gradient of F.mse_loss is 2 times too large; so are those of F.huber_loss,
# F.smooth_l1_loss and F.binary_cross_entropy, and those of F.l1_loss and F.binary_cross_entropy_with_logits are
# right. The backward of the first four divides by the number of elements of the rank's own part.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
values, target = torch.rand(4, 4), torch.full((4, 4), 0.5)


def by_hand(p, target):
    return (p - target).square().mean()


found = {}
functions = by_hand, F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy
for function in (*functions, F.l1_loss, F.binary_cross_entropy_with_logits):
    whole = values.clone().requires_grad_()
    cut = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
    losses = function(whole, target), function(cut, distribute_tensor(target, mesh, [Shard(0)]))
    losses[0].backward()
    losses[1].backward()
    value = losses[1].full_tensor().item() / losses[0].item()
    gradient = (cut.grad.full_tensor() / whole.grad).mean().item()
    found[function.__name__] = round(value, 4), round(gradient, 4)
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}")
    for name, (value, gradient) in found.items():
        print(f"{name:34} value {value:g} times, gradient {gradient:g} times that of one process")
dist.destroy_process_group()
expected = [(1, 1), (1, 2), (1, 2), (1, 2), (1, 2), (1, 1), (1, 1)]
assert list(found.values()) == expected, "this has changed"
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   by_hand                            value 1 times, gradient 1 times that of one process
#   mse_loss                           value 1 times, gradient 2 times that of one process
#   huber_loss                         value 1 times, gradient 2 times that of one process
#   smooth_l1_loss                     value 1 times, gradient 2 times that of one process
#   binary_cross_entropy               value 1 times, gradient 2 times that of one process
#   l1_loss                            value 1 times, gradient 1 times that of one process
#   binary_cross_entropy_with_logits   value 1 times, gradient 1 times that of one process
