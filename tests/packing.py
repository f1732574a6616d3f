"""Pickle with plain tensors as plain bytes: torch writes a small archive for each of them.

Tensors travel by value: two that share memory arrive as two that do not.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dumps(value: Any) -> bytes:
    """Pickle a value; :func:`pickle.loads` reads it."""
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _unpack, (raw, value.dtype, tuple(value.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _unpack(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
