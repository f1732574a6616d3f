"""Wrapping by hand, while a model is built: a model that no host could hold whole.

with enable_wrap(wrapper_cls=FullyShardedDataParallel, mixed_precision=bf16):
    blocks = nn.Sequential(*[wrap(Block()) for _ in range(1000)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class _Wrapping:
    wrapper_cls: Callable[..., nn.Module | None]
    arguments: dict[str, Any]


_CURRENT: ContextVar[_Wrapping | None] = ContextVar("shardwise_wrapping", default=None)


@contextmanager
def enable_wrap(
    *, wrapper_cls: Callable[..., nn.Module | None], **arguments: Any
) -> Iterator[None]:
    """Let :func:`wrap`, called inside, apply ``wrapper_cls(module, **arguments)``.

    Of two nested contexts the inner one counts alone.

    Args:
        wrapper_cls: ``FullyShardedDataParallel``, ``fully_shard``, or anything called alike.
        arguments: its keyword arguments.
    """
    token = _CURRENT.set(_Wrapping(wrapper_cls, arguments))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def wrap(module: nn.Module, **overrides: Any) -> nn.Module:
    """Wrap ``module`` as :func:`enable_wrap` says; outside of it return it as it is.

    Args:
        module: the module, which is sharded before the next one is built.
        overrides: keyword arguments in place of those of :func:`enable_wrap`.
    """
    current = _CURRENT.get()
    if current is None:
        return module
    made = current.wrapper_cls(module, **{**current.arguments, **overrides})
    return module if made is None else made
