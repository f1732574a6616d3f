"""``AdamW8bit``: AdamW whose moments take eight bits for each element, whatever the mesh.

    step               fp32    a scalar
    exp_avg_codes      uint8   shape and placements of the parameter
    exp_avg_scale      fp32    a number for each block; see ``blocks.py``
    exp_avg_sq_codes   uint8
    exp_avg_sq_scale   fp32

A moment is decoded, advanced by the gradient, used, and encoded again, some thousand elements at a
time. Every operation rounds once and works on single elements, or takes a maximum. So the result
does not depend on who has which blocks, or on how many are computed at a time. Fused operations
would not do: a compiler may round a product before it is added, or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base import devices
from shardwise.base.arguments import check_arguments
from shardwise.base.optim_names import STEP
from shardwise.optim.blocks import MomentBlocks, Tile
from shardwise.optim.checked import gradient, with_gradients
from shardwise.optim.codes import NEAREST, CodeBook, Range, share_of
from shardwise.optim.forms import Form, OwnStates
from shardwise.optim.reductions import Reductions

#: Tensors with fewer elements keep moments in fp32.
SMALLEST = 4096
#: Parameters that miss gradients are at other steps than others, and need other codes.
_BOOKS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

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


class AdamW8bit(OwnStates):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with moments of eight bits.

    Moments are quantized block by block, to the codes of 8-bit optimizers (Dettmers et al., arXiv
    2110.02861). A block is up to 256 consecutive elements of a row, wherever the tensor is cut, so
    the update is the same, bit for bit, on any mesh. Tensors of one dimension, or of fewer than
    4096 elements in all, keep moments in fp32.

    Where ranks share blocks, because a tensor is cut inside its rows, each step all-reduces the
    largest moments of these blocks. All ranks have to call :meth:`step` then.

    Parameters of bf16 and fp16 are updated in fp32, and rounded.

    Args:
        params: parameters, or groups of them; sharded or not. Their dtype is fp32, bf16 or fp16.
        lr: learning rate.
        betas: the shares that the moments keep in each step.
        eps: added to the root of the second moment.
        weight_decay: share of a parameter that is taken off, times ``lr``.

    Raises:
        TypeError: a parameter has another dtype.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        check_arguments(AdamW8bit.__init__, locals())
        self._blocks: dict[Tensor, tuple[object, MomentBlocks | None]] = {}
        self._books: dict[tuple[Range, torch.device, float], CodeBook] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._blocks, self._books = {}, {}  # which copies do not have
        super().__setstate__(state)

    def _rules(self, options: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
        beta1, beta2 = options["betas"]
        yield "betas", 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0, "two from 0 to 1"
        yield "eps", options["eps"] >= 0.0, "0 or more"

    def _check(self, where: str, param: Tensor, options: Mapping[str, Any]) -> None:
        if param.dtype not in _DTYPES:
            raise TypeError(
                f"{where}, of shape {list(param.shape)}: found dtype {param.dtype}, expected "
                "float32, bfloat16 or float16; give it to torch.optim.AdamW"
            )

    def _forms(self, param: Tensor) -> Mapping[str, Form]:
        """What the moments of a parameter look like; see :class:`OwnStates`."""
        blocks = self._blocks_of(param)
        if blocks is None:
            return dict.fromkeys(MOMENTS, Form.beside(param, torch.float32))
        shape, local, placements = (
            blocks.scales_shape,
            blocks.scales_local,
            blocks.scales_placements,
        )
        scales = Form.beside(param, torch.float32, shape, local, placements)
        codes = Form.beside(param, torch.uint8)
        return dict.fromkeys(CODES, codes) | dict.fromkeys(SCALES, scales)

    def _blocks_of(self, param: Tensor) -> MomentBlocks | None:
        """The blocks of a parameter's moments, as it is cut now; ``None`` if they are in fp32."""
        layout = dtensor.spec_of(param) if isinstance(param, DTensor) else None
        known, blocks = self._blocks.get(param, (self, None))
        if known is not layout:
            is_small = param.ndim < 2 or param.numel() < SMALLEST
            blocks = None if is_small else MomentBlocks.of(param)
            self._blocks[param] = layout, blocks
        return blocks

    def _step(self) -> None:
        todo = [
            (group, param, gradient(f"AdamW8bit, {name}", param))
            for group, named in with_gradients(self)
            for name, param in named
        ]
        scratch: dict[torch.device, MomentScratch] = {}
        together: list[Update] = []
        for group, param, grad in todo:
            state, blocks = self.state[param], self._blocks_of(param)
            if not state:
                state.update(self.new_state(param))
            state[STEP] += 1
            device = dtensor.plain(param).device
            if device not in scratch:
                scratch[device] = MomentScratch(device)
            share = share_of(state[STEP].item()) if dtensor.has_values(state[STEP]) else NEAREST
            first = self._book(Range.SIGNED, device, NEAREST)
            books = first, self._book(Range.UNSIGNED, device, share)
            update = Update(param, grad, state, blocks, group, books, scratch[device])
            if blocks is not None and blocks.shared_over:
                together.append(update)
            else:
                update.apply()
        agree_on_scales(together)
        for update in together:
            update.apply()

    def _book(self, numbers: Range, device: torch.device, share: float) -> CodeBook:
        key = (numbers, device, share)
        if key not in self._books:
            if len(self._books) == _BOOKS:
                del self._books[next(iter(self._books))]  # the oldest
            self._books[key] = CodeBook(numbers, device, share)
        return self._books[key]


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

    def matrices(self, rows: int, columns: int) -> _MatrixBatch:
        """Matrices to work in; ``rows * columns`` is at most ``size``."""
        every = (*self._floats, self._index, self._bits)
        return _MatrixBatch(*(each[: rows * columns].view(rows, columns) for each in every))


@dataclass(frozen=True)
class _MatrixBatch:
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
        group: the options of its group; see Algorithm 2 of arXiv 1711.05101.
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
        group: Mapping[str, Any],
        books: tuple[CodeBook, CodeBook],
        scratch: MomentScratch,
    ) -> None:
        self._blocks, self._books, self._scratch = blocks, books, scratch
        # Tensors without dimensions, since a rehearsal has no values.
        lr, decay, count = group["lr"], group["weight_decay"], state[STEP].double()
        self._betas = beta1, beta2 = group["betas"]
        self._eps = group["eps"]
        self._kept: float | Tensor | None = 1 - lr * decay if decay else None
        # The learning rate and the root, with the bias corrections of both moments.
        self._size = (lr / (1 - beta1**count)).float()
        self._root = (1 - beta2**count).rsqrt().float()
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

    def _advanced(self, tile: Tile) -> _MatrixBatch:
        """Decode the moments of a tile, and take in the gradient."""
        at = (tile.rows, tile.columns)
        codes = [moment[at] for moment in self._moments]
        work = self._scratch.matrices(*codes[0].shape)
        for code, scale, book, beta, out in zip(
            codes,
            self._scales,
            self._books,
            self._betas,
            (work.first, work.second),
            strict=True,
        ):
            book.decode(code, work.index, out)
            decayed = scale[tile.rows, tile.blocks] * beta
            _by_block(out, tile).mul_(decayed.unsqueeze(-1))
        self._take_in(work, self._grad[at])
        return work

    def _take_in(self, work: _MatrixBatch, grad: Tensor) -> None:
        """Add a gradient's share to both moments, which have decayed."""
        beta1, beta2 = self._betas
        if grad.dtype != torch.float32:
            grad = work.grad.copy_(grad)
        work.first.add_(torch.mul(grad, 1 - beta1, out=work.free))
        work.second.add_(torch.mul(grad, grad, out=work.free).mul_(1 - beta2))

    def _descend(self, work: _MatrixBatch, param: Tensor) -> None:
        """Update part of the parameter by its moments, which are overwritten."""
        step = torch.sqrt(work.second, out=work.free).mul_(self._root).add_(self._eps)
        torch.div(work.first, step, out=step).mul_(self._size)
        values = param if param.dtype == torch.float32 else work.second.copy_(param)
        if self._kept is not None:
            values.mul_(self._kept)
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
                moments, self._betas, (work.first, work.second), strict=True
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


def _largest(work: _MatrixBatch, tile: Tile) -> list[Tensor]:
    """The largest absolute value of each block, for both moments; second moments have no sign."""
    torch.abs(work.first, out=work.free)
    return [_by_block(each, tile).amax(-1) for each in (work.free, work.second)]


def _by_block(matrix: Tensor, tile: Tile) -> Tensor:
    """A matrix of a tile's size as (rows, blocks, elements of a block)."""
    return matrix.view(matrix.shape[0], -1, tile.width)
