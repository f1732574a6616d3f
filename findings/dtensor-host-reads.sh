#!/usr/bin/env bash
# DTensor: float(norm) and bool(isnan().any()) are each rank's own, so that ranks branch apart.
#
# Guess: reading a number from a DTensor reduces it first, or raises.
# Found (torch 2.13.0): .item(), float() and bool() of a Partial result read this rank's part. If one of four
# elements is NaN, one rank sees it. full_tensor() gives the right value.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
sharded = distribute_tensor(torch.arange(1.0, 9.0).view(4, 2), mesh, [Shard(0)])
norm = sharded.norm()
print(f"rank {rank}: float(norm) = {float(norm):.4f}, norm.full_tensor() = {norm.full_tensor():.4f}")
assert abs(float(norm) - (5.4772, 13.1909)[rank]) < 1e-3
assert abs(norm.full_tensor().item() - 14.2829) < 1e-3

with_nan = torch.ones(4)
with_nan[1] = float("nan")
has_nan = bool(distribute_tensor(with_nan, mesh, [Shard(0)]).isnan().any())
assert has_nan == (rank == 0), has_nan
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   rank 0: float(norm) = 5.4772, norm.full_tensor() = 14.2829
#   rank 1: float(norm) = 13.1909, norm.full_tensor() = 14.2829
