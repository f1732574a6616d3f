"""A model of one value, so that a torn version shows."""

from __future__ import annotations

from torch import nn


def constant_model(value: float = 1.0, size: int = 64) -> nn.Linear:
    """The model; all of its weights are ``value``."""
    model = nn.Linear(size, size, bias=False)
    set_weights(model, value)
    return model


def set_weights(model: nn.Linear, value: float) -> None:
    """Give all weights another value."""
    nn.init.constant_(model.weight, value)
