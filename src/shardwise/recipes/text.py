"""Text as tensors: what a language model learns from, and what it is judged by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwise.launch.world import World
from shardwise.recipes.data import Sequences, TextData
from shardwise.recipes.lm_config import LmConfig
from shardwise.recipes.model import next_token_loss
from shardwise.recipes.sharded import kept_between_forwards
from shardwise.transport.peers import naming_lost_peer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VALIDATION_SEQUENCES = 64


class Tokens(Protocol):
    """Tokens one after another, of which any part can be read."""

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens ``start`` .. ``start + length``, as int64 of shape (length,)."""


class TextBatches:
    """Training batches: int64 of shape (count, length + 1), on the device.

    Args:
        text: the data.
        config: length and seed.
        device: where batches go.
    """

    def __init__(self, text: TextData, config: LmConfig, device: torch.device) -> None:
        self._sequences = Sequences(text.train, config.seq_length, config.train.seed)
        self._device = device

    def batch(self, position: int, count: int) -> torch.Tensor:
        """Sequences ``position`` .. ``position + count`` of the order."""
        return torch.from_numpy(self._sequences.read(position, count)).to(self._device)


class ValidationLoss:
    """The loss on sequences spread evenly over the validation text, shared out over ranks.

    Args:
        model: the model to judge.
        stream: the tokens to judge it by.
        config: length and batch size.
        world: this rank.
        device: where this rank computes.
    """

    def __init__(
        self,
        model: nn.Module,
        stream: Tokens,
        config: LmConfig,
        world: World,
        device: torch.device,
    ) -> None:
        self._model = model
        self._batch_size = config.train.batch_size
        self._world = world
        self._device = device
        # As many for every rank, since every forward takes all ranks.
        total = max(1, VALIDATION_SEQUENCES // world.size) * world.size
        room = len(stream) - (config.seq_length + 1)
        starts = [room * i // max(1, total - 1) for i in range(total)]
        rows = [stream.read(start, config.seq_length + 1) for start in starts]
        self._mine = [torch.from_numpy(row) for row in rows[world.rank :: world.size]]

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """The mean over all ranks, in nats per token."""
        self._model.eval()
        total = torch.zeros(1, dtype=torch.float64)
        with kept_between_forwards(self._model):
            for first in range(0, len(self._mine), self._batch_size):
                rows = self._mine[first : first + self._batch_size]
                loss = next_token_loss(self._model, torch.stack(rows).to(self._device))
                total += loss.item() * len(rows)
        self._model.train()
        everyone = [torch.empty_like(total) for _ in range(self._world.size)]
        with naming_lost_peer(None, "the sum of validation losses"):
            dist.all_gather(everyone, total)
        mean = torch.cat(everyone).sum().item() / (len(self._mine) * self._world.size)
        return {"validation_loss": mean}
