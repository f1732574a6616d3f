#!/usr/bin/env bash
# DTensor: weight[0].zero_() writes nothing, so that reset_parameters() leaves the padding row random.
#
# Guess: a write to a row of a parameter reaches it, as in torch.no_grad() for any tensor.
# Found (torch 2.13.0): indexing a dimension that is sharded gathers it into another tensor. In-place
# operations change that one. nn.Embedding(padding_idx=0) under fully_shard trains with a padding row.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
embedding = nn.Embedding(6, 2, padding_idx=0)
fully_shard(embedding)
embedding.reset_parameters()
padding = embedding.weight.full_tensor()[0]
if dist.get_rank() == 0:
    print("padding row after reset_parameters():", padding.tolist())
assert padding.abs().min() > 0, padding

with torch.no_grad():
    embedding.weight[0].zero_()
    assert torch.equal(embedding.weight.full_tensor()[0], padding), "the write has arrived"
    embedding.weight.zero_()  # the whole parameter: this works
assert not embedding.weight.full_tensor().any()
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   padding row after reset_parameters(): [-0.37119147181510925, -0.09534525126218796]
