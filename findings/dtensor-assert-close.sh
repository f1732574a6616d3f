#!/usr/bin/env bash
# torch.testing.assert_close of two DTensors passes on a rank whose rows are equal.
#
# Guess: it compares the tensors, or refuses DTensors. torch.equal does compare them.
# Found (torch 2.13.0): each rank compares its own shards. A test that looks at rank 0 alone passes although
# the last row differs; torch.equal says False on both ranks.
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
full = torch.arange(8.0).view(4, 2)
other = full.clone()
other[3, 0] = 0
one, two = (distribute_tensor(each, mesh, [Shard(0)]) for each in (full, other))
try:
    torch.testing.assert_close(one, two)
    passes = True
except AssertionError:
    passes = False
print(f"rank {rank}: assert_close {'passes' if passes else 'fails'}, equal is {torch.equal(one, two)}")
assert passes == (rank == 0)
assert not torch.equal(one, two)
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   rank 1: assert_close fails, equal is False
#   rank 0: assert_close passes, equal is False
