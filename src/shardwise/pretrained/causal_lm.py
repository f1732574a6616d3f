"""The loss of a causal language model of ``transformers``, without its logits in memory.

Importing this does not import transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise._torch import autograd
from shardwise.base.arguments import check_arguments
from shardwise.frontends.cross_entropy import Reduction, WholeLogitsError, returning_loss, scalar


def causal_lm_loss(
    model: nn.Module,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **inputs: Any,
) -> torch.Tensor:
    """Return the cross-entropy of a model's logits, which are never in memory as a whole.

        loss = shardwise.pretrained.causal_lm_loss(
            model, tokens[:, 1:], input_ids=tokens[:, :-1]
        )

    It equals, with its gradients, to rounding, what follows from ``model(**inputs).logits.float()``
    by ``F.cross_entropy``. The model is called with another ``forward`` of its head; see
    :func:`shardwise.linear_cross_entropy`.

    Args:
        model: a causal language model of ``transformers``, sharded or not, with adapters or not.
        targets: (batch, length) int64: the next token at each position, or ``ignore_index``. They
            are not shifted.
        ignore_index: the target of tokens without a loss.
        reduction: ``"mean"`` over the tokens with a loss, NaN if there are none; or ``"sum"``.
        inputs: what the model is called with, ``input_ids`` and others; no ``labels``.

    Returns:
        A float32 scalar, in nats; float64 for a model in float64.

    Raises:
        WholeLogitsError: the head is no plain ``nn.Linear``; or the model changes what its head
            returns, as a soft cap does, or has its head in a checkpoint. It is a
            ``NotImplementedError``.
        ValueError: shapes do not fit, or there is no such reduction.
        IndexError: a target is no row of the head; on accelerators, an error of the device.
    """
    check_arguments(causal_lm_loss, locals())
    found: Any = getattr(model, "get_output_embeddings", lambda: None)
    head: nn.Module | None = found()
    name = type(model).__name__
    made: list[tuple[torch.Tensor, int]] = []

    def note(module: nn.Module, args: Any, loss: torch.Tensor) -> None:
        made.append((loss, autograd.version_of(loss)))

    with returning_loss(head, targets, ignore_index, reduction) as own:
        assert head is not None
        hook = head.register_forward_hook(note)
        try:
            logits = model(**inputs).logits
        except (AttributeError, IndexError, TypeError) as error:
            if not made:
                raise
            raise _changes(name, f"{type(error).__name__}: {error}") from error
        finally:
            hook.remove()
    if len(made) != 1:
        raise _changes(name, f"{len(made)} calls of its head")
    loss, version = made[0]
    if logits is not loss or autograd.version_of(loss) != version:
        raise _changes(name, "other logits than its head returns: scaled, capped or cast")
    return scalar(loss, own)


def _changes(model: str, found: str) -> WholeLogitsError:
    return WholeLogitsError(
        f"{model}: found {found}; expected a model that returns what its head does, from one call. "
        "Compute the loss from whole logits"
    )
