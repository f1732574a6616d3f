"""The Newton-Schulz iteration that orthogonalizes an update, as ``torch.optim.Muon`` computes it.

From Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/). The scales of learning rates
are his, and that of "Muon is Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

import math

import torch

#: The dtype of the iteration, and of updates on their way to it and back.
DTYPE = torch.bfloat16


def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about the nearest semi-orthogonal matrix: singular values become about 1.

    The operations are those of ``torch.optim.Muon``, in their order, so that the bits are the same.

    Args:
        matrix: bfloat16, ``(m, n)``, contiguous. It is overwritten.
        coefficients: of the polynomial ``a X + b (X X') X + c (X X')^2 X``.
        steps: how often the polynomial is applied.
        eps: the smallest norm to divide by.

    Returns:
        bfloat16, ``(m, n)``; may be transposed in memory.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def flops(shape: tuple[int, int], steps: int) -> int:
    """Return the floating-point operations of :func:`orthogonalize`."""
    short, long = sorted(shape)
    return steps * (4 * short**2 * long + 2 * short**3)


def scale(adjust_lr_fn: str | None, shape: tuple[int, int]) -> float:
    """Return the factor of the learning rate of a matrix.

    Args:
        adjust_lr_fn: ``"original"`` or ``None``: ``sqrt(max(1, m / n))``; ``"match_rms_adamw"``:
            ``0.2 sqrt(max(m, n))``, so that updates are about as large as those of AdamW.
        shape: ``(m, n)``.
    """
    m, n = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))
