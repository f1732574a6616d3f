"""Clipping by the norm of gradients that no rank holds whole."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import shardwise
from shardwise import clip_grad_norm_, fully_shard
from shardwise.optim.reductions import Reductions
from tests.corpus.gathering import in_full
from tests.worlds import on_processes, on_threads

NORM_TYPES = [2.0, 1.0, 0.5, math.inf, -math.inf, 0.0, -1.0]
#: Shapes of gradients, and their placements on a mesh of two by two ranks; plain tensors have none.
PLACED: list[tuple[tuple[int, ...], list[Placement] | None]] = [
    ((7, 3), [Replicate(), Shard(0)]),
    ((3, 5), [Replicate(), Shard(1)]),
    ((1, 3), [Shard(0), Replicate()]),
    ((9, 6), [Shard(0), Shard(1)]),
    ((3,), [Shard(0), Shard(0)]),
    ((4, 4), [Replicate(), Replicate()]),
    ((), [Replicate(), Replicate()]),
    ((4,), [Shard(0), Replicate()]),
    ((5,), None),
]


@on_threads(4)
def test_every_norm_over_every_layout_is_that_of_torch_on_whole_gradients(
    rank: int, world_size: int
) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape, _ in PLACED]
    wholes[1] = wholes[1].double()

    def placed(value: torch.Tensor, placements: list[Placement] | None) -> torch.Tensor:
        value = value.clone()
        return distribute_tensor(value, mesh, placements) if placements else value

    some, none = wholes.copy(), [torch.zeros_like(whole) for whole in wholes]
    some[3] = some[3] * torch.arange(9).remainder(4).sign()[:, None]  # some zeros
    some[5] = none[5]
    for grads in (wholes, some, none, [], [None] * len(PLACED)):
        for norm_type in NORM_TYPES:
            whole, sharded = [], []
            for grad, (shape, placements) in zip(grads, PLACED, strict=False):
                values = torch.zeros(shape, dtype=torch.float32 if grad is None else grad.dtype)
                whole.append(nn.Parameter(values))
                sharded.append(nn.Parameter(placed(values, placements)))
                if grad is not None:
                    whole[-1].grad = grad.clone()
                    sharded[-1].grad = placed(grad, placements)
            expected = nn.utils.clip_grad_norm_(whole, 0.1, norm_type)
            norm = clip_grad_norm_(sharded, 0.1, norm_type)
            assert not isinstance(norm, DTensor)
            what = f"norm of order {norm_type}"  # of which torch adds float32 up in float32
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6, msg=what)
            clip_grad_norm_(sharded, 1e30, norm_type)  # changes nothing
            for ours, theirs in zip(sharded, whole, strict=True):
                if theirs.grad is not None:
                    torch.testing.assert_close(in_full(ours.grad), theirs.grad)


@on_processes(2)
def test_no_norm_hides_a_nan_that_one_rank_has(rank: int, world_size: int) -> None:
    for norm_type in (norm for norm in NORM_TYPES if norm):
        for owner in range(world_size):
            model = fully_shard(nn.Linear(4, 4, bias=False))
            model(torch.ones(1, 4)).sum().backward()
            if rank == owner:
                model.weight.grad.to_local()[0, 0] = math.nan
            assert clip_grad_norm_(model.parameters(), math.inf, norm_type).isnan()
            with pytest.raises(RuntimeError, match=f"order {norm_type} is nan"):
                clip_grad_norm_(model.parameters(), 0.5, norm_type, error_if_nonfinite=True)


@on_processes(3)
def test_the_extremes_of_floats_over_ranks_let_nan_through(rank: int, world_size: int) -> None:
    values = [-math.inf, -3.0, -1e-40, -0.0, 0.0, 1e-40, 2.0, math.inf, math.nan]
    triples = torch.tensor(list(itertools.product(values, repeat=world_size)))
    signs = torch.where(torch.arange(len(triples)) % 2 == 0, 1.0, -1.0)
    triples = torch.where(triples.isnan(), triples.copysign(signs[:, None]), triples)
    for dtype in (torch.float32, torch.float64):
        for op, extreme in ((dist.ReduceOp.MAX, torch.amax), (dist.ReduceOp.MIN, torch.amin)):
            reductions = Reductions("the test", op)
            mine = reductions.add(triples[:, rank].to(dtype).contiguous(), [dist.group.WORLD])
            reductions.run()
            torch.testing.assert_close(
                mine, extreme(triples.to(dtype), 1), rtol=0, atol=0, equal_nan=True
            )


def test_floats_are_reduced_to_their_extremes_in_one_place_alone() -> None:
    """Gloo hides a NaN, and ``Reductions`` does not. These others reduce integers."""
    integers = {"elastic/stop.py", "frontends/meta.py", "sharding/drawing.py"}
    source = Path(shardwise.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"ReduceOp\.(MAX|MIN)\b", path.read_text())
    }
    assert found == integers | {"optim/reductions.py", "optim/norms.py", "optim/adamw8bit.py"}


@on_threads(2)
def test_edges(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(3, 3))
    assert clip_grad_norm_(model.parameters(), 1.0) == 0, "no gradients yet"
    model(torch.ones(1, 3)).sum().backward()
    single = clip_grad_norm_(model.weight, 1e9)
    assert single == pytest.approx(3.0)

    model.weight.grad.to_local().fill_(math.inf)
    assert clip_grad_norm_(model.parameters(), 1.0).isinf()
    with pytest.raises(RuntimeError, match="expected a finite number"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    mesh = init_device_mesh("cpu", (world_size,))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="pending a reduction"):
        clip_grad_norm_(pending, 1.0)


@on_threads(2)
def test_ranks_agree_on_the_dtype_where_some_have_no_gradient(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    narrow, wide = (
        nn.Parameter(DTensor.from_local(torch.ones(2, dtype=dtype), mesh, [Shard(0)]))
        for dtype in (torch.bfloat16, torch.float32)
    )
    narrow.grad = narrow.detach().clone()
    if rank == 0:
        wide.grad = wide.detach().clone()
    norm = clip_grad_norm_([narrow, wide], 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(6**0.5, rel=1e-2)  # of numbers in bf16


def _half(dtype: torch.dtype, rows: int, value: float) -> nn.Parameter:
    """A parameter of ``rows`` rows of 100, each rank's part of it, with that gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((rows, 100), value, dtype=dtype)
    param = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    param.grad = param.detach().clone()
    return param


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_threads(3)
def test_gradients_of_16_bits_are_clipped_in_float32(
    rank: int, world_size: int, dtype: torch.dtype, norm_type: float
) -> None:
    # Over three ranks of two rows the last one has none.
    values = (30.0, 40.0, 0.5)
    params = [_half(dtype, 2, value) for value in values]
    wholes = [torch.full((2, 100), value).double() for value in values]
    expected = torch.linalg.vector_norm(torch.stack(wholes), norm_type)
    norm = clip_grad_norm_(params, 1.0, norm_type)
    assert norm.dtype == dtype, "as torch's"
    assert torch.equal(norm, expected.to(dtype)), "rounded once"
    for param, whole in zip(params, wholes, strict=True):
        clipped = param.grad.full_tensor().double()
        torch.testing.assert_close(
            clipped, whole / expected, rtol=torch.finfo(dtype).eps, atol=1e-6
        )


@on_threads(2)
def test_a_norm_that_float16_does_not_hold(rank: int, world_size: int) -> None:
    params = [_half(torch.float16, 4, 6e4), _half(torch.float16, 4, 0.0)]
    norm = clip_grad_norm_(params, 1e3, error_if_nonfinite=True)
    assert norm.isinf(), "float16 does not hold it"
    clipped = params[0].grad.full_tensor().float()
    torch.testing.assert_close(clipped.norm(), torch.tensor(1e3), rtol=1e-3, atol=0)

    mixed = [_half(torch.float16, 4, 6e4), _half(torch.bfloat16, 4, 1.0)]
    norm = clip_grad_norm_(mixed, 1e3)
    assert norm.dtype == torch.float32, "the narrowest that holds both"
    assert norm.item() == pytest.approx(6e4 * 20, rel=1e-5)
    clipped = mixed[0].grad.full_tensor().float()
    torch.testing.assert_close(clipped.norm(), torch.tensor(1e3), rtol=1e-3, atol=0)
    assert mixed[1].grad.dtype == torch.bfloat16
