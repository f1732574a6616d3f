"""Which parameters of a model Muon is for: the matrices of hidden layers, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

#: Names of the last layer in models that do not say which one it is.
_HEADS = re.compile(r"(^|\.)(lm_head|head|heads|output|classifier|score|unembed\w*)(\.|$)")
#: Names of parameters and modules whose rows are looked up, or added to what was looked up.
_EMBEDDINGS = re.compile(r"(^|\.)\w*(embed|token|position|wte|wpe)\w*(\.|$)")
#: Modules whose weights are no linear maps between hidden layers.
_OTHERS = (
    nn.Embedding,
    nn.EmbeddingBag,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def muon_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    is_hidden: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[dict[str, Any]]:
    """Split the trained parameters of a model into groups for :class:`shardwise.optim.Muon`.

    Muon gets the matrices of hidden layers, and stacks of them; AdamW embeddings, the last layer,
    convolutions, and all vectors, those without weight decay. A parameter that is tied to an
    embedding is one.

    Args:
        model: the model, sharded or not.
        muon: settings of the group for Muon, such as ``{"lr": 0.02}``.
        adamw: settings of the groups for AdamW, such as ``{"lr": 3e-4, "betas": (0.9, 0.95)}``.
        is_hidden: decides for a parameter of two or more dimensions, by its name, in place of the
            rule above.

    Returns:
        At most three parameter groups, with the names of the parameters: those for Muon, for AdamW
        with weight decay, and for AdamW without. Groups without parameters are left out.

    Raises:
        ValueError: no parameter is trained.
    """
    others = set(_not_hidden(model))
    hidden: list[tuple[str, nn.Parameter]] = []
    decayed: list[tuple[str, nn.Parameter]] = []
    vectors: list[tuple[str, nn.Parameter]] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if param.ndim < 2:
            vectors.append((name, param))
        elif param not in others if is_hidden is None else is_hidden(name, param):
            hidden.append((name, param))
        else:
            decayed.append((name, param))
    groups: list[dict[str, Any]] = [
        {"params": hidden, "algorithm": "muon", **(muon or {})},
        {"params": decayed, "algorithm": "adamw", **(adamw or {})},
        {"params": vectors, "algorithm": "adamw", **(adamw or {}), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(
            f"muon_groups: found no parameter of {type(model).__name__} that requires a gradient, "
            "expected at least one; unfreeze what is to be trained first"
        )
    return groups


def _not_hidden(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters of embeddings, of the last layer, and of convolutions."""
    heads = [getattr(model, f"get_{which}_embeddings", None) for which in ("input", "output")]
    ends = [found for found in (head() for head in heads if callable(head)) if found is not None]
    for name, module in model.named_modules():
        is_end = any(module is end for end in ends)
        for own, param in module.named_parameters(recurse=False):
            full = f"{name}.{own}".lstrip(".")
            if (
                is_end
                or isinstance(module, _OTHERS)
                or _EMBEDDINGS.search(full)
                or _HEADS.search(full)
            ):
                yield param
