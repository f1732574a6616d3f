"""The header of a safetensors file: read from strangers, and made. No torch here.

    8 bytes     how long the header is
    header      JSON: of each tensor its dtype, shape, and first and last byte among the elements
    elements    tensor after tensor

Source: the safetensors format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.disk.reading import read_exactly
from shardwise.checkpoint.disk.strict import Fields, check_number, parse, refuse
from shardwise.errors import CheckpointError

#: The longest header that the safetensors library reads.
MAX_HEADER = 100_000_000
_ALIGN = 64  # bytes: elements begin where a cache line does


def read_fields(handle: int, size: int, file: Path) -> tuple[int, dict[str, Any]]:
    """What the header of an open file says; what it says is not checked.

    Args:
        handle: of the file.
        size: of the file in bytes.
        file: for messages.

    Returns:
        The byte at which the elements begin, and the fields.

    Raises:
        CheckpointError: the header is truncated, too long, or not one of such a file.
    """
    if size < 8:
        refuse(str(file), f"{size} bytes", "the header of a safetensors file")
    prefix = bytearray(8)
    read_exactly(handle, memoryview(prefix), 0, file)
    length = int.from_bytes(prefix, "little")
    where = f"{file}, header"
    check_number(length, f"{where}, length", least=2, most=min(MAX_HEADER, max(2, size - 8)))
    text = bytearray(length)
    read_exactly(handle, memoryview(text), 8, file)
    return 8 + length, Fields(parse(bytes(text), where), where).all()


def make_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the elements.

    Args:
        tensors: what is in the file, in the order in which it follows.
        metadata: what else the header says; none where it is empty.

    Raises:
        CheckpointError: there are more tensors than fit in a header.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, info in tensors.items():
        start, end = end, end + info.nbytes
        fields[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"found {len(tensors):,} tensors, more than fit in the header of one safetensors file; "
            "write more files (--max-shard-size)"
        )
    return len(text).to_bytes(8, "little") + text
