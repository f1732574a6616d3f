#!/usr/bin/env bash
# DTensor: the gradient of amax() is NaN, and cumsum(-1) is not cumsum(0) of a vector.
#
# Guess: both are what they are for the full tensor.
# Found (torch 2.13.0): amax() of a sharded tensor has the right value, and NaN as gradient of every other
# element. cumsum(-1) of a vector starts again at each shard; cumsum(0) does not.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
vector = torch.arange(1.0, 5.0)

sharded = distribute_tensor(vector, mesh, [Shard(0)]).requires_grad_()
largest = sharded.amax()
largest.backward()
gradient = sharded.grad.full_tensor()
assert largest.full_tensor().item() == 4.0
assert gradient.isnan().any(), gradient  # right: [0, 0, 0, 1]

of_zero, of_last = (
    distribute_tensor(vector, mesh, [Shard(0)]).cumsum(dim).full_tensor().tolist() for dim in (0, -1)
)
assert of_zero == [1, 3, 6, 10], of_zero
assert of_last == [1, 3, 3, 7], of_last
if dist.get_rank() == 0:
    print("gradient of amax:", gradient.tolist(), "cumsum(0):", of_zero, "cumsum(-1):", of_last)
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   gradient of amax: [nan, nan, nan, inf] cumsum(0): [1.0, 3.0, 6.0, 10.0] cumsum(-1): [1.0, 3.0, 3.0, 7.0]
