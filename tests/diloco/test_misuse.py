"""Wrong use raises at once, and the message says what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.diloco import DiLoCo, OuterSGD, Overlapped, Streaming, WireFormat
from tests.diloco.reference import make_inner
from tests.diloco.replicas import Replica, sharded, two_replicas
from tests.worlds import on_processes


def _made(**settings: Any) -> DiLoCo:
    model = sharded(None)
    return DiLoCo(model, make_inner(model.parameters()), **{"every": 4, "group": None, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every: found 0, expected 1 or more"),
        ({"streaming": Streaming(overlap=4)}, "overlap: found 4, expected at most 3"),
        (
            {"streaming": Streaming(overlap=5, overlapped=Overlapped.KEPT)},
            "overlap: found 5, expected at most 4",
        ),
        ({"streaming": Streaming(fragments=5)}, "fragments: found 5, expected at most 4"),
        (
            {"streaming": Streaming(fragments=4)},
            "fragments: found 4, expected at most 3, the number of repeated blocks",
        ),
        ({"wire": "int7"}, "int7"),
        *(
            (
                {"wire": wire, "error_feedback": False},
                f"error_feedback: found False with {wire.value}, expected True or None",
            )
            for wire in (WireFormat.INT4, WireFormat.TERNARY)
        ),
    ],
)
def test_contradictions_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _made(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OuterSGD(lr=0), "outer lr: found 0"),
        (lambda: OuterSGD(lr=math.nan), "outer lr: found nan"),
        (lambda: OuterSGD(momentum=1.0), "outer momentum: found 1.0"),
        (lambda: OuterSGD(warmup=-1), "outer warmup: found -1, expected 0 or more rounds"),
        (lambda: Streaming(fragments=0), "fragments: found 0"),
        (lambda: Streaming(overlap=-1), "overlap: found -1"),
        (lambda: Streaming(alpha=1.0), "alpha: found 1.0"),
        (
            lambda: Streaming(alpha=0.5, overlapped=Overlapped.KEPT),
            "alpha: found 0.5, expected 0 with steps that are kept",
        ),
    ],
)
def test_numbers_out_of_range_are_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_optimizer_of_another_model_is_an_error() -> None:
    model, other = sharded(None), sharded(None)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0, of shape \[\], which the model does not"
    ):
        DiLoCo(model, make_inner(other.parameters()), every=2, group=None)


def test_a_parameter_that_changed_its_shape_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, group=None)
    model[0].weight.data = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"0\.weight: .* shape \(4, 3\), but had \(3, 3\)"):
        diloco.step()


def test_parameters_without_memory_or_of_strange_dtypes_are_named() -> None:
    with torch.device("meta"):
        model: nn.Module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight: is on the meta device; materialize it first"):
        DiLoCo(model, make_inner(model.parameters()), every=1, group=None)
    model = nn.Linear(2, 2).double()
    with pytest.raises(TypeError, match=r"weight: found torch\.float64"):
        DiLoCo(model, make_inner(model.parameters()), every=1, group=None)


def test_parameters_cannot_be_added() -> None:
    with pytest.raises(NotImplementedError, match="create DiLoCo again"):
        _made().add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_state_that_does_not_fit_is_told() -> None:
    whole = _made().state_dict()
    del whole["state"][3]["diloco"]["momentum"]
    with pytest.raises(ValueError, match=r"blocks\.0\.down\.weight: .* no tensor diloco\.mom"):
        _made().load_state_dict(whole)
    state = _made().state_dict()
    state["state"][0]["diloco"]["outer"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"diloco\.outer of the state dict has shape \(2,\)"):
        _made().load_state_dict(state)


def test_the_state_of_the_inner_optimizer_alone_begins_a_first_round() -> None:
    model = sharded(None)
    inner = make_inner(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    inner.step()
    diloco = DiLoCo(model, make_inner(model.parameters()), every=2, group=None)
    diloco.load_state_dict(inner.state_dict())
    assert (diloco.steps, diloco.rounds) == (0, (0,))
    assert set(diloco.state[model.gain]) == {"step", "exp_avg", "exp_avg_sq"}


def test_schedules_take_it_for_an_optimizer() -> None:
    diloco = _made()
    schedule = torch.optim.lr_scheduler.StepLR(diloco, 1, gamma=0.5)
    diloco.step()
    schedule.step()
    assert [group["lr"] for group in diloco.inner.param_groups] == [0.01]


@on_processes(4)
def test_a_group_that_shards_is_none_of_replicas(rank: int, world_size: int) -> None:
    mesh = two_replicas()
    replica = Replica(mesh, every=2)
    with pytest.raises(ValueError, match=r'over mesh\["shard"\] only, and pass group=mesh\["rep'):
        replica.diloco.change_group(mesh["shard"])
    with pytest.raises(ValueError, match="found a mesh of 2 dimensions"):
        replica.diloco.change_group(mesh)
