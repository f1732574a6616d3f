"""``AdamW8bit``: AdamW whose moments take eight bits for each element, whatever the mesh.

    step               fp32    a scalar
    exp_avg_codes      uint8   shape and placements of the parameter
    exp_avg_scale      fp32    a number for each block; see ``blocks.py``
    exp_avg_sq_codes   uint8
    exp_avg_sq_scale   fp32

A moment is decoded, advanced by the gradient, used, and encoded again, some thousand elements at a
time. Every operation rounds once and works on single elements, or takes a maximum. So the result
does not depend on who has which blocks, or on how many are computed at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import dtensor, fake
from shardwise.base.optim_names import named_in_group
from shardwise.optim.blocks import MomentBlocks
from shardwise.optim.checked import gradient
from shardwise.optim.codes import NEAREST, CodeBook, Range, share_of
from shardwise.optim.forms import STEP, Form, OwnStates
from shardwise.optim.moments import (
    CODES,
    MOMENTS,
    SCALES,
    MomentScratch,
    Rates,
    Update,
    agree_on_scales,
)

#: Tensors with fewer elements keep moments in fp32.
SMALLEST = 4096
#: Parameters that miss gradients are at other steps than others, and need other codes.
_BOOKS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        self._plans: dict[Tensor, _Plan] = {}
        self._books: dict[tuple[Range, torch.device, float], CodeBook] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plans, self._books = {}, {}  # which copies do not have
        super().__setstate__(state)

    def _rules(self, options: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
        yield "lr", options["lr"] >= 0.0, "0 or more"
        beta1, beta2 = options["betas"]
        yield "betas", 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0, "two from 0 to 1"
        yield "eps", options["eps"] >= 0.0, "0 or more"
        yield "weight_decay", options["weight_decay"] >= 0.0, "0 or more"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own.

        Args:
            param_group: ``params``, and options.

        Raises:
            TypeError: a parameter has an unsupported dtype.
            ValueError: an option is out of range.
        """
        super().add_param_group(param_group)
        for i, param in enumerate(self.param_groups[-1]["params"]):
            if param.dtype not in _DTYPES:
                at = len(self.param_groups) - 1
                self.param_groups.pop()
                raise TypeError(
                    f"AdamW8bit: parameter {i} of group {at}, of shape {list(param.shape)}: found "
                    f"dtype {param.dtype}, expected float32, bfloat16 or float16; give it to "
                    "torch.optim.AdamW"
                )

    def _forms(self, param: Tensor) -> Mapping[str, Form]:
        """What the moments of a parameter look like; see :class:`OwnStates`."""
        return self._plan(param).forms

    def _plan(self, param: Tensor) -> _Plan:
        if param not in self._plans:
            self._plans[param] = _Plan.of(param)
        return self._plans[param]

    def _step(self) -> None:
        todo = [
            (group, param, gradient(f"AdamW8bit, {name}", param))
            for number, group in enumerate(self.param_groups)
            for name, param in named_in_group(group, number)
            if param.grad is not None
        ]
        scratch: dict[torch.device, MomentScratch] = {}
        together: list[Update] = []
        for group, param, grad in todo:
            state, plan = self.state[param], self._plan(param)
            if not state:
                state.update(self.new_state(param))
            state[STEP] += 1
            device = dtensor.plain(param).device
            if device not in scratch:
                scratch[device] = MomentScratch(device)
            rates = Rates.of(group, state[STEP])
            books = self._books_of(state[STEP], device)
            update = Update(param, grad, state, plan.blocks, rates, books, scratch[device])
            if plan.blocks is not None and plan.blocks.shared_over:
                together.append(update)
            else:
                update.apply()
        agree_on_scales(together)
        for update in together:
            update.apply()

    def _books_of(self, step: Tensor, device: torch.device) -> tuple[CodeBook, CodeBook]:
        share = share_of(step.item()) if fake.has_values(step) else NEAREST
        return self._book(Range.SIGNED, device, NEAREST), self._book(Range.UNSIGNED, device, share)

    def _book(self, numbers: Range, device: torch.device, share: float) -> CodeBook:
        key = (numbers, device, share)
        if key not in self._books:
            if len(self._books) == _BOOKS:
                del self._books[next(iter(self._books))]  # the oldest
            self._books[key] = CodeBook(numbers, device, share)
        return self._books[key]


@dataclass(frozen=True)
class _Plan:
    """How the state of a parameter is laid out.

    Attributes:
        forms: what its tensors look like, by name, ``step`` left out.
        blocks: blocks of the moments; ``None`` if they are in fp32.
    """

    forms: Mapping[str, Form]
    blocks: MomentBlocks | None

    @classmethod
    def of(cls, param: Tensor) -> _Plan:
        if param.ndim < 2 or param.numel() < SMALLEST:
            return cls(dict.fromkeys(MOMENTS, Form.beside(param, torch.float32)), None)
        blocks = MomentBlocks.of(param)
        codes = Form.beside(param, torch.uint8)
        scales = Form.beside(
            param,
            torch.float32,
            blocks.scales_shape,
            blocks.scales_local,
            blocks.scales_placements,
        )
        return cls(dict.fromkeys(CODES, codes) | dict.fromkeys(SCALES, scales), blocks)
