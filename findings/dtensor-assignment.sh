#!/usr/bin/env bash
# DTensor: assigning to `.data` of a sharded parameter changes nothing, and says nothing.
#
# Guess: it assigns, as for any tensor, or raises. Programs have written to parameters like this for years, and
# nn.utils.vector_to_parameters does.
# Found (torch 2.13.0): shapes and placements pass the check, the wrapper takes the new metadata, and the values stay
# with the old local tensor, so p is unchanged on every rank. `p.copy_(2 * p)` works.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("error")
dist.init_process_group("gloo")
torch.manual_seed(0)
p = fully_shard(nn.Linear(4, 4)).weight
before = p.full_tensor().clone()

with torch.no_grad():
    p.data = 2 * p.data
    assigned = (p.full_tensor() / before).mean().item()
    vector = nn.utils.parameters_to_vector([p])
    nn.utils.vector_to_parameters(2 * vector, [p])
    from_vector = (p.full_tensor() / before).mean().item()
    p.copy_(2 * p)
    copied = (p.full_tensor() / before).mean().item()
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}")
    print(f"after p.data = 2 * p.data            p is {assigned:g} times what it was")
    print(f"after vector_to_parameters(2 * ...)  p is {from_vector:g} times what it was")
    print(f"after p.copy_(2 * p)                 p is {copied:g} times what it was", flush=True)
dist.destroy_process_group()
assert (assigned, from_vector, copied) == (1, 1, 2), "this has changed"
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   after p.data = 2 * p.data            p is 1 times what it was
#   after vector_to_parameters(2 * ...)  p is 1 times what it was
#   after p.copy_(2 * p)                 p is 2 times what it was
