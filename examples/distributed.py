"""single_gpu.py, sharded over all ranks. Lines that changed are marked # <--.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py

Prints the same losses as single_gpu.py and saves the same file, model.pt.
"""

import torch
import torch.distributed as dist  # <--
import torch.nn.functional as F
from torch import nn

from shardwise import FullyShardedDataParallel as FSDP  # <--

BATCH = 64


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def main() -> None:
    dist.init_process_group()  # <--
    rank, ranks = dist.get_rank(), dist.get_world_size()  # <--
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = nn.Sequential(*[Block(16) for _ in range(4)], nn.Linear(16, 16)).to(device)
    model = FSDP(model, auto_wrap_policy="auto")  # <--
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(1)
    for step in range(40):
        x = torch.randn(BATCH, 16, generator=data).to(device)
        x = x.chunk(ranks)[rank]  # <-- this rank's share of the batch
        loss = F.mse_loss(model(x), x.roll(1, dims=1))  # the target is the input, shifted by one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach().div_(ranks))  # <-- the mean over ranks, to print
        if step % 10 == 9 and rank == 0:  # <--
            print(f"step {step + 1}: loss {loss.item():.4f}")

    state = model.state_dict()  # <-- full tensors, on every rank
    if rank == 0:  # <--
        torch.save(state, "model.pt")
    dist.destroy_process_group()  # <--


if __name__ == "__main__":
    main()
