#!/usr/bin/env bash
# transformers' Trainer: evaluate() before train() turns DDP off, and every rank trains a model of its own.
#
# Guess: an evaluation changes nothing. (With Accelerate's FSDP2 it raises: transformers#39961.)
# Found (transformers 5.23.0, Accelerate 1.15.0): evaluate() prepares the model without DDP, and train()
# takes it as prepared. Ranks no longer have the same weights after the first step. No error, no warning.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0
ranks 2 <<'PROGRAM'
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x)[:, 0] - labels).square().mean()}


def differs(evaluate_first):
    torch.manual_seed(0)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    rows = [{"x": each, "labels": each.sum()} for each in x]
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=0.1,
        optim="sgd",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows)
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    weight = trainer.model.linear.weight.detach()
    weights = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(weights, weight)
    return (weights[0] - weights[1]).abs().max().item(), type(trainer.model_wrapped).__name__


trained, evaluated = differs(False), differs(True)
if dist.get_rank() == 0:
    print("weights of the two ranks differ by, and the model is a:", trained, "with evaluate() first:", evaluated)
assert trained == (0.0, "DistributedDataParallel"), trained
assert evaluated[0] > 1e-4 and evaluated[1] == "Model", evaluated
dist.destroy_process_group()
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   numpy 2.4.6
#   transformers 5.23.0
#   accelerate 1.15.0
#   {'train_runtime': '0.0652', 'train_samples_per_second': '122.7', 'train_steps_per_second': '30.68', 'train_loss': '9.828', 'epoch': '0.5'}
#   {'eval_loss': '8.391', 'eval_model_preparation_time': '0.0002', 'eval_runtime': '0.0144', 'eval_samples_per_second': '1112', 'eval_steps_per_second': '69.51', 'epoch': 0}
#   {'train_runtime': '0.0061', 'train_samples_per_second': '1322', 'train_steps_per_second': '330.5', 'train_loss': '9.658', 'epoch': '0.5'}
#   weights of the two ranks differ by, and the model is a: (0.0, 'DistributedDataParallel') with evaluate() first: (0.13457608222961426, 'Model')
