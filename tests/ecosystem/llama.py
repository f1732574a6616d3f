"""A tiny Llama of ``transformers``, and its training on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.corpus.gathering import in_full

ROWS = 2


def tiny_llama(tied: bool = False, layers: int = 2, **config: Any) -> nn.Module:
    """The same values on every call and rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            attn_implementation="eager",
            use_cache=False,
            **config,
        )
    )


def tokens(world_size: int, step: int) -> torch.Tensor:
    """What all ranks see in a step, ``(world_size, ROWS, 6)``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 32, (world_size, ROWS, 6), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """What the model itself calls its loss."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], torch.Tensor],
    steps: int,
    clip: Callable[[], Any] = lambda: None,
) -> None:
    """Train on ``batches(step)``: one batch, ``(ROWS, 6)``, or several whose gradients average."""
    for step in range(steps):
        found = batches(step)
        for batch in found.reshape(-1, ROWS, found.shape[-1]):
            (loss_of(model, batch) * ROWS / found[..., 0].numel()).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or all of a ``DTensor``."""
    return in_full(tensor).detach()


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    """The parameters of two models are close, by name; wrappers for checkpointing are no names."""
    values = {
        name.replace("_checkpoint_wrapped_module.", ""): full(param)
        for name, param in found.named_parameters()
    }
    wanted = dict(expected.named_parameters())
    assert list(values) == list(wanted)
    for name, value in values.items():
        torch.testing.assert_close(
            value, wanted[name].detach(), msg=lambda text, name=name: f"{name}: {text}"
        )
