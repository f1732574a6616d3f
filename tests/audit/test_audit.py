"""``shardwise.audit``: what it says, and that it finds nothing in right programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

import shardwise
from shardwise import PeerLostError, RanksDivergedError, fully_shard
from tests.audit.programs import PROGRAMS, build
from tests.worlds import Ranks, on_processes, on_threads

RUNTIMES = {"ours": fully_shard, "torch": fully_shard_of_torch}


def train(name: str, shard: Any, audit: Callable[[Any], Any]) -> list[Any]:
    model, step = PROGRAMS[name](shard)
    with audit(model):
        logged = [step() for _ in range(2)]
    params = [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    return [*params, torch.get_rng_state(), logged]


#: Those of `make test`; the others are in `make long`.
FEW = ("AdamW, fused", "clipping", "tensor parallelism", "writes")


def _same_under_an_audit(rank: int, world_size: int, runtime: str, names: Sequence[str]) -> None:
    for name in names:
        plain = train(name, RUNTIMES[runtime], lambda model: contextlib.nullcontext())
        audited = train(name, RUNTIMES[runtime], shardwise.audit)

        assert audited.pop() == plain.pop(), name
        assert all(map(torch.equal, audited, plain)), name


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("names", [FEW, pytest.param([*PROGRAMS], marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore")  # of torch's, about what programs do
def test_right_programs_compute_the_same_under_an_audit(
    threads: Ranks, runtime: str, names: Sequence[str]
) -> None:
    threads(_same_under_an_audit, 2, runtime, names)


@pytest.mark.filterwarnings("ignore")
def test_a_right_program_computes_the_same_in_processes(ranks: Ranks) -> None:
    ranks(_same_under_an_audit, 2, "ours", FEW[:1])


def model_of_one() -> Any:
    torch.manual_seed(0)
    return fully_shard(nn.Linear(4, 4))


def audited(model: Any, program: Callable[[Any], object], seconds: float = 60.0) -> None:
    with shardwise.audit(model, seconds=seconds):
        program(model.weight)


@on_threads(2)
def test_a_wrong_gradient_names_the_line_of_forward(rank: int, world_size: int) -> None:
    def program(p: Any) -> None:
        torch.nn.functional.mse_loss(p, torch.zeros_like(p)).full_tensor().backward()

    said = r"aten\.mse_loss_backward on weight, at the backward of .*test_audit\.py:\d+ in program"
    with pytest.raises(ValueError, match=said):
        audited(model_of_one(), program)


@on_threads(2)
def test_a_model_may_be_converted_in_an_audit(rank: int, world_size: int) -> None:
    model = model_of_one()
    with shardwise.audit(model):
        model(torch.ones(1, 4)).sum().backward()
        model.double()

    assert model.weight.dtype == torch.float64


@on_threads(2)
def test_a_write_that_is_lost_counts_if_what_lacks_it_is_read(rank: int, world_size: int) -> None:
    @torch.no_grad()
    def program(p: Any) -> None:
        more = p + 1
        more[1:3].zero_()
        if reads:
            more.sum()

    reads = False
    audited(model_of_one(), program)

    reads = True
    with pytest.raises(ValueError, match=r"unchanged, expected what was written at .*test_audit"):
        audited(model_of_one(), program)


@on_threads(2)
def test_each_rank_says_what_it_has_read(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"expected .* \(rank 0\); .* \(rank 1\)"):
        audited(model_of_one(), lambda p: p.detach().sum().item())


@on_threads(2)
def test_what_is_the_same_on_all_ranks_may_be_read(rank: int, world_size: int) -> None:
    model = model_of_one()
    with shardwise.audit(model):
        assert model.weight.detach().norm().full_tensor().item() > 0
        assert model.weight.detach().argmax().item() >= 0
        assert bool(model.weight.detach().norm() > 0)


@on_threads(2)
def test_ranks_that_run_different_operations_are_told(rank: int, world_size: int) -> None:
    said = r"rank 0: aten\.sum of .*test_audit\.py.*rank 1: aten\.mean of"
    with pytest.raises(RanksDivergedError, match=said):
        audited(model_of_one(), lambda p: p.mean() if rank else p.sum())

    said = r"rank 0: aten\.sum of .*rank 1: the end of the audit"
    with pytest.raises(RanksDivergedError, match=said):
        audited(model_of_one(), lambda p: rank or p.sum())


@on_threads(2)
def test_an_exception_of_one_rank_is_told_to_the_others(rank: int, world_size: int) -> None:
    model = model_of_one()
    expected = KeyError if rank else RanksDivergedError
    with pytest.raises(expected, match="mine" if rank else "rank 1: KeyError: 'mine'"):
        audited(model, lambda p: {}["mine"] if rank else p.sum())

    audited(model, lambda p: p.sum())  # the next one begins anew


@on_processes(2)
def test_a_rank_does_not_wait_forever_for_one_that_waits_for_it(rank: int, world_size: int) -> None:
    model = model_of_one()
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"the audit of aten\.sum"):
            audited(model, lambda p: p.sum(), seconds=1)
        dist.send(torch.ones(1), 1)
    else:
        with pytest.raises(shardwise.ShardwiseError):
            audited(model, lambda p: dist.recv(torch.ones(1), 0), seconds=1)


@on_threads(1)
def test_what_cannot_be_audited_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="call fully_shard first"):
        audited(nn.Linear(2, 2), lambda p: p)
    with pytest.raises(ValueError, match="seconds: found 0"):
        audited(model_of_one(), lambda p: p, seconds=0)


def _simulated() -> float:
    model = build(fully_shard)
    with shardwise.audit(model):
        return float(model(torch.tensor([[1, 2]])).sum().detach())


def test_simulated_ranks_are_audited_as_well() -> None:
    assert len(shardwise.simulate(_simulated, 2)) == 2


@torch.no_grad()
def _write_rows(p: Any) -> None:
    torch.manual_seed(0)
    nn.init.trunc_normal_(p)
    p[0].zero_()
    p[1, 2:].add_(1)
    p.data[-1].fill_(3.0)
    p[2, 0] = 7.0


@on_threads(2)
def test_writes_to_rows_reach_our_shards_and_not_those_of_torch(rank: int, world_size: int) -> None:
    whole = torch.empty(4, 4)
    _write_rows(whole)
    model = model_of_one()
    audited(model, _write_rows)
    assert torch.equal(model.weight.full_tensor(), whole)

    with pytest.raises(ValueError, match=r"weight unchanged, expected what was written"):
        audited(fully_shard_of_torch(nn.Linear(5, 5)), lambda p: p.detach()[0].zero_())


@on_threads(2)
def test_one_rank_alone_may_look_at_its_part(rank: int, world_size: int) -> None:
    model = model_of_one()
    audited(model, lambda p: rank or (model.state_dict(), p.detach().to_local().sum().item()))


@on_threads(2)
def test_a_lost_write_counts_in_what_is_detached(rank: int, world_size: int) -> None:
    @torch.no_grad()
    def program(p: Any) -> None:
        more = p + 1
        more[1:3].zero_()
        more.detach().sum()

    with pytest.raises(ValueError, match="unchanged, expected what was written at"):
        audited(model_of_one(), program)
