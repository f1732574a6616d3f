"""State dicts of a model with its shards as ``DTensor``s, whatever wraps it.

Wrappers hand out state dicts of several kinds, as they were asked to; whoever saves shards needs
this one, and knows nothing of wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn


class HasStateDictKinds:
    """A module whose state dicts are of the kind that was asked for."""

    def sharded_kind(self) -> AbstractContextManager[None]:
        """Inside, its own state dicts hold its shards as ``DTensor``s."""
        raise NotImplementedError


@contextmanager
def sharded_state_dicts(model: nn.Module) -> Iterator[None]:
    """Inside, state dicts of ``model`` hold its shards as ``DTensor``s, whatever kind is set."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, HasStateDictKinds):
                stack.enter_context(module.sharded_kind())
        yield


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of ``model`` with its shards as ``DTensor``s, whatever kind is set.

    Args:
        model: wrapped, with wrapped modules in it, or sharded without a wrapper.
    """
    with sharded_state_dicts(model):
        return model.state_dict()
