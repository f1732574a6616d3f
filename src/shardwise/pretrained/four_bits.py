"""Frozen linear layers in four bits (NF4), below adapters that are trained.

Each row is cut into blocks of 64 elements, with a scale each, and nothing else depends on other
rows. So rows are sharded and gathered as those of any parameter, each rank packs its own, and the
values are the same on any number of ranks.

Source: Dettmers et al., "QLoRA", arXiv 2305.14314. bitsandbytes packs and unpacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from shardwise._torch import dtensor

_BLOCK = 64
_FORMAT = "nf4"


class FourBitLinear(nn.Module):
    """A frozen linear layer with its weight in four bits.

    Args:
        linear: the layer that it replaces, on the meta device.

    Attributes:
        codes: of the elements, two in each byte: ``(out_features, in_features / 2)``, uint8.
        scales: of blocks: ``(out_features, in_features / 64)``.
        bias: of the layer that it replaces.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rows = self.out_features
        codes = torch.empty(rows, self.in_features // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(rows, self.in_features // _BLOCK, device="meta")
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute as ``nn.Linear`` does, in the dtype of ``x``."""
        product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, self.codes, self.scales, self.bias
        )
        return product

    def empty_rows(self) -> torch.Tensor:
        """Return memory for this rank's rows of the weight, placed as the codes are."""
        codes: torch.Tensor = self.codes
        shape = (self.out_features, self.in_features)
        if not isinstance(codes, DTensor):
            return torch.empty(shape, device=codes.device)
        return empty_dtensor(*shape, device_mesh=codes.device_mesh, placements=codes.placements)

    def pack(self, rows: torch.Tensor) -> None:
        """Take this rank's rows of the weight; see :meth:`empty_rows`."""
        own = dtensor.plain(rows)
        codes, scales = dtensor.plain(self.codes.detach()), dtensor.plain(self.scales.detach())
        if own.numel():
            packed, state = _library().quantize_4bit(own, blocksize=_BLOCK, quant_type=_FORMAT)
            codes.copy_(packed.view(codes.shape))
            scales.copy_(state.absmax.view(scales.shape))


class _Product(torch.autograd.Function):
    """Unpacks the weight in forward and again in backward, which keeps four bits between them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, unpacked(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, None, None, None]:
        (grad,) = grads
        codes, scales = ctx.saved_tensors
        return grad @ unpacked(codes, scales, grad.dtype), None, None, None


def unpacked(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight that codes and scales stand for: ``(out_features, in_features)``."""
    library, shape = _library(), (codes.shape[0], 2 * codes.shape[1])
    state = library.QuantState(
        scales.float().flatten(),
        shape=shape,
        code=library.get_4bit_type(_FORMAT, codes.device),
        blocksize=_BLOCK,
        quant_type=_FORMAT,
        dtype=dtype,
    )
    weight: torch.Tensor = library.dequantize_4bit(codes.view(-1, 1), state)
    return weight


def store_in_four_bits(model: nn.Module) -> None:
    """Replace frozen linear layers below adapters by such with weights in four bits.

    The head, tied weights, and weights whose rows are no whole blocks stay as they are.

    Args:
        model: of peft, on the meta device, not sharded.
    """
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    owners: dict[torch.Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child is find() or child.in_features % _BLOCK:
                continue
            if owners[child.weight] == 1 and not child.weight.requires_grad:
                setattr(parent, name, FourBitLinear(child))


def four_bit_layers(model: nn.Module) -> Iterator[tuple[str, FourBitLinear]]:
    """Yield the layers in four bits, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, FourBitLinear):
            yield name, module


def _library() -> Any:
    import bitsandbytes.functional  # takes a second

    return bitsandbytes.functional
