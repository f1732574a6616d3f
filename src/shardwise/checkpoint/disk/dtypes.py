"""How dtypes are called in safetensors files, and how large their elements are. No torch here.

Source: the table of dtypes in the safetensors format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# name in files -> name in torch, bytes per element
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
NAMES = frozenset(_DTYPES)
_BY_TORCH_NAME = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}


def itemsize(name: str) -> int:
    """Bytes per element of a dtype, by its name in files."""
    return _DTYPES[name][1]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that files have for a dtype.

    Raises:
        ValueError: the format has none.
    """
    short = str(dtype).removeprefix("torch.")
    if short not in _BY_TORCH_NAME:
        raise ValueError(f"found dtype {short}, expected one of {sorted(_BY_TORCH_NAME)}")
    return _BY_TORCH_NAME[short]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that has this name in files."""
    import torch

    dtype = getattr(torch, _DTYPES[name][0])
    assert isinstance(dtype, torch.dtype)
    return dtype
