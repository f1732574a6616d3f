#!/usr/bin/env bash
# gloo's MAX and MIN lose a NaN, and with it numbers of other ranks.
#
# Guess: a NaN on any rank makes the result NaN, as torch.maximum does.
# Found (torch 2.13.0, 2.15.0): it stays only if it is on the rank that reduces that part of the message
# last: rank 0 for the first elements. Else it is dropped, and what was compared with it before: the
# largest of 1, NaN and 5 is 1.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 3 <<'PROGRAM'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
nan = float("nan")

found = []
for values in [(nan, 1.0, 1.0), (1.0, nan, 1.0), (1.0, 1.0, nan), (1.0, nan, 5.0), (1.0, 5.0, nan)]:
    value = torch.tensor([values[rank]])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    found.append(value.item())
if rank == 0:
    print("largest of (NaN, 1, 1), (1, NaN, 1), (1, 1, NaN), (1, NaN, 5), (1, 5, NaN):", found)
assert found[0] != found[0], found
assert found[1:] == [1.0, 1.0, 1.0, 5.0], found
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   largest of (NaN, 1, 1), (1, NaN, 1), (1, 1, NaN), (1, NaN, 5), (1, 5, NaN): [nan, 1.0, 1.0, 1.0, 5.0]
