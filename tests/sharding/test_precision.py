"""Which dtype a group computes and reduces in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import fully_shard
from shardwise._torch import fsdp
from shardwise.sharding.policy import Precision, cast_floating
from tests.worlds import on_threads

BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int64


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "stored", "computes", "reduces"),
    [
        (None, None, FP32, FP32, FP32),
        (BF16, FP32, FP32, BF16, FP32),
        (None, BF16, FP32, FP32, BF16),
        (BF16, FP32, BF16, BF16, FP32),
        (BF16, FP32, INT, INT, INT),
        (BF16, FP32, torch.complex64, torch.complex64, torch.complex64),
    ],
)
def test_dtypes(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    stored: torch.dtype,
    computes: torch.dtype,
    reduces: torch.dtype,
) -> None:
    precision = Precision(MixedPrecisionPolicy(param_dtype, reduce_dtype))
    assert precision.compute_dtype(stored) == computes
    assert precision.reduce_dtype(stored) == reduces


@pytest.mark.parametrize(
    ("as_stored", "stored", "reduces"),
    [(False, FP32, BF16), (True, FP32, FP32), (True, torch.float16, torch.float16)],
)
def test_the_default_dtype_of_reductions_is_that_of_torchs_version(
    monkeypatch: pytest.MonkeyPatch, as_stored: bool, stored: torch.dtype, reduces: torch.dtype
) -> None:
    """From torch 2.15 on it is that of the shards."""
    monkeypatch.setattr(fsdp, "REDUCES_AS_STORED", as_stored)
    assert Precision(MixedPrecisionPolicy(BF16)).reduce_dtype(stored) == reduces


def test_inputs_are_cast_unless_the_policy_says_not() -> None:
    args = (torch.ones(2), torch.ones(2, dtype=INT), "text")

    cast, _ = Precision(MixedPrecisionPolicy(BF16)).cast_inputs(args, {})
    assert [a.dtype for a in cast[:2]] == [BF16, INT]

    same, _ = Precision(MixedPrecisionPolicy(BF16, cast_forward_inputs=False)).cast_inputs(args, {})
    assert same is args


def test_outputs_are_cast_to_the_output_dtype_only() -> None:
    output = {"logits": torch.ones(2, dtype=BF16)}
    assert Precision(MixedPrecisionPolicy(BF16)).cast_outputs(output) is output
    cast = Precision(MixedPrecisionPolicy(BF16, output_dtype=FP32)).cast_outputs(output)
    assert cast["logits"].dtype == FP32


def test_complex_tensors_are_not_cast() -> None:
    assert cast_floating(torch.ones(1, dtype=torch.complex64), BF16).dtype == torch.complex64


class _Router(nn.Module):
    """A router, which computes in its own dtype, and what it chooses between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Parameter(torch.randn(2, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.experts = nn.Linear(4, 2)
        self.used: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used = [each.dtype for each in (self.gate, self.scale, self.experts.weight, x)]
        odds = torch.softmax(x.float() @ self.gate.float().t() * self.scale, -1)
        return (odds * self.experts(x.to(self.experts.weight.dtype))).sum()


@pytest.mark.parametrize("reduce_dtype", [None, FP32])
@on_threads(2)
def test_single_parameters_compute_in_their_own_dtype(
    rank: int, world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    plain, net = _Router(), _Router()
    plain.experts.to(BF16)
    policy = fsdp.with_own_dtypes(MixedPrecisionPolicy(BF16, reduce_dtype), [net.gate, net.scale])
    fully_shard(net, mp_policy=policy)
    net = copy.deepcopy(net)
    x = torch.randn(3, 4).to(BF16)
    for each in (plain, net):
        each(x).backward()
        each(x).backward()
    assert net.used == [FP32, FP32, BF16, BF16]
    for name in ("gate", "scale"):
        ours, theirs = getattr(net, name).grad, getattr(plain, name).grad
        assert torch.equal(ours.full_tensor(), theirs), "reduced in float32, too"
    assert net.experts.weight.grad.dtype == FP32
    assert net.experts.weight.grad.full_tensor().allclose(plain.experts.weight.grad.float(), 0.02)
