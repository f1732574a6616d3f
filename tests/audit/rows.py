"""What ``DTensor`` computes wrongly without an error: the rows of the table in docs/dtensors.md.

Each row is a few lines of a program, as they are often written, and what to write instead. Both
get a parameter, a plain one or one that is sharded over two ranks, and return what the program goes
on with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

Program = Callable[[Any], Any]
ROWS_OF_EACH = Shard(0)


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: the first column of the table.
        wrong: what a sharded parameter computes wrongly.
        right: what to write instead.
        rows: of the parameter, which has 4 columns.
        placement: of the parameter.
        mended: the version of torch that computes it; ``None``: none that was tried.
        told: what is in the error of an audit; ``None`` if it cannot see this.
        right_on_ours: whether a parameter of our runtime computes it.
    """

    name: str
    wrong: Program
    right: Program
    rows: int = 4
    placement: Placement = ROWS_OF_EACH
    mended: tuple[int, int] | None = None
    told: str | None = "full_tensor()"
    right_on_ours: bool = False


def full(value: Any) -> Any:
    """Return the full tensor of a ``DTensor``, and anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Place a tensor as a parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def read(program: Program) -> Program:
    """Return a program without gradients."""
    return torch.no_grad()(program)


def gradient(loss: Program) -> Program:
    """Return what computes the gradient of a loss."""

    def program(parameter: Tensor) -> Any:
        full(loss(parameter)).backward()
        return full(parameter.grad)

    return program


def written(write: Program) -> Program:
    """Return what writes to a parameter, and reads it afterwards."""

    def program(parameter: Tensor) -> Any:
        with torch.no_grad():
            write(parameter)
        return full(parameter.detach())

    return program


def changed(change: Program) -> Program:
    """Return what changes the full tensor of a parameter, and copies it back."""

    def write(parameter: Tensor) -> None:
        whole = full(parameter.detach()).clone()
        change(whole)
        parameter.copy_(like(parameter, whole))

    return written(write)


def _loss(function: Callable[..., Tensor]) -> Row:
    """A loss of a parameter, of which gradients are too large by the number of ranks."""

    def target(parameter: Tensor) -> Tensor:
        return torch.full(parameter.shape, 0.5)

    return Row(
        f"the gradient of `F.{function.__name__}(p, target)`",
        gradient(lambda p: function(p.sigmoid(), like(p, target(p)))),
        gradient(lambda p: function(full(p).sigmoid(), target(p))),
        told="call losses on plain tensors",
    )


def _one_is_nan(parameter: Tensor) -> Tensor:
    return parameter * like(parameter, torch.tensor([[1.0], [1.0], [1.0], [math.nan]]))


def _vector(parameter: Tensor) -> None:
    vector = nn.utils.parameters_to_vector([parameter])
    nn.utils.vector_to_parameters(2 * vector, [parameter])


def _assign(parameter: Tensor) -> None:
    parameter.data = 2 * parameter.detach()


def _set_element(parameter: Tensor) -> None:
    parameter[0, 0] = 7.0


def _are_close(parameter: Tensor, compared: Program) -> bool:
    other = parameter.detach() + like(parameter, torch.eye(4)[3:].T.contiguous())
    try:
        torch.testing.assert_close(compared(other), compared(parameter.detach()))
    except AssertionError:
        return False
    return True


def _rows_differ(draw: Program) -> Program:
    def program(parameter: Tensor) -> bool:
        torch.manual_seed(0)
        with torch.no_grad():
            drawn = full(draw(parameter))
        return not torch.equal(drawn[0], drawn[2])

    return program


def _draw_whole(parameter: Tensor) -> Tensor:
    return parameter.copy_(like(parameter, nn.init.normal_(torch.empty(parameter.shape))))


def _is_placed_as_parameter(loss: Program) -> Program:
    def program(parameter: Tensor) -> bool:
        full(loss(parameter)).backward()
        grad: Any = parameter.grad
        return not isinstance(grad, DTensor) or grad.placements == parameter.placements  # type: ignore[attr-defined]

    return program


ROWS = [
    # -- what the host reads -----------------------------------------------------------------------
    Row(
        "`p.norm().item()`", read(lambda p: p.norm().item()), read(lambda p: full(p.norm()).item())
    ),
    Row("`float(p.sum())`", read(lambda p: float(p.sum())), read(lambda p: float(full(p.sum())))),
    Row(
        "`int((p > 0).sum())`",
        read(lambda p: int((p > 0).sum())),
        read(lambda p: int(full((p > 0).sum()))),
    ),
    Row(
        "`math.sqrt(p.square().sum())`",
        read(lambda p: math.sqrt(p.square().sum())),
        read(lambda p: math.sqrt(full(p.square().sum()))),
    ),
    Row(
        "`if p.isnan().any():`",
        read(lambda p: bool(_one_is_nan(p).isnan().any())),
        read(lambda p: bool(full(_one_is_nan(p).isnan().any()))),
        mended=(2, 15),
    ),
    Row(
        "`torch.testing.assert_close(p, q)`",
        read(lambda p: _are_close(p, lambda value: value)),
        read(lambda p: _are_close(p, full)),
        told=None,  # it compares what to_local() returns
    ),
    # -- reductions --------------------------------------------------------------------------------
    Row(
        "`(p > 0).any().float()`",
        lambda p: full((p > 0).any().float()),
        lambda p: full((p > 0).any()).float(),
        mended=(2, 15),
    ),
    Row(
        "`p.norm(dim=1).sum()`, `p` cut along dimension 1",
        lambda p: full(p.norm(dim=1).sum()),
        lambda p: full(p.norm(dim=1)).sum(),
        placement=Shard(1),
        mended=(2, 15),
    ),
    Row(
        "`p.cumsum(-2)`, `cumprod`, `logcumsumexp` along a negative dimension",
        lambda p: full(p.cumsum(-2)),
        lambda p: full(p.cumsum(0)),
        mended=(2, 15),
    ),
    Row(
        "`torch._foreach_add(tensors, norm)`",
        read(lambda p: full(torch._foreach_add([p], p.norm())[0])),
        read(lambda p: full(torch._foreach_add([p], full(p.norm()))[0])),
    ),
    # -- losses and gradients ----------------------------------------------------------------------
    Row(
        "`F.mse_loss(p, target)` over uneven rows",
        lambda p: full(F.mse_loss(p, like(p, torch.zeros(p.shape)))),
        lambda p: F.mse_loss(full(p), torch.zeros(p.shape)),
        rows=5,
        told="call losses on plain tensors",
    ),
    *map(_loss, (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy)),
    _loss(F.soft_margin_loss),
    Row(
        "the gradient of `p.amax()`, `p.norm(inf)`",
        gradient(lambda p: p.norm(math.inf)),
        gradient(lambda p: full(p).norm(math.inf)),
        placement=Shard(1),
    ),
    Row(
        "the gradient of `p[0].square().sum()`, `p.var()`: not sharded",
        _is_placed_as_parameter(lambda p: p[0].square().sum()),
        _is_placed_as_parameter(lambda p: full(p)[0].square().sum()),
        right_on_ours=True,
    ),
    # -- writes ------------------------------------------------------------------------------------
    Row(
        "`p[0].zero_()`",
        written(lambda p: p[0].zero_()),
        changed(lambda whole: whole[0].zero_()),
        right_on_ours=True,
    ),
    Row(
        "`p[1:3].mul_(2)`",
        written(lambda p: p[1:3].mul_(2)),
        changed(lambda whole: whole[1:3].mul_(2)),
    ),
    Row(
        "`p[0, 0] = 7`",
        written(_set_element),
        changed(_set_element),
        right_on_ours=True,
    ),
    Row(
        "`p.diagonal().fill_(1)`",
        written(lambda p: p.diagonal().fill_(1)),
        changed(lambda whole: whole.diagonal().fill_(1)),
    ),
    Row(
        "`p.chunk(2)[0].zero_()`, `split`, `narrow`",
        written(lambda p: p.chunk(2)[0].zero_()),
        changed(lambda whole: whole.chunk(2)[0].zero_()),
    ),
    Row(
        "`p.data[0].zero_()`",
        written(lambda p: p.data[0].zero_()),
        changed(lambda whole: whole[0].zero_()),
        right_on_ours=True,
    ),
    Row(
        "`p.data = 2 * p`",
        written(_assign),
        written(lambda p: p.copy_(2 * p)),
        told="p.copy_(value)",
    ),
    Row(
        "`vector_to_parameters(vector, [p])`",
        written(_vector),
        written(lambda p: p.mul_(2)),
        told="p.copy_(value)",
    ),
    # -- random values -----------------------------------------------------------------------------
    Row(
        "`nn.init.normal_(p)`, `p.uniform_()` with one seed",
        _rows_differ(nn.init.normal_),
        _rows_differ(_draw_whole),
        told="draw before sharding",
        right_on_ours=True,
    ),
    Row(
        "`torch.rand_like(p)`, `F.dropout(p)` with one seed",
        _rows_differ(torch.rand_like),
        _rows_differ(lambda p: torch.rand(p.shape)),
        told="draw before sharding",
        right_on_ours=True,
    ),
]
