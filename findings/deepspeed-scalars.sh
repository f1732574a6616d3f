#!/usr/bin/env bash
# DeepSpeed's ZeRO refuses models with a parameter that has no dimensions.
#
# Guess: it trains as any other parameter, as with DDP.
# Found (deepspeed 0.19.8): deepspeed.initialize raises an error about viewing bytes, in stages 1 and 2, and names
# no parameter. A parameter of shape [1] is fine.
source "$(dirname "$0")/environment.sh"
export DS_ACCELERATOR=cpu DS_BUILD_OPS=0
packages torch==2.13.0 deepspeed==0.19.8
for stage in 1 2; do
  STAGE=$stage ranks 1 <<'PROGRAM'
import os

import deepspeed
import torch
from torch import nn

# Else DeepSpeed compiles sums in shared memory first. Gloo adds up as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
stage = int(os.environ["STAGE"])


class Scaled(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return (self.linear(x) * self.scale).square().mean()


deepspeed.init_distributed("gloo")
for shape in ([1], []):
    model = Scaled(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except RuntimeError as error:
        found = str(error)
    else:
        engine.backward(engine(torch.ones(1, 4)))
        engine.step()
        found = "a step"
    print(f"stage {stage}, a parameter of shape {shape}: {found}")
    assert (found == "a step") == (shape == [1]), found
    assert shape or "cannot be 0 to view Float as Byte" in found, found
torch.distributed.destroy_process_group()
PROGRAM
done
# Output:
#   torch 2.13.0+cpu
#   deepspeed 0.19.8
#   stage 1, a parameter of shape [1]: a step
#   stage 1, a parameter of shape []: self.dim() cannot be 0 to view Float as Byte (different element sizes)
#   stage 2, a parameter of shape [1]: a step
#   stage 2, a parameter of shape []: self.dim() cannot be 0 to view Float as Byte (different element sizes)
