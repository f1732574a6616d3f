"""What memory of a plan is for, as the code says that allocates it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise._torch import fsdp2_code
from shardwise.base import observe
from shardwise.frontends.strategies import Strategy, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.memory import RankBytes, memory
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import Settings
from shardwise.sharding.group_param import GroupParam
from shardwise.transport.memory import Loan


def _planned() -> RankBytes:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 3))
    settings = Settings(
        mesh=WantedMesh.parse("dp=2"),
        strategy=Strategy.ZERO1,
        accumulate=2,
        param_dtype="bf16",
        batch=lambda count: torch.ones(count, 9),
    )
    return memory(rehearse(Blueprint("net", model, [model[0]]), settings))


def test_a_rename_in_the_runtime_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _planned()
    for function in (GroupParam.accumulate_grad, GroupParam.zeros_for_grad, Loan.take):
        renamed = function.__code__.replace(co_name="renamed", co_qualname="renamed")
        monkeypatch.setattr(function, "__code__", renamed)
    assert _planned() == before


def test_code_that_allocates_for_something_else_changes_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, before = GroupParam.accumulate_grad.__code__, _planned()
    key = code.co_filename, code.co_firstlineno
    monkeypatch.setitem(observe.ALLOCATES, key, observe.Memory.TRANSPORT)
    assert _planned().transport > before.transport


def test_torchs_own_code_is_where_it_is_looked_for() -> None:
    torchs = [str(each.__file__) for each in (fsdp2_code.COLLECTIVES, fsdp2_code.PARAMETERS)]
    assert {each for each in observe.ALLOCATES if each in torchs} == set(torchs)
    functions = [each for each in observe.ALLOCATES if isinstance(each, tuple)]
    found = [*fsdp2_code.FOR_SENDING, *fsdp2_code.FOR_GRADIENTS]
    assert sum(file in torchs for file, _ in functions) == len(found)
    assert len(found) == (2 if torch.__version__ >= "2.15" else 4)
