"""The stages of ZeRO side by side: the same training, and what each stage keeps in memory.

    torchrun --standalone --nproc-per-node 2 examples/zero_1_2_3.py

Every step accumulates gradients over two microbatches. All stages end with the same loss. Later
stages use less memory and communicate more.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import fully_shard

MICROBATCHES = 2
STEPS = 20


@dataclass(frozen=True)
class Stage:
    """A stage of ZeRO, in terms of ``fully_shard``."""

    name: str
    is_sharded: bool
    reshard_after_forward: bool
    reduces_every_microbatch: bool

    def mesh(self) -> DeviceMesh:
        """Make a mesh over which all ranks shard, or all ranks replicate."""
        world_size = dist.get_world_size()
        return init_device_mesh("cpu", (world_size,) if self.is_sharded else (world_size, 1))


STAGES = [
    Stage("none", False, False, False),
    Stage("ZeRO-1", True, False, False),
    Stage("ZeRO-2", True, False, True),
    Stage("ZeRO-3", True, True, True),
]


def main() -> None:
    """Train with every stage and print a table."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("what rank 0 holds of the full model, and when gradients are reduced:\n")
        print(
            "stage   optimizer state   parameters, forward to backward   "
            "gradients reduced   last loss"
        )
    for stage in STAGES:
        row = train(stage)
        if dist.get_rank() == 0:
            print(row)
    dist.destroy_process_group()


def train(stage: Stage) -> str:
    """Train from the same weights on the same data; return a row of the table."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
    total = sum(parameter.numel() for parameter in model.parameters())
    options = {"mesh": stage.mesh(), "reshard_after_forward": stage.reshard_after_forward}
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            model.set_requires_gradient_sync(stage.reduces_every_microbatch or is_last)
            x = torch.randn(64, 32)
            loss = F.mse_loss(model(x), x.flip(1)) / MICROBATCHES
            parameters = [p for p in model.parameters() if not isinstance(p, DTensor)]
            loss.backward()
            if not is_last:
                reduced = all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    full = sum(parameter.numel() for parameter in parameters) / total
    states = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    state = sum(tensor.numel() for tensor in states) / total
    when = "every microbatch" if reduced else "once a step"
    loss = loss.detach() * MICROBATCHES
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    return f"{stage.name:7} {state:15.0%}   {full:31.0%}   {when:>17}   {loss.item():9.6f}"


if __name__ == "__main__":
    main()
