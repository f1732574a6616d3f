#!/usr/bin/env bash
# torch.distributed.checkpoint: a save that fails over an older one leaves a mix of both, which loads without a word.
#
# Guess: .metadata is written last and is the commit, so until then the older checkpoint is as it was; or it cannot be
# loaded any more.
# Found (torch 2.13.0): files are called __0_0.distcp in every save, and replaced one by one under the old .metadata. If
# rank 1 fails, every rank reports it, and dcp.load gives the new half of rank 0 with the old half of rank 1.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6
FOLDER=$folder/checkpoint ranks 2 <<'PROGRAM'
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


class FullDisk(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            raise OSError("No space left on device")
        return super().write_data(plan, planner)


dist.init_process_group("gloo")
rank, folder = dist.get_rank(), os.environ["FOLDER"]
mesh = init_device_mesh("cpu", (2,))
state = {"weight": distribute_tensor(torch.full((4,), 1.0), mesh, [Shard(0)])}
dcp.save(state, checkpoint_id=folder)
state["weight"].copy_(distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)]))
try:
    dcp.save(state, storage_writer=FullDisk(folder))
except CheckpointException as error:
    print(f"rank {rank}: the second save: {error.failures[1][0]}\n", end="")
else:
    raise AssertionError("the second save has not failed")
dist.barrier()
loaded = {"weight": torch.zeros(4)}
dcp.load(loaded, checkpoint_id=folder)
if rank == 0:
    print("loaded:", loaded["weight"])
assert loaded["weight"].tolist() == [2.0, 2.0, 1.0, 1.0], loaded
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   rank 0: the second save: No space left on device
#   rank 1: the second save: No space left on device
#   loaded: tensor([2., 2., 1., 1.])
