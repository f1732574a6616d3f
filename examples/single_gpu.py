"""Train on one device. distributed.py is the same script, sharded.

    python examples/single_gpu.py

Prints the loss every ten steps and saves the weights to model.pt.
"""

import torch
import torch.nn.functional as F
from torch import nn

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
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = nn.Sequential(*[Block(16) for _ in range(4)], nn.Linear(16, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(1)
    for step in range(40):
        x = torch.randn(BATCH, 16, generator=data).to(device)
        loss = F.mse_loss(model(x), x.roll(1, dims=1))  # the target is the input, shifted by one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
