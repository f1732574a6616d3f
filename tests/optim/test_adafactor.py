"""Adafactor on any mesh computes what torch's Adafactor computes on one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.optim import Adafactor
from tests.optim.nets import Mesh, Net, set_gradients
from tests.optim.references import AdafactorReference, assert_same, make_adafactor
from tests.worlds import Ranks, on_threads

STEPS = 2


@on_threads(3)
def test_parameters_in_bfloat16_are_rounded_from_fp32(rank: int, world_size: int) -> None:
    net = Mesh({"dp": world_size}).build(torch.bfloat16)
    adafactor, reference = make_adafactor(net), AdafactorReference(torch.bfloat16)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        adafactor.step()
        reference.step(step)
        assert_same(net, reference, f"step {step}", tolerance=2**-7)  # one rounding of a tie
    state = adafactor.state[net.up.weight]
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_memory_that_is_no_stack_of_matrices_is_updated_too() -> None:
    weights = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    plain = nn.Parameter(weights.clone())
    last = nn.Parameter(weights.to(memory_format=torch.channels_last))
    assert not last.is_contiguous()
    plain.grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    last.grad = plain.grad.to(memory_format=torch.channels_last)
    ours, theirs = Adafactor([last], lr=0.1), torch.optim.Adafactor([plain], lr=0.1)
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.step()
    torch.testing.assert_close(last.detach(), plain.detach())
    assert not torch.equal(plain, weights)


# -- messages --------------------------------------------------------------------------------------


def _all_reduces(rank: int, world_size: int, mesh: Mesh) -> list[int]:
    """The elements of each all-reduce of a step."""
    net = mesh.build()
    adafactor = make_adafactor(net)
    set_gradients(net, 1)
    found: list[int] = []
    reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(dist, "all_reduce", counting)
        adafactor.step()
    return found


def test_a_step_takes_two_all_reduces_for_each_dimension_that_cuts(ranks: Ranks) -> None:
    """Of the columns and two means of four matrices, and of the norms of nine parameters."""
    assert ranks(_all_reduces, 2, Mesh({"dp": 2}))[0] == [6 + 6 + 16 + 5 + 2 * 4 + 9, 9]
    assert ranks(_all_reduces, 1, Mesh({"dp": 1}))[0] == []
    replicas = Mesh({"replicate": 2, "shard": 1})
    assert ranks(_all_reduces, 2, replicas)[0] == []


# -- states ----------------------------------------------------------------------------------------


def test_the_state_of_torchs_adafactor_can_be_loaded_and_loads_there() -> None:
    ours, theirs = Net(), Net()
    adafactor = make_adafactor(ours)
    other = torch.optim.Adafactor(theirs.named_parameters(), **AdafactorReference.SETTINGS)
    for step in range(1, 5):
        for net, optimizer in ((ours, adafactor), (theirs, other)):
            set_gradients(net, step)
            optimizer.step()
        mine, its = adafactor.state_dict(), other.state_dict()
        adafactor.load_state_dict({**its, "param_groups": mine["param_groups"]})
        other.load_state_dict({**mine, "param_groups": its["param_groups"]})
    for param, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=0, atol=1e-6)


def test_the_state_of_another_optimizer_is_refused() -> None:
    net = Net()
    adamw = torch.optim.AdamW(net.parameters())
    set_gradients(net, 1)
    adamw.step()
    adafactor = Adafactor(net.parameters())
    message = "found ['exp_avg', 'exp_avg_sq', 'step'], expected ['col_var', 'row_var', 'step']"
    with pytest.raises(ValueError, match=re.escape(message)):
        adafactor.load_state_dict(adamw.state_dict())
    assert not adafactor.state


# -- arguments -------------------------------------------------------------------------------------


def test_a_closure_is_called() -> None:
    param = nn.Parameter(torch.ones(3))

    def closure() -> float:
        param.grad = torch.ones(3)
        return 2.5

    assert Adafactor([param]).step(closure) == 2.5
    assert param[0] < 1
