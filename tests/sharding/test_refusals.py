"""A ``fully_shard`` that raises has changed nothing: every way to make it raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise import DataParallelMeshDims, FSDPModule, fully_shard
from shardwise._torch.fsdp import ShardPlacementResult
from shardwise.sharding.mesh import DataMesh
from tests.corpus.gathering import own_part
from tests.sharding.nets import Net, batches, loss_of, seeded
from tests.sharding.test_extension import Half, Halved, OnlyOne
from tests.worlds import Ranks, on_threads

WORLD_SIZE = 4


@dataclass(frozen=True)
class Case:
    """What to shard, with what, which error that is, what it says, and what holds meanwhile."""

    target: Any
    kwargs: dict[str, Any]
    kind: type[BaseException]
    says: str
    meanwhile: AbstractContextManager[Any] = field(default_factory=nullcontext)


def _whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD_SIZE,))


def _two_by_two(first: str = "dp", second: str = "tp") -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))


def _on(mesh: DeviceMesh, *placements: Sequence[Any]) -> nn.Module:
    """A module with one ``DTensor`` parameter for each list of placements."""
    net = nn.Module()
    net.forward = lambda x: x
    for i, each in enumerate(placements):
        whole = torch.arange(16.0).view(4, 4)
        net.register_parameter(f"p{i}", nn.Parameter(distribute_tensor(whole, mesh, list(each))))
    return net


def _own_mesh_for(name: str, net: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """A ``shard_placement_fn`` that gives one parameter another mesh."""
    chosen = net.get_parameter(name)
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return lambda param: ShardPlacementResult(None, info) if param is chosen else None


class _Uncuttable(torch.Tensor):
    """A tensor that cannot be copied."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone:
            raise ArithmeticError("no copies of this one")
        return super().__torch_function__(func, types, args, kwargs or {})


class _Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("nobody inherits from _Final")


# -- wrong modules -----------------------------------------------------------------------------


def _sharded_already() -> Case:
    return Case(
        [nn.Linear(4, 4), fully_shard(nn.Linear(4, 4))], {}, ValueError, "already been applied"
    )


def _replicated_already() -> Case:
    from torch.distributed._composable.replicate import replicate

    other = replicate(nn.Linear(4, 4))
    return Case([nn.Linear(4, 4), other], {}, ValueError, r"torch's replicate\(\)")


def _no_subclasses() -> Case:
    return Case([nn.Linear(4, 4), _Final(4, 4)], {}, TypeError, "nobody inherits")


def _container() -> Case:
    return Case(nn.ModuleList([nn.Linear(4, 4)]), {}, ValueError, "no forward of its own")


def _scripted() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = torch.jit.script(nn.Linear(4, 4))
    net = nn.Sequential(nn.Linear(4, 4), inner)
    return Case(net, {}, ValueError, r"1\.weight on rank \d.*compiled by torch\.jit")


def _scripted_itself() -> Case:
    return Case(_scripted().target[1], {}, ValueError, "compiled by torch.jit")


def _outside_in() -> Case:
    net = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    return Case([nn.Linear(4, 4), net[1]], {}, ValueError, "Apply fully_shard from the inside out")


def _lazy() -> Case:
    net = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    return Case(net, {}, ValueError, r"1\.weight on rank \d: found a parameter of a lazy module")


def _half_an_extension() -> Case:
    return Case(Half(OnlyOne, 4), {}, ValueError, "has only one of")


def _that_cannot_be_cut() -> Case:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = nn.Parameter(torch.ones(4, 4).as_subclass(_Uncuttable))
    return Case(net, {}, ArithmeticError, "no copies")


# -- wrong arguments ---------------------------------------------------------------------------


def _cube() -> Case:
    mesh = init_device_mesh("cpu", (1, 1, WORLD_SIZE))
    return Case(seeded(Net), {"mesh": mesh}, ValueError, "found 3 dimensions")


def _pigeon() -> Case:
    return Case(seeded(Net), {"transport": "pigeon"}, ValueError, "one of auto")


def _no_policy() -> Case:
    return Case(seeded(Net), {"mp_policy": None}, TypeError, "expected a MixedPrecisionPolicy")


@dataclass(frozen=True)
class _LaterPolicy(MixedPrecisionPolicy):
    """What torch 2.15 added."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


def _a_third_dtype_for_single_parameters() -> Case:
    policy = _LaterPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    says = "param_dtype_override_fn returned torch.float16, expected None, the param_dtype"
    return Case(seeded(Net), {"mp_policy": policy}, ValueError, says)


def _gradients_of_another_dtype() -> Case:
    net = seeded(Net)
    net.head.bias.grad_dtype = torch.bfloat16
    return Case(net, {}, NotImplementedError, r"head\.bias on rank \d.*reduce_dtype")


def _no_factor() -> Case:
    return Case(seeded(Net), {"reshard_after_forward": 3}, ValueError, "factor of the 4 ranks")


def _no_factor_of_its_own_mesh() -> Case:
    net = seeded(Net)
    mesh = _two_by_two()["tp"]
    place = _own_mesh_for("head.bias", net, mesh)
    kwargs = {"shard_placement_fn": place, "reshard_after_forward": 4}
    return Case(net, kwargs, ValueError, r"factor of the 2 ranks that head\.bias, which")


def _warned_where_warnings_are_errors() -> Case:
    net = seeded(Net)
    return Case(net, {"reshard_after_forward": 1}, UserWarning, "keeps full parameters")


def _keeps_a_dtensor() -> Case:
    mesh = _two_by_two()
    net = seeded(Net)
    cut = distribute_tensor(net.head.weight.detach(), mesh["tp"], [Replicate()])
    net.head.weight = nn.Parameter(cut)
    kwargs = {"mesh": mesh["dp"], "reshard_after_forward": 2}
    # Two of two ranks is all of them: nothing is kept.
    fully_shard(nn.Linear(4, 4), **kwargs)
    cube = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    cut = distribute_tensor(net.head.weight.full_tensor().detach(), cube["tp"], [Replicate()])
    net.head.weight = nn.Parameter(cut)
    kwargs["mesh"] = cube["dp"]
    return Case(net, kwargs, NotImplementedError, r"head\.weight on rank \d: an integer")


def _keeps_an_extension() -> Case:
    net = Half(Halved, 4)
    return Case(
        net, {"reshard_after_forward": 2}, NotImplementedError, r"first\.weight on rank \d: an"
    )


def _raising(kind: type[BaseException], says: str) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise kind(says)

    return fail


def _no_groups_to_keep_in() -> Case:
    without = patch.object(DataMesh, "of_groups_of", _raising(ConnectionError, "no groups today"))
    kwargs = {"reshard_after_forward": 2}
    return Case(seeded(Net), kwargs, ConnectionError, "no groups today", without)


# -- wrong placements --------------------------------------------------------------------------


def _last_dimension(net: nn.Module, answer: Any) -> dict[str, Any]:
    """Answer so for the parameter that comes last."""
    last = list(net.parameters())[-1]

    def place(param: nn.Parameter) -> Any:
        if param is last and isinstance(answer, BaseException):
            raise answer
        return answer if param is last else None

    return {"shard_placement_fn": place}


def _no_such_dimension() -> Case:
    net = seeded(Net)
    return Case(net, _last_dimension(net, Shard(2)), ValueError, "expected a dimension")


def _no_shard() -> Case:
    net = seeded(Net)
    return Case(net, _last_dimension(net, Replicate()), ValueError, r"expected Shard\(dim\)")


def _no_answer() -> Case:
    net = seeded(Net)
    return Case(net, _last_dimension(net, LookupError("what?")), LookupError, "what")


def _tied_over_two_meshes() -> Case:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    second[1].weight = first.weight
    fully_shard(first, mesh=_whole_mesh())
    return Case(second, {"mesh": _two_by_two()["dp"]}, ValueError, r"1\.weight is tied to weight")


def _second_is_cut_over_data_parallel_ranks() -> Case:
    mesh = _two_by_two()
    net = _on(mesh, [Replicate(), Shard(0)], [Shard(0), Replicate()])
    kwargs = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    return Case(
        net, kwargs, ValueError, r"p1 on rank \d: expected Replicate\(\) on the data parallel"
    )


def _second_is_on_another_mesh() -> Case:
    mesh = _two_by_two()
    net = _on(mesh, [Replicate(), Shard(0)])
    net.p1 = _on(mesh["tp"], [Shard(0)]).p0
    kwargs = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    return Case(net, kwargs, ValueError, r"p1 on rank \d: with dp_mesh_dims, expected every")


def _second_is_plain() -> Case:
    mesh = _two_by_two()
    net = _on(mesh, [Replicate(), Shard(0)])
    net.p1 = nn.Parameter(torch.ones(4))
    kwargs = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    return Case(net, kwargs, ValueError, r"p1 is a plain tensor of shape \(4,\)")


def _second_is_cut_over_the_mesh() -> Case:
    mesh = _two_by_two()
    net = nn.Sequential(nn.Linear(4, 4), _on(mesh["dp"], [Shard(0)]))
    return Case(net, {"mesh": mesh["dp"]}, ValueError, "expected meshes that have only this rank")


CASES: list[Callable[[], Case]] = [
    _sharded_already,
    _replicated_already,
    _no_subclasses,
    _container,
    _scripted,
    _scripted_itself,
    _outside_in,
    _lazy,
    _half_an_extension,
    _that_cannot_be_cut,
    _cube,
    _pigeon,
    _no_policy,
    _a_third_dtype_for_single_parameters,
    _gradients_of_another_dtype,
    _no_factor,
    _no_factor_of_its_own_mesh,
    _warned_where_warnings_are_errors,
    _keeps_a_dtensor,
    _keeps_an_extension,
    _no_groups_to_keep_in,
    _no_such_dimension,
    _no_shard,
    _no_answer,
    _tied_over_two_meshes,
    _second_is_cut_over_data_parallel_ranks,
    _second_is_on_another_mesh,
    _second_is_plain,
    _second_is_cut_over_the_mesh,
]


def _look(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Everything that a call could change: classes, hooks, parameters, attributes."""
    seen: dict[str, Any] = {}
    for i, top in enumerate(modules):
        for name, module in top.named_modules():
            where = f"{i} {name}"
            seen[f"{where}: class"] = type(module)
            for key, value in module.__dict__.items():
                # Dictionaries (hooks, parameters, children): the same objects, in order.
                seen[f"{where}: {key}"] = list(value.items()) if isinstance(value, dict) else value
            for key, param in module._parameters.items():
                seen[f"{where}: attributes of {key}"] = dict(getattr(param, "__dict__", {}))
                seen[f"{where}: values of {key}"] = _values_of(param)
    return seen


def _values_of(param: nn.Parameter | None) -> Any:
    if param is None or isinstance(param, nn.UninitializedParameter | _Uncuttable | Halved):
        return None
    return own_part(param).tolist()


def _same(one: Any, other: Any) -> bool:
    """Whether two looks found the same objects."""
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return _same(list(one.items()), list(other.items()))
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def _refuse(case: Case) -> None:
    modules = case.target if isinstance(case.target, list) else [case.target]
    before = _look(modules)
    with case.meanwhile, pytest.raises(case.kind, match=case.says):
        fully_shard(case.target, **case.kwargs)
    after = _look(modules)
    assert list(before) == list(after)
    for where, found in before.items():
        assert _same(found, after[where]), f"{where}: before {found}, after {after[where]}"


def _refuse_all(rank: int, world_size: int) -> dict[str, str]:
    """What was wrong, by case."""
    wrong: dict[str, str] = {}
    for make in CASES:
        try:
            _refuse(make())
        except (AssertionError, pytest.fail.Exception) as error:
            wrong[make.__name__] = str(error)
        dist.barrier()
    return wrong


def test_a_call_that_raises_has_changed_nothing(threads: Ranks) -> None:
    for rank, wrong in enumerate(threads(_refuse_all, WORLD_SIZE)):
        assert not wrong, f"rank {rank}"


@on_threads(2)
def test_the_right_call_comes_through_after_wrong_ones(rank: int, world_size: int) -> None:
    net, twin = seeded(Net), fully_shard(seeded(Net))
    for kwargs in (_last_dimension(net, Shard(2)), {"mp_policy": None}, _last_dimension(net, 1)):
        with pytest.raises((ValueError, TypeError)):
            fully_shard(net, **kwargs)
    fully_shard(net)
    assert isinstance(net, FSDPModule)
    x = batches(world_size)[rank]
    assert torch.equal(loss_of(net, x), loss_of(twin, x))
