"""A step of Adafactor on one parameter: what ranks have to add up, and what each does alone.

A parameter of two or more dimensions is a stack of matrices. The second moment of a matrix is
estimated from the means of its rows and of its columns, and the step is scaled by norms of the
whole parameter. So a rank that has a part needs sums from the others:

    measure   squares of the gradient by rows and by columns, and of the parameter
    compute   squares of the update

Nothing is changed before the last sum is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import dtensor
from shardwise.optim.checked import AT_ONCE
from shardwise.optim.forms import STEP
from shardwise.optim.reductions import Reductions, groups_cutting

#: States of a parameter of two or more dimensions, and of any other one; as in torch.
ROWS, COLUMNS, ELEMENTS = "row_var", "col_var", "variance"

#: Which matrices of a stack, and which of their rows.
_At = tuple[slice, slice]


@dataclass(frozen=True)
class FactoredRates:
    """The factors of one step of a parameter.

    Attributes:
        new: share of this step's squares in the averages of squares; 0-dim.
        size: the largest relative step; 0-dim.
        floor: the least root of the mean square of a parameter.
        eps: the least root of a second moment.
        threshold: the root of the mean square of an update above which it is scaled down.
        kept: share of the parameter that weight decay leaves.
        sign: -1 to descend, 1 to ascend.
    """

    new: Tensor
    size: Tensor
    floor: float
    eps: float
    threshold: float
    kept: float
    sign: int

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], step: Tensor, dtype: torch.dtype, device: torch.device
    ) -> FactoredRates:
        """The factors from the settings of a parameter group.

        Args:
            settings: of the group; ``lr`` is a plain number.
            step: the number of the step, 0-dim.
            dtype: that the update is computed in.
            device: of the parameter.
        """
        # Tensors, since a rehearsal has no values.
        eps, floor = settings["eps"]
        lr, count = settings["lr"], step.double()
        return cls(
            new=(count ** settings["beta2_decay"]).to(device, dtype),
            size=count.rsqrt().clamp(max=lr).to(device, dtype),
            floor=floor,
            eps=torch.finfo(dtype).eps if eps is None else eps,
            threshold=settings["d"],
            kept=1 - lr * settings["weight_decay"],
            sign=1 if settings["maximize"] else -1,
        )


class FactoredUpdate:
    """One step of one parameter, over this rank's part of it.

    Call :meth:`measure` and :meth:`compute`, let ranks add up after each, and call :meth:`apply`.

    Args:
        param: the parameter.
        grad: its gradient, placed as the parameter is.
        state: its state.
        rates: the factors of the step.

    Attributes:
        device: of the parameter.
        groups: the process groups whose ranks have parts of it.
    """

    def __init__(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], rates: FactoredRates
    ) -> None:
        self._rates = rates
        self._param, self._grad = dtensor.plain(param), dtensor.plain(grad)
        self._numel, self.device = param.numel(), self._param.device
        self.groups = groups_cutting(param)
        self._state = {name: dtensor.plain(state[name]) for name in state if name != STEP}
        own = {name: as_stack(each) for name, each in self._state.items()}
        self._estimate: _Factors | _Elements
        if ROWS in own:
            rows, columns = (groups_cutting(param, {param.ndim - n}) for n in (2, 1))
            height, width = param.shape[-2:]
            self._estimate = _Factors(
                _Means(own[ROWS], width, columns), _Means(own[COLUMNS], height, rows), rates
            )
        else:
            self._estimate = _Elements(own[ELEMENTS], rates)
        self._dtype = self._estimate.dtype
        self._param_square = torch.zeros((), dtype=self._dtype, device=self.device)
        self._update_square = self._param_square.clone()

    def measure(self, sums: Reductions) -> None:
        """Sum squares of the gradient and of the parameter."""
        param, grad = as_stack(self._param), as_stack(self._grad)
        for at in _pieces_of(grad.shape):
            self._param_square += param[at].to(self._dtype).square().sum()
            self._estimate.take(at, grad[at].to(self._dtype).square())
        sums.add(self._param_square, self.groups)
        self._estimate.measure(sums)

    def compute(self, sums: Reductions) -> None:
        """Sum squares of the update."""
        self._estimate.advance()
        grad = as_stack(self._grad)
        for at in _pieces_of(grad.shape):
            self._update_square += self._update(at, grad).square_().sum()
        sums.add(self._update_square, self.groups)

    def apply(self) -> None:
        """Update the parameter and its state."""
        if not self._numel:
            return
        rates, root = self._rates, math.sqrt(self._numel)
        scale = self._param_square.sqrt().div_(root).clamp_(min=rates.floor) * rates.size
        excess = self._update_square.sqrt().div_(root * rates.threshold).clamp_(min=1)
        factor = scale.div_(excess).mul_(rates.sign)
        param, grad = as_stack(self._param), as_stack(self._grad)
        for at in _pieces_of(grad.shape):
            piece = param[at]
            wide = piece.to(self._dtype)  # itself, if it has this dtype
            if rates.kept != 1:
                wide.mul_(rates.kept)
            wide.add_(self._update(at, grad).mul_(factor))
            if wide is not piece:
                piece.copy_(wide)
        if not _is_stack(self._param):
            self._param.copy_(param.view(self._param.shape))
        for name, averages in self._estimate.advanced.items():
            self._state[name].copy_(averages.view(self._state[name].shape))

    def _update(self, at: _At, grad: Tensor) -> Tensor:
        """Compute a piece of the update, before it is scaled."""
        least = self._rates.eps * self._rates.eps
        return self._estimate.piece(at).clamp_(min=least).rsqrt_().mul_(grad[at])


@dataclass(frozen=True)
class _Means:
    """The averages of the means of rows, or of columns.

    Attributes:
        averages: this rank's part of them, (count, rows, 1) or (count, 1, columns).
        size: elements of a whole row or column.
        cut: the process groups whose ranks have parts of a row or column.
    """

    averages: Tensor
    size: int
    cut: Sequence[dist.ProcessGroup]


class _Factors:
    """The second moments of matrices, estimated from the means of their rows and columns."""

    def __init__(self, rows: _Means, columns: _Means, rates: FactoredRates) -> None:
        self.dtype = rows.averages.dtype
        self._rows, self._columns, self._rates = rows, columns, rates
        self._by_row, self._by_column = (
            torch.zeros_like(each.averages, memory_format=torch.contiguous_format)
            for each in (rows, columns)
        )

    def take(self, at: _At, squares: Tensor) -> None:
        """Sum up a piece of the squares of the gradient."""
        self._by_row[at] = squares.sum(-1, keepdim=True)
        self._by_column[at[0]] += squares.sum(-2, keepdim=True)

    def measure(self, sums: Reductions) -> None:
        """Add up with other ranks."""
        rows, columns = self._rows, self._columns
        # The mean of all rows needs no second message: it is advanced as the rows are.
        self._mean_before = sums.add(rows.averages.sum(-2, keepdim=True), columns.cut)
        self._square = sums.add(self._by_row.sum(-2, keepdim=True), (*rows.cut, *columns.cut))
        sums.add(self._by_row, rows.cut)
        sums.add(self._by_column, columns.cut)

    def advance(self) -> None:
        """Compute the next averages."""
        rows, columns, new = self._rows, self._columns, self._rates.new
        self._new_rows = rows.averages.lerp(self._by_row.div_(rows.size), new)
        self._new_columns = columns.averages.lerp(self._by_column.div_(columns.size), new)
        mean = self._mean_before.lerp_(self._square.div_(rows.size), new).div_(columns.size)
        self._relative = self._new_rows / mean.clamp_(min=self._rates.eps)

    def piece(self, at: _At) -> Tensor:
        """Return a piece of the second moments, in memory of its own."""
        return self._relative[at] * self._new_columns[at[0]]

    @property
    def advanced(self) -> Mapping[str, Tensor]:
        """The next averages, by the names of states."""
        return {ROWS: self._new_rows, COLUMNS: self._new_columns}


class _Elements:
    """The second moments of a vector, element by element, (1, 1, elements)."""

    def __init__(self, averages: Tensor, rates: FactoredRates) -> None:
        self.dtype = averages.dtype
        self._averages, self._rates = averages, rates
        self._new = averages.clone(memory_format=torch.contiguous_format)

    def take(self, at: _At, squares: Tensor) -> None:
        """Advance a piece by the squares of the gradient."""
        self._new[at] = self._averages[at].lerp(squares, self._rates.new)

    def measure(self, sums: Reductions) -> None:
        """Do nothing: no rank needs more than it has."""

    def advance(self) -> None:
        """Do nothing."""

    def piece(self, at: _At) -> Tensor:
        """Return a piece of the second moments, in memory of its own."""
        return self._new[at].clone()

    @property
    def advanced(self) -> Mapping[str, Tensor]:
        """The next averages, by the names of states."""
        return {ELEMENTS: self._new}


def _pieces_of(shape: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield the pieces of a stack of matrices: which matrices, and which of their rows.

    Args:
        shape: number of matrices, rows and columns.
    """
    count, rows, columns = shape
    if not count * rows * columns:
        return
    matrices = max(1, AT_ONCE // (rows * columns))
    height = rows if rows * columns <= AT_ONCE else max(1, AT_ONCE // columns)
    for first in range(0, count, matrices):
        for top in range(0, rows, height):
            yield slice(first, first + matrices), slice(top, top + height)


def as_stack(tensor: Tensor) -> Tensor:
    """See a tensor as a stack of matrices, of its last two dimensions; a vector as a row.

    It is a copy where the memory of a tensor cannot be seen so, as that of convolutions with
    channels last.
    """
    if tensor.ndim < 2:
        return tensor.view(1, 1, tensor.numel()) if tensor.ndim == 0 else tensor[None, None]
    shape = (math.prod(tensor.shape[:-2]), *tensor.shape[-2:])
    return tensor.view(shape) if _is_stack(tensor) else tensor.reshape(shape)


def _is_stack(tensor: Tensor) -> bool:
    """Whether :func:`as_stack` copies nothing."""
    if tensor.ndim < 4:
        return True
    sizes, strides = tensor.shape[:-2], tensor.stride()[:-2]
    return tensor.numel() == 0 or all(
        strides[n] == strides[n + 1] * sizes[n + 1] or sizes[n] == 1 for n in range(len(sizes) - 1)
    )
