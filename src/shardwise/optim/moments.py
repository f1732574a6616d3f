"""One step of one parameter whose moments are quantized: tile by tile, in memory that stays small.

Bits must not depend on where a tile begins. So every operation here rounds once, which fused ones
do not: a compiler may round a product before it is added, or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base import devices
from shardwise.optim.blocks import MomentBlocks, Tile
from shardwise.optim.codes import CodeBook
from shardwise.optim.reductions import Reductions

#: The moments in fp32, as the state of any AdamW names them.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Their codes and scales. Another AdamW that were given codes for moments would not notice.
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")

#: Elements that a thread of a CPU advances at a time: what it works with fits into its cache.
AT_ONCE = 1 << 16
#: The same on accelerators, where each operation takes long to start.
AT_ONCE_ON_DEVICE = 1 << 22

#: Scales are at least the smallest normal number, so that zeros can be divided by them.
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Rates:
    """The factors of one step of a parameter; see Algorithm 2 of arXiv 1711.05101.

    Attributes:
        betas: of the moments.
        eps: added to the root of the second moment.
        kept: share of the parameter that weight decay leaves; ``None``: all of it.
        size: learning rate, over the bias correction of the first moment.
        root: one over the root of the bias correction of the second moment.
    """

    betas: tuple[float, float]
    eps: float
    kept: float | Tensor | None
    size: Tensor
    root: Tensor

    @classmethod
    def of(cls, group: Mapping[str, Any], step: Tensor) -> Rates:
        """The factors from the options of a parameter group and the number of the step."""
        # Tensors without dimensions, since a rehearsal has no values.
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        count = step.double()
        return cls(
            betas=(beta1, beta2),
            eps=group["eps"],
            kept=1 - lr * decay if decay else None,
            size=(lr / (1 - beta1**count)).float(),
            root=(1 - beta2**count).rsqrt().float(),
        )


class MomentScratch:
    """Memory to work in, for all parameters on a device.

    Args:
        device: the device.

    Attributes:
        size: the most elements of a tile.
    """

    def __init__(self, device: torch.device) -> None:
        on_host = device.type == devices.CPU.type
        self.size = AT_ONCE * torch.get_num_threads() if on_host else AT_ONCE_ON_DEVICE
        self._floats = [torch.empty(self.size, device=device) for _ in range(4)]
        self._index = torch.empty(self.size, dtype=torch.int64, device=device)
        self._bits = torch.empty(self.size, dtype=torch.int32, device=device)

    def matrices(self, rows: int, columns: int) -> _Work:
        """Matrices to work in; ``rows * columns`` is at most ``size``."""
        every = (*self._floats, self._index, self._bits)
        return _Work(*(each[: rows * columns].view(rows, columns) for each in every))


@dataclass(frozen=True)
class _Work:
    """Contiguous matrices of one size.

    Attributes:
        first: the first moment; fp32.
        second: the second moment; fp32.
        grad: the gradient, if it has to be converted; fp32.
        free: for anything in between; fp32.
        index: int64.
        bits: int32.
    """

    first: Tensor
    second: Tensor
    grad: Tensor
    free: Tensor
    index: Tensor
    bits: Tensor


class Update:
    """One step of one parameter, over this rank's part of it.

    Args:
        param: the parameter.
        grad: its gradient, placed as the parameter is.
        state: its state, with the names of :data:`MOMENTS`, or of :data:`CODES` and :data:`SCALES`.
        blocks: the blocks of the moments; ``None`` if they are in fp32.
        rates: the factors of the step.
        books: codes of the first moment, and of the second one.
        scratch: memory to work in.

    Attributes:
        sharers: the process groups whose ranks share blocks with this one.
        agreed: what the scales become, where :func:`agree_on_scales` has to find out; else empty.
    """

    def __init__(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        blocks: MomentBlocks | None,
        rates: Rates,
        books: tuple[CodeBook, CodeBook],
        scratch: MomentScratch,
    ) -> None:
        self._blocks, self._rates, self._books, self._scratch = blocks, rates, books, scratch
        local = dtensor.plain(param).detach()
        # Without blocks, a tensor is one row that may be divided anywhere.
        rows, columns = (blocks.rows, blocks.columns) if blocks else (1, local.numel())
        # Memory that is no matrix is copied, and copied back.
        self._copied_from = None if local.is_contiguous() else local
        self._param = local.contiguous().view(rows, columns)
        self._grad = dtensor.wait_tensor(dtensor.plain(grad)).reshape(rows, columns)
        names = MOMENTS if blocks is None else CODES
        self._moments = [dtensor.plain(state[name]).view(rows, columns) for name in names]
        self._scales: list[Tensor] = []
        self.agreed: list[Tensor] = []
        self.sharers: list[dist.ProcessGroup] = []
        if blocks is not None:
            held = blocks.scales_local[-1]
            self._scales = [dtensor.plain(state[name]).view(rows, held) for name in SCALES]
            if blocks.shared_over:
                assert isinstance(param, DTensor)
                mesh = param.device_mesh
                self.sharers = [mesh.get_group(dim) for dim in blocks.shared_over]

    def measure(self) -> list[Tensor]:
        """Find the largest moments of each block among this rank's elements.

        Returns:
            The future scales of both moments, which this rank does not know alone; 0 in blocks of
            which it has nothing.
        """
        self.agreed = [torch.zeros_like(each) for each in self._scales]
        for tile in self._tiles():
            work = self._advanced(tile)
            for into, found in zip(self.agreed, _largest(work, tile), strict=True):
                into[tile.rows, tile.blocks] = found
        return self.agreed

    def apply(self) -> None:
        """Update the parameter and its moments."""
        if self._blocks is None:
            self._apply_in_fp32()
            return
        for tile in self._tiles():
            work = self._advanced(tile)
            scales = [each[tile.rows, tile.blocks] for each in self.agreed] or _largest(work, tile)
            for moment, advanced, scale, book, kept in zip(
                self._moments,
                (work.first, work.second),
                scales,
                self._books,
                self._scales,
                strict=True,
            ):
                scale.clamp_(min=_LEAST)
                torch.div(
                    _by_block(advanced, tile), scale.unsqueeze(-1), out=_by_block(work.free, tile)
                )
                book.encode(work.free, work.index, work.bits, moment[tile.rows, tile.columns])
                if not self.agreed:
                    kept[tile.rows, tile.blocks] = scale
            self._descend(work, self._param[tile.rows, tile.columns])
        for kept, scale in zip(self._scales, self.agreed, strict=False):
            kept.copy_(scale)
        self._write_back()

    def _tiles(self) -> Iterator[Tile]:
        assert self._blocks is not None
        return self._blocks.tiles(self._scratch.size)

    def _advanced(self, tile: Tile) -> _Work:
        """Decode the moments of a tile, and take in the gradient."""
        at = (tile.rows, tile.columns)
        codes = [moment[at] for moment in self._moments]
        work = self._scratch.matrices(*codes[0].shape)
        for code, scale, book, beta, out in zip(
            codes,
            self._scales,
            self._books,
            self._rates.betas,
            (work.first, work.second),
            strict=True,
        ):
            book.decode(code, work.index, out)
            decayed = scale[tile.rows, tile.blocks] * beta
            _by_block(out, tile).mul_(decayed.unsqueeze(-1))
        self._take_in(work, self._grad[at])
        return work

    def _take_in(self, work: _Work, grad: Tensor) -> None:
        """Add a gradient's share to both moments, which have decayed."""
        beta1, beta2 = self._rates.betas
        if grad.dtype != torch.float32:
            grad = work.grad.copy_(grad)
        work.first.add_(torch.mul(grad, 1 - beta1, out=work.free))
        work.second.add_(torch.mul(grad, grad, out=work.free).mul_(1 - beta2))

    def _descend(self, work: _Work, param: Tensor) -> None:
        """Update part of the parameter by its moments, which are overwritten."""
        rates = self._rates
        step = torch.sqrt(work.second, out=work.free).mul_(rates.root).add_(rates.eps)
        torch.div(work.first, step, out=step).mul_(rates.size)
        values = param if param.dtype == torch.float32 else work.second.copy_(param)
        if rates.kept is not None:
            values.mul_(rates.kept)
        values.sub_(step)
        if values is not param:
            param.copy_(values)

    def _apply_in_fp32(self) -> None:
        columns = self._param.shape[1]
        for start in range(0, columns, self._scratch.size):
            at = slice(start, min(start + self._scratch.size, columns))
            work = self._scratch.matrices(1, at.stop - at.start)
            moments = [moment[:, at] for moment in self._moments]
            for moment, beta, out in zip(
                moments, self._rates.betas, (work.first, work.second), strict=True
            ):
                torch.mul(moment, beta, out=out)
            self._take_in(work, self._grad[:, at])
            for moment, advanced in zip(moments, (work.first, work.second), strict=True):
                moment.copy_(advanced)
            self._descend(work, self._param[:, at])
        self._write_back()

    def _write_back(self) -> None:
        if self._copied_from is not None:
            self._copied_from.copy_(self._param.view(self._copied_from.shape))


def agree_on_scales(updates: Sequence[Update]) -> None:
    """Find the scales of blocks that ranks share: of each, the largest on any rank.

    All ranks that share blocks call this, with the same parameters in the same order.

    Args:
        updates: steps of parameters that are cut inside their rows.

    Raises:
        PeerLostError: a rank is gone.
    """
    scales = Reductions("the scales of AdamW8bit", dist.ReduceOp.MAX)
    for update in updates:
        for scale in update.measure():
            scales.add(scale, update.sharers)
    scales.run()


def _largest(work: _Work, tile: Tile) -> list[Tensor]:
    """The largest absolute value of each block, for both moments; second moments have no sign."""
    torch.abs(work.first, out=work.free)
    return [_by_block(each, tile).amax(-1) for each in (work.free, work.second)]


def _by_block(matrix: Tensor, tile: Tile) -> Tensor:
    """A matrix of a tile's size as (rows, blocks, elements of a block)."""
    return matrix.view(matrix.shape[0], -1, tile.width)
