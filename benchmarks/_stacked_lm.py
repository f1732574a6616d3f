"""Many small language models of one shape that are trained at once, as stacks of matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The shape of one model: a decoder with learned positions and norms without biases.

    Attributes:
        vocabulary: tokens that there are.
        length: tokens of a sequence.
        width: of the residual stream.
        layers: blocks.
        heads: of attention.
    """

    vocabulary: int
    length: int
    width: int = 64
    layers: int = 2
    heads: int = 2


class StackedLM(nn.Module):
    """Models with a dimension in front that counts them.

    Args:
        shape: of each model.
        seeds: of the initial weights, one for each model.
    """

    def __init__(self, shape: Shape, seeds: list[int]) -> None:
        super().__init__()
        self.shape = shape
        self.count = len(seeds)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]

        def normal(*size: int, std: float) -> nn.Parameter:
            return nn.Parameter(
                torch.stack([torch.randn(size, generator=g) * std for g in generators])
            )

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(self.count, 1, shape.width))

        width = shape.width
        self.embedding = normal(shape.vocabulary, width, std=0.02)
        self.positions = normal(shape.length, width, std=0.02)
        self.norms = nn.ParameterList(ones() for _ in range(2 * shape.layers + 1))
        into, back = width**-0.5, (2 * shape.layers * width) ** -0.5
        layers = range(shape.layers)
        self.qkv = nn.ParameterList(normal(3, width, width, std=into) for _ in layers)
        self.out = nn.ParameterList(normal(width, width, std=back) for _ in layers)
        self.up = nn.ParameterList(normal(4 * width, width, std=into) for _ in layers)
        self.down = nn.ParameterList(normal(width, 4 * width, std=back / 2) for _ in layers)
        self.head = normal(shape.vocabulary, width, std=0.02)

    @property
    def hidden(self) -> list[nn.Parameter]:
        """The matrices of hidden layers, which Muon updates."""
        return [*self.qkv, *self.out, *self.up, *self.down]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of each model.

        Args:
            tokens: int64, ``(models, sequences, length + 1)``.

        Returns:
            fp32, ``(models,)``, in nats per token.
        """
        shape, count = self.shape, self.count
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        rows = inputs.shape[1]
        which = torch.arange(count).view(-1, 1, 1)
        x = self.embedding[which, inputs] + self.positions.unsqueeze(1)
        x = x.reshape(count, rows * shape.length, shape.width)
        for i in range(shape.layers):
            qkv = _times(_norm(x, self.norms[2 * i]), self.qkv[i].flatten(1, 2))
            q, k, v = (
                qkv.view(count * rows, shape.length, 3, shape.heads, -1)
                .permute(2, 0, 3, 1, 4)
                .unbind()
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(x.shape)
            x = x + _times(mixed, self.out[i])
            inner = F.gelu(_times(_norm(x, self.norms[2 * i + 1]), self.up[i]), approximate="tanh")
            x = x + _times(inner, self.down[i])
        logits = _times(_norm(x, self.norms[-1]), self.head)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(count, -1).mean(1)

    def clip_(self, most: float) -> None:
        """Clip the gradient of each model to a norm."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norms = sum(grad.flatten(1).square().sum(1) for grad in grads)
        assert isinstance(norms, Tensor)
        factors = (most / norms.sqrt()).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))

    def read_gradients(self) -> Tensor:
        """Return all gradients, ``(models, elements)``."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return torch.cat([grad.flatten(1) for grad in grads], dim=1)

    def write_gradients(self, values: Tensor) -> None:
        """Set all gradients to what :meth:`read_gradients` returned."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        sizes = [grad.flatten(1).shape[1] for grad in grads]
        for grad, part in zip(grads, values.split(sizes, dim=1), strict=True):
            grad.copy_(part.view_as(grad))

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return all parameters, ``(models, elements)``."""
        return torch.cat([p.flatten(1) for p in self.parameters()], dim=1)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Set all parameters to what :meth:`read` returned."""
        sizes = [p.flatten(1).shape[1] for p in self.parameters()]
        for parameter, part in zip(self.parameters(), values.split(sizes, dim=1), strict=True):
            parameter.copy_(part.view_as(parameter))


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * weight
