#!/usr/bin/env bash
# peft's LoRA on a model that FSDP2 has sharded trains another adapter on every rank.
#
# Guess: adapters that are added to sharded layers are sharded, or there is an error.
# Found (peft 0.21.2, torch 2.13.0): get_peft_model adds plain parameters, of the right shapes. The forward
# and backward work. Their gradients are each rank's own, so the ranks' adapters part with the first step.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0
ranks 2 <<'PROGRAM'
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
for layer in (model[0], model[2], model):
    fully_shard(layer)
adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"]))
trained = {name: param for name, param in adapted.named_parameters() if param.requires_grad}
optimizer = torch.optim.SGD(trained.values(), lr=0.1)

torch.manual_seed(1 + rank)
adapted(torch.randn(3, 4)).square().mean().backward()
optimizer.step()
name, adapter = next((name, param) for name, param in trained.items() if "lora_B" in name)
values = [torch.empty_like(adapter) for _ in range(2)]
dist.all_gather(values, adapter.detach())
if rank == 0:
    print(name, "of rank 0 and 1 after one step:", *(value.flatten()[:3].tolist() for value in values))
assert type(adapter.data) is torch.Tensor
assert not torch.equal(*values), values
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   peft 0.21.2
#   transformers 5.23.0
#   accelerate 1.15.0
#   base_model.model.0.lora_B.default.weight of rank 0 and 1 after one step: [-9.409509220859036e-05, -0.003924363758414984, 0.0001860838383436203] [0.00014800559438299388, 0.00017922325059771538, 0.0]
