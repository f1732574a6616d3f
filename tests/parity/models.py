"""The models that parity is proved on: small, and awkward on purpose.

Each entry of :data:`MODELS` says how to build the model, what a rank feeds it at a step, and which
modules become groups. Weights and batches come from fixed seeds, so that every process makes the
same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

Batch = tuple[Tensor, ...]
Blocks = list[nn.Module | list[nn.Module]]


@dataclasses.dataclass(frozen=True)
class Model:
    """One entry.

    Attributes:
        build: the model on the current default device, in float32.
        batch: ``batch(generator)``: what one rank sees in one microbatch.
        loss: ``loss(model, *batch)``: a mean over the batch.
        blocks: what is sharded before the root, bottom-up; an inner list is one group.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[..., Tensor]
    blocks: Callable[[Any], Blocks]


class Mlp(nn.Module):
    """Rows that no world size divides: 5, 3 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ConvNet(nn.Module):
    """Weights of four dimensions, one without a bias, and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.GELU())
        self.body = nn.Sequential(nn.Conv2d(6, 5, 3, bias=False), nn.GroupNorm(1, 5), nn.GELU())
        self.head = nn.Linear(5 * 4 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).flatten(1))


class Frozen(nn.Module):
    """A group that is frozen whole, one that is frozen in part, one that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(6, 5)
        self.head = nn.Linear(5, 1)
        self.embed.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.norm(self.embed(x)))))


class Unused(nn.Module):
    """A group that no forward calls, and a parameter without use in a group that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.never = nn.Linear(7, 5)
        self.second = nn.Linear(5, 1)
        self.second.register_parameter("idle", nn.Parameter(torch.ones(3, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Scale(nn.Module):
    """Parameters with no dimension, with one element and with no element."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor([0.25]))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset + self.nothing.sum()


class Scalars(nn.Module):
    """:class:`Scale` in a group of its own and in the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 1)
        self.inner = Scale()
        self.outer = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(torch.tanh(self.linear(x))))


class Pair(nn.Module):
    """Two layers with one weight and two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.right(torch.tanh(self.left(x))))


class Shared(nn.Module):
    """Parameters under two names: inside a nested group, and within the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.pair = Pair()
        self.head = nn.Linear(5, 1)
        self.alias = self.head
        self.again = nn.Linear(7, 5)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.pair(torch.tanh(self.first(x) + self.again(x))))


class Recurrent(nn.Module):
    """One group that computes three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 5)
        self.cell = nn.Linear(5, 5)
        self.leave = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.leave(x)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.enter = nn.Linear(7, 5)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5)) for _ in range(3)]
        )
        self.leave = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


def _llama(*, tied: bool) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=22,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def _vectors(generator: torch.Generator) -> Batch:
    return torch.randn(4, 7, generator=generator), torch.randn(4, 1, generator=generator)


def _images(generator: torch.Generator) -> Batch:
    return (
        torch.randn(3, 3, 8, 8, generator=generator),
        torch.randint(4, (3,), generator=generator),
    )


def _tokens(generator: torch.Generator) -> Batch:
    return (torch.randint(61, (2, 9), generator=generator),)


def _squared_error(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x).to(target.dtype), target)


def _cross_entropy(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(x), target)


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def _children(model: nn.Module) -> Blocks:
    return list(model.children())


def _layers(model: LlamaForCausalLM) -> Blocks:
    return list(model.model.layers)


MODELS = {
    "mlp": Model(Mlp, _vectors, _squared_error, lambda model: list(model.layers)),
    "mlp-in-one-group": Model(Mlp, _vectors, _squared_error, lambda _: []),
    "mlp-two-layers-in-one-group": Model(
        Mlp, _vectors, _squared_error, lambda model: [list(model.layers[:2]), model.layers[2]]
    ),
    "conv": Model(ConvNet, _images, _cross_entropy, _children),
    "frozen": Model(Frozen, _vectors, _squared_error, _children),
    "unused": Model(Unused, _vectors, _squared_error, _children),
    "scalars": Model(Scalars, _vectors, _squared_error, lambda model: [model.inner]),
    "shared": Model(Shared, _vectors, _squared_error, lambda model: [model.pair]),
    "recurrent": Model(Recurrent, _vectors, _squared_error, _children),
    "checkpointed": Model(
        partial(Checkpointed, reentrant=False),
        _vectors,
        _squared_error,
        lambda model: list(model.blocks),
    ),
    "checkpointed-reentrant": Model(
        partial(Checkpointed, reentrant=True),
        _vectors,
        _squared_error,
        lambda model: list(model.blocks),
    ),
    "llama": Model(partial(_llama, tied=False), _tokens, _next_token, _layers),
    "llama-tied": Model(partial(_llama, tied=True), _tokens, _next_token, _layers),
}


def make_model(name: str, *, seed: int = 0) -> nn.Module:
    """Build a model with the weights that the seed gives."""
    torch.manual_seed(seed)
    return MODELS[name].build()


def make_batch(name: str, rank: int, step: int, microbatch: int) -> Batch:
    """Draw what one rank sees in one microbatch of one step."""
    generator = torch.Generator().manual_seed(1 + rank + 101 * (microbatch + 101 * step))
    return MODELS[name].batch(generator)
