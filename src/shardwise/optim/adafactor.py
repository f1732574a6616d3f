"""``Adafactor``: the update of ``torch.optim.Adafactor`` on parameters cut over any mesh.

    step       fp32   a scalar
    row_var    fp32   the means of rows, for parameters of two or more dimensions
    col_var    fp32   the means of columns
    variance   fp32   for all others

A parameter of two or more dimensions is a stack of matrices. The second moment of a matrix is
estimated from the means of its rows and of its columns, and the step is scaled by norms of the
whole parameter. So a rank that has a part needs sums from the others:

    measure   squares of the gradient by rows and by columns, and of the parameter
    compute   squares of the update

All parameters take each part together, so that ranks add up what all of them need at once. Nothing
is changed before the last sum is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwise._torch import dtensor
from shardwise.base.arguments import check_arguments
from shardwise.base.optim_names import STEP, parameters_in_order
from shardwise.optim.checked import AT_ONCE, gradient, with_gradients
from shardwise.optim.forms import Form, OwnStates
from shardwise.optim.pool import Pools
from shardwise.optim.reductions import Reductions, abandon, groups_cutting

_DOING = "the step of Adafactor"
#: States of a parameter of two or more dimensions, and of any other one; as in torch.
ROWS, COLUMNS, ELEMENTS = "row_var", "col_var", "variance"

#: Which matrices of a stack, and which of their rows.
_At = tuple[slice, slice]


class Adafactor(OwnStates):
    """Adafactor, of Shazeer and Stern (arXiv 1804.04235), on parameters cut over any mesh.

    Arguments and update are those of ``torch.optim.Adafactor`` on full tensors, up to the rounding
    of fp32: means of rows and columns, and norms, are those of the whole parameter. Ranks add up
    what they need for all parameters at once, so a step takes two small all-reduces for each mesh
    dimension that cuts parameters, however many these are. All ranks have to call :meth:`step`.

    Averages have the dtype fp32 (fp64 for parameters of fp64), and everything is computed in it:
    parameters of bf16 and fp16 are updated as fp32 ones would be, and rounded.

    Args:
        params: parameters, or groups of them, named or not; sharded or not.
        lr: the largest step, relative to the root of the mean square of a parameter; weight decay
            is multiplied by it.
        beta2_decay: exponent that the share of old squares follows; 0 or less.
        eps: the least root of a second moment (``None``: the resolution of the dtype that it is
            computed in), and the least root of the mean square of a parameter.
        d: the root of the mean square of an update above which it is scaled down; 1 or more.
        weight_decay: share of a parameter that is taken off, times ``lr``.
        maximize: ascend.

    Raises:
        ValueError: an argument is out of range.

    Source: ``torch.optim.Adafactor``, of which ``foreach`` is left out.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_arguments(Adafactor.__init__, locals())
        self._pools = Pools()
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what was pickled or copied."""
        self._pools = Pools()
        super().__setstate__(state)

    def _rules(self, options: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
        eps, floor = options["eps"]
        yield "beta2_decay", options["beta2_decay"] <= 0, "0 or less"
        eps_is_right = (eps is None or eps >= 0) and floor >= 0
        yield "eps", eps_is_right, "None or 0 or more, and 0 or more"
        yield "d", options["d"] >= 1, "1 or more"

    def _forms(self, param: Tensor) -> Mapping[str, Form]:
        """What the averages of a parameter look like."""
        if param.ndim < 2:
            return {ELEMENTS: _form(param, ())}
        return {ROWS: _form(param, (param.ndim - 1,)), COLUMNS: _form(param, (param.ndim - 2,))}

    def _step(self) -> None:
        updates: list[FactoredUpdate] = []
        names: list[tuple[str, Tensor]] = []
        error: Exception | None = None
        try:
            for group, named in with_gradients(self):
                settings = {**group, "lr": float(group["lr"])}  # a tensor is waited for once
                updates += [self._update_of(name, param, settings) for name, param in named]
                names += named
        except Exception as raised:
            error = raised
        self._pools.agree(parameters_in_order(self), names, _DOING, error)
        try:
            for part in (FactoredUpdate.measure, FactoredUpdate.compute):
                sums = Reductions("the means and norms of Adafactor")
                for update in updates:
                    part(update, sums)
                sums.run()
        except BaseException:
            for device in {update.device for update in updates}:
                own = (update.groups for update in updates if update.device == device)
                abandon(set().union(*own), device)
            raise
        for update in updates:
            update.apply()

    def _update_of(self, name: str, param: Tensor, settings: Mapping[str, Any]) -> FactoredUpdate:
        grad, state, forms = gradient(name, param), self.state[param], self._forms(param)
        if not state:
            state.update(self.new_state(param))
        for key, form in forms.items():
            form.check(state.get(key), f"{name}: {key}")
        return FactoredUpdate(param, grad, state, settings)


def _form(param: Tensor, reduced: tuple[int, ...]) -> Form:
    """What an average looks like that has one element along some dimensions of a parameter."""
    shape, local = list(param.shape), list(dtensor.plain(param).shape)
    for dim in reduced:
        shape[dim] = local[dim] = 1
    placements: tuple[Placement, ...] = ()
    if isinstance(param, DTensor):
        placements = tuple(
            Replicate() if dtensor.sharded_dim(each) in reduced else each
            for each in param.placements
        )
    dtype = torch.promote_types(param.dtype, torch.float32)
    return Form.beside(param, dtype, shape, local, placements)


class FactoredUpdate:
    """One step of one parameter, over this rank's part of it.

    Call :meth:`measure` and :meth:`compute`, let ranks add up after each, and call :meth:`apply`.

    Args:
        param: the parameter.
        grad: its gradient, placed as the parameter is.
        state: its state.
        settings: of its group; ``lr`` is a plain number.

    Attributes:
        device: of the parameter.
        groups: the process groups whose ranks have parts of it.
    """

    def __init__(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._param, self._grad = dtensor.plain(param), dtensor.plain(grad)
        self._numel, self.device = param.numel(), self._param.device
        self.groups = groups_cutting(param)
        self._step = state[STEP]
        self._state = {name: dtensor.plain(state[name]) for name in state if name != STEP}
        own = {name: as_stack(each) for name, each in self._state.items()}
        self._dtype = next(iter(own.values())).dtype
        # Tensors, since a rehearsal has no values.
        count = self._step.double() + 1
        #: The largest relative step, and the share of this step's squares in their averages.
        self._size = count.rsqrt().clamp(max=settings["lr"]).to(self.device, self._dtype)
        new = (count ** settings["beta2_decay"]).to(self.device, self._dtype)
        eps, self._floor = settings["eps"]
        self._eps = torch.finfo(self._dtype).eps if eps is None else eps
        self._estimate: _Factors | _Elements
        if ROWS in own:
            rows, columns = (groups_cutting(param, {param.ndim - n}) for n in (2, 1))
            height, width = param.shape[-2:]
            self._estimate = _Factors(
                _Means(own[ROWS], width, columns),
                _Means(own[COLUMNS], height, rows),
                new,
                self._eps,
            )
        else:
            self._estimate = _Elements(own[ELEMENTS], new)
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
        self._step += 1
        if not self._numel:
            return
        settings, root = self._settings, math.sqrt(self._numel)
        scale = self._param_square.sqrt().div_(root).clamp_(min=self._floor) * self._size
        excess = self._update_square.sqrt().div_(root * settings["d"]).clamp_(min=1)
        factor = scale.div_(excess).mul_(1 if settings["maximize"] else -1)
        kept = 1 - settings["lr"] * settings["weight_decay"]
        param, grad = as_stack(self._param), as_stack(self._grad)
        for at in _pieces_of(grad.shape):
            piece = param[at]
            wide = piece.to(self._dtype)  # itself, if it has this dtype
            if kept != 1:
                wide.mul_(kept)
            wide.add_(self._update(at, grad).mul_(factor))
            if wide is not piece:
                piece.copy_(wide)
        if not _is_stack(self._param):
            self._param.copy_(param.view(self._param.shape))
        for name, averages in self._estimate.advanced.items():
            self._state[name].copy_(averages.view(self._state[name].shape))

    def _update(self, at: _At, grad: Tensor) -> Tensor:
        """Compute a piece of the update, before it is scaled."""
        least = self._eps * self._eps
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

    def __init__(self, rows: _Means, columns: _Means, new: Tensor, eps: float) -> None:
        self._rows, self._columns, self._new, self._eps = rows, columns, new, eps
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
        rows, columns, new = self._rows, self._columns, self._new
        self._new_rows = rows.averages.lerp(self._by_row.div_(rows.size), new)
        self._new_columns = columns.averages.lerp(self._by_column.div_(columns.size), new)
        mean = self._mean_before.lerp_(self._square.div_(rows.size), new).div_(columns.size)
        self._relative = self._new_rows / mean.clamp_(min=self._eps)

    def piece(self, at: _At) -> Tensor:
        """Return a piece of the second moments, in memory of its own."""
        return self._relative[at] * self._new_columns[at[0]]

    @property
    def advanced(self) -> Mapping[str, Tensor]:
        """The next averages, by the names of states."""
        return {ROWS: self._new_rows, COLUMNS: self._new_columns}


class _Elements:
    """The second moments of a vector, element by element, (1, 1, elements)."""

    def __init__(self, averages: Tensor, new: Tensor) -> None:
        self._averages, self._share = averages, new
        self._new = averages.clone(memory_format=torch.contiguous_format)

    def take(self, at: _At, squares: Tensor) -> None:
        """Advance a piece by the squares of the gradient."""
        self._new[at] = self._averages[at].lerp(squares, self._share)

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
