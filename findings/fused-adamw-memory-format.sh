#!/usr/bin/env bash
# A fused AdamW on CPUs pairs the elements of parameter and states by their place in memory.
#
# Guess: a model that goes to channels_last during a training, or gets the states of one that was contiguous, trains on
# as before; or the fused optimizer refuses states whose strides are not the parameter's.
# Found (torch 2.13.0): no error. Each weight moves by the moments of another one. foreach and the plain loop are right.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0
ranks 1 <<'PROGRAM'
import torch
from torch import nn

x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def step(conv, optimizer):
    conv(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(how, other_format):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, 3)
    optimizer = torch.optim.AdamW(conv.parameters(), lr=0.1, **how)
    step(conv, optimizer)
    if other_format == "to":
        conv.to(memory_format=torch.channels_last)
    if other_format == "load_state_dict":
        moved = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        moved.load_state_dict(conv.state_dict())
        states, conv = optimizer.state_dict(), moved
        optimizer = torch.optim.AdamW(conv.parameters(), lr=0.1, **how)
        optimizer.load_state_dict(states)
    for _ in range(2):
        step(conv, optimizer)
    return conv.weight.detach()


for other_format in ("to", "load_state_dict"):
    for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        apart = (train(how, other_format) - train(how, "")).abs().max().item()
        print(f"channels_last by {other_format}, {how}: {'the same' if apart < 1e-5 else f'{apart:.2f} apart'}")
        assert (apart > 0.05) == ("fused" in how), apart
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   channels_last by to, {'foreach': False}: the same
#   channels_last by to, {'foreach': True}: the same
#   channels_last by to, {'fused': True}: 0.20 apart
#   channels_last by load_state_dict, {'foreach': False}: the same
#   channels_last by load_state_dict, {'foreach': True}: the same
#   channels_last by load_state_dict, {'fused': True}: 0.20 apart
