"""Nested FSDP in the style of PyTorch/XLA scripts: wrap the inner modules, then the model.

    torchrun --standalone --nproc-per-node 2 examples/xla_nested_fsdp.py --nested-fsdp

Without --nested-fsdp, a policy wraps the same modules. Add --activation-checkpointing to recompute
activations in backward. Prints the accuracy, the number of wrapped modules and what rank 0 holds.
"""

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise import XlaFullyShardedDataParallel as FSDP
from shardwise import checkpoint_module
from shardwise.wrap import size_based_auto_wrap_policy


class ConvNet(nn.Module):
    """Two convolutions and two linear layers, for 14 x 14 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3)
        self.fc1 = nn.Linear(400, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def build(options: argparse.Namespace) -> FSDP:
    """Wrap the model by hand, or by a policy."""
    model = ConvNet()

    def wrapper(module: nn.Module, *args: object, **kwargs: object) -> FSDP:
        if options.activation_checkpointing:
            module = checkpoint_module(module)
        return FSDP(module, *args, **kwargs)

    if options.nested_fsdp:
        model.conv1 = wrapper(model.conv1)
        model.conv2 = wrapper(model.conv2)
        model.fc1 = wrapper(model.fc1)
        model.fc2 = wrapper(model.fc2)
        return FSDP(model, sync_module_states=True)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=80)
    return FSDP(model, auto_wrap_policy=policy, auto_wrapper_callable=wrapper)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nested-fsdp", action="store_true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    torch.manual_seed(1 + rank)  # every rank trains on its own data
    for step in range(30):
        y = torch.randint(4, (32,))
        x = 0.3 * torch.randn(32, 1, 14, 14)
        x[torch.arange(32), 0, 3 * y] += 1.5  # the class is the position of a bright row
        logits = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        right = (logits.argmax(1) == y).float().mean()
        dist.all_reduce(right)
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1}: accuracy {right.item() / world_size:.2f}")

    held = sum(value.numel() for value in model.state_dict().values())  # this rank's shards
    if rank == 0:
        wrapped = len(FSDP.fsdp_modules(model))
        print(f"{wrapped} wrapped modules; rank 0 holds {held:,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
