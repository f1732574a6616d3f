"""How many references to a tensor and its memory there are.

Where torch does not say, nothing counts as the only reference.
"""

from __future__ import annotations

import sys

import torch


def is_only_reference(tensor: torch.Tensor) -> bool:
    """Whether only the calling function has a tensor, or another one with the same memory.

    No other reference in Python or C++, no view, no array of a library. The caller passes a local
    variable, and has the tensor nowhere else.
    """
    if type(tensor) is not torch.Tensor or tensor.requires_grad or not _counts():
        return False
    # What a program made of memory of its own, by from_numpy say, cannot be resized.
    if not tensor.untyped_storage().resizable():
        return False
    return _references(tensor) == _ALONE


def _references(tensor: torch.Tensor) -> tuple[int, ...]:
    """Count the references of Python and of C++ to a tensor, and those to its storage."""
    storage = tensor.untyped_storage()
    of_python = sys.getrefcount(tensor), sys.getrefcount(storage)
    of_cpp: tuple[int, int] = (
        tensor._use_count(),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(storage._cdata),
    )
    return of_python + of_cpp


def _counts() -> bool:
    return hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def _of_a_new_one() -> tuple[int, ...]:
    """Count those of a tensor that only a local variable of a caller refers to."""

    def through_a_call(tensor: torch.Tensor) -> tuple[int, ...]:
        return _references(tensor)

    made = torch.empty(1)
    return through_a_call(made)


_ALONE = _of_a_new_one() if _counts() else ()
