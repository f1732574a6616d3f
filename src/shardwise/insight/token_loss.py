"""The loss of language models in trainings and plans: from whole logits, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Logits

#: Bytes of whole logits in float32 from which ``Logits.AUTO`` divides them. Below, a step has
#: little to gain.
DIVIDED_FROM = 1 << 27


class TokenLoss:
    """The cross-entropy of a model's tokens, called with the model, targets and inputs.

    Args:
        logits: how they are computed. Where ``AUTO`` meets a model that needs its logits whole, it
            runs forward again, once, and divides none from then on.
        say: tells the user why.
        tokens: of a microbatch at most, by which all ranks decide alike: they run forward together.
            ``None``: those of each batch, for one process.
    """

    def __init__(
        self,
        logits: Logits,
        say: Callable[[str], object] = lambda _: None,
        tokens: int | None = None,
    ) -> None:
        self._logits = logits
        self._say = say
        self._tokens = tokens

    def __call__(
        self, model: Any, targets: torch.Tensor, reduction: Any = "mean", **inputs: Any
    ) -> torch.Tensor:
        """Return a float32 scalar, in nats.

        Args:
            model: a causal language model of ``transformers``.
            targets: (batch, length) int64: the next token at each position, or -100.
            reduction: ``"mean"`` over the targets, or ``"sum"``.
            inputs: what the model is called with.

        Raises:
            OptionError: chunks were asked for, and the model needs its logits whole.
        """
        if self._divides(model, targets):
            from shardwise.frontends.cross_entropy import WholeLogitsError
            from shardwise.pretrained.causal_lm import causal_lm_loss

            try:
                return causal_lm_loss(model, targets, reduction=reduction, **inputs)
            except WholeLogitsError as error:
                if self._logits is Logits.CHUNKS:
                    raise OptionError("--logits", f"chunks for {error}", "auto or whole") from error
                self._logits = Logits.WHOLE
                self._say(f"logits     whole, since chunks do not fit: {error}")
        logits = model(**inputs).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)

    def _divides(self, model: Any, targets: torch.Tensor) -> bool:
        if self._logits is not Logits.AUTO:
            return self._logits is Logits.CHUNKS
        head: nn.Module | None = model.get_output_embeddings()
        rows: int = getattr(head, "out_features", 0)
        return 4 * (self._tokens or targets.numel()) * rows >= DIVIDED_FROM
