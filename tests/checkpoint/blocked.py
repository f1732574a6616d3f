"""A tensor subclass in blocks that share a scale, as 8-bit states of optimizers are."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 4
_aten: Any = torch.ops.aten


class Blocked(torch.Tensor):
    """A tensor whose flat elements are cut into blocks of :data:`BLOCK`.

    Attributes:
        codes: uint8, of the shape of the tensor.
        scale: one for each block.
        table: what each code stands for; the same for all tensors.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Blocked],
        codes: torch.Tensor,
        scale: torch.Tensor,
        table: torch.Tensor,
        dtype: torch.dtype,
    ) -> Blocked:
        tensor: Any = torch.Tensor
        made = tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        made.codes, made.scale, made.table = codes, scale, table
        assert codes.numel() == BLOCK * scale.numel(), "a block is divided"
        return made  # type: ignore[no-any-return]

    @classmethod
    def of(cls, values: torch.Tensor) -> Blocked:
        """Round values, so that the largest one of each block stays what it is."""
        blocks = values.float().reshape(-1, BLOCK)
        scale = blocks.abs().amax(1)
        codes = (blocks / scale.clamp(min=1e-9)[:, None] * 127).round() + 128
        table = (torch.arange(256) - 128) / 127
        return cls(codes.to(torch.uint8).view(values.shape), scale, table, values.dtype)

    @property
    def values(self) -> torch.Tensor:
        """What the tensor stands for, in float32."""
        return self.table[self.codes.long()] * self.scale.repeat_interleave(BLOCK).view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], [self.dtype, self.shape]

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> Blocked:
        dtype, shape = context
        assert tuple(shape) == parts["codes"].shape
        return cls(parts["codes"], parts["scale"], parts["table"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.slice.Tensor:
            tensor, dim, first, end = args[:4]
            row = tensor.codes[0].numel()
            if dim or first * row % BLOCK or end * row % BLOCK:
                raise ValueError("a block is divided")
            scale = tensor.scale[first * row // BLOCK : end * row // BLOCK]
            return cls(tensor.codes[first:end], scale, tensor.table.clone(), tensor.dtype)
        if func is _aten.copy_.default and not isinstance(args[0], cls):
            return args[0].copy_(args[1].values)
        if func in (_aten.detach.default, _aten.alias.default):
            [tensor] = args
            return cls(tensor.codes, tensor.scale, tensor.table, tensor.dtype)
        raise NotImplementedError(f"{func} on {types}")
