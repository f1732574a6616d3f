"""Compare two checkpoints of any formats, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardwise.base.ordering import nan_last
from shardwise.checkpoint.disk.entries import StatePath, dotted, torch_dtype
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER, ReadWindow, Source, Watch, unwatched

_WIDENED = 8  # values of both checkpoints are compared in 64 bits, which takes more memory


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    Attributes:
        name: name of the tensor or value.
        what: ``missing`` (in one of them), ``shape``, ``dtype`` or ``value``.
        first: what the first checkpoint has, as text.
        second: what the second checkpoint has.
        max_abs: the largest absolute difference of two elements if the shapes are equal; ``nan`` if
            one element is not a number and the other is.
        count: number of elements that differ.
    """

    name: str
    what: str
    first: str
    second: str
    max_abs: float | None = None
    count: int | None = None


def differences(
    first: Source, second: Source, *, buffer: int = DEFAULT_BUFFER, watch: Watch = unwatched
) -> Iterator[Difference]:
    """Compare two checkpoints: names, shapes, dtypes and values.

    Args:
        first: one checkpoint.
        second: the other.
        buffer: bytes of memory to use.
        watch: called with the number of bytes to compare; the function that it returns is called
            with the bytes of each part that was compared.

    Yields:
        The differences, in the order of the first checkpoint.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    both = [path for path in first.tensors if path in second.tensors]
    window = ReadWindow(
        max(4096, buffer // _WIDENED), watch(sum(first.tensors[path].nbytes for path in both))
    )
    for path, info in first.tensors.items():
        other = second.tensors.get(path)
        if other is None:
            yield Difference(dotted(path), "missing", f"{info.dtype} {list(info.shape)}", "")
        elif info.shape != other.shape:
            yield Difference(dotted(path), "shape", str(list(info.shape)), str(list(other.shape)))
        else:
            max_abs, count = _compare(first, second, path, window)
            if count or info.dtype != other.dtype:
                what = "dtype" if info.dtype != other.dtype else "value"
                yield Difference(dotted(path), what, info.dtype, other.dtype, max_abs, count)
    for path, info in second.tensors.items():
        if path not in first.tensors:
            yield Difference(dotted(path), "missing", "", f"{info.dtype} {list(info.shape)}")
    yield from _values(first, second)


def _compare(
    first: Source, second: Source, path: StatePath, window: ReadWindow
) -> tuple[float, int]:
    """The largest absolute difference of two elements, and the number of elements that differ."""
    largest, count = 0.0, 0
    other_dtype = second.tensors[path].dtype
    same_dtype = first.tensors[path].dtype == other_dtype
    for box, part in window.parts(first, path):
        other = torch.empty(box.sizes, dtype=torch_dtype(other_dtype))
        second.read(path, box, other)
        if same_dtype and torch.equal(_bits(part), _bits(other)):
            continue
        a, b = _wide(part), _wide(other)
        # float64 cannot tell all 64-bit integers apart.
        exact = same_dtype and not (part.is_floating_point() or part.is_complex())
        apart = part != other if exact else (a != b) & ~(a.isnan() & b.isnan())
        count += int(apart.sum())
        if apart.any():
            here = float((a - b).abs()[apart].max())
            largest = max(largest, here, key=nan_last)
    return largest, count


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _values(first: Source, second: Source) -> Iterator[Difference]:
    a, b = _flat(first), _flat(second)
    for name in {**a, **b}:
        if a.get(name) != b.get(name):
            what = "value" if name in a and name in b else "missing"
            yield Difference(name, what, a.get(name, ""), b.get(name, ""))


def _flat(source: Source) -> dict[str, str]:
    """Plain values as text, by name. Lists and dicts are flattened: formats differ in that."""
    found: dict[str, str] = {}

    def visit(name: str, value: object) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, list) and value:
            for i, item in enumerate(value):
                visit(f"{name}.{i}", item)
        else:
            found[name] = repr(value)

    for path, value in source.values.items():
        visit(dotted(path), value)
    return found
