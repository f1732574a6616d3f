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
    """What to shard, which error that is, what it says, with what, and what holds meanwhile."""

    target: Any
    kind: type[BaseException]
    says: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    meanwhile: AbstractContextManager[Any] = field(default_factory=nullcontext)


def _two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _layer() -> nn.Module:
    return nn.Linear(4, 4)


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


def _replicated() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(_layer())


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_layer())


def _that_cannot_be_cut() -> nn.Module:
    net = nn.Sequential(_layer(), _layer())
    net[1].weight = nn.Parameter(torch.ones(4, 4).as_subclass(_Uncuttable))
    return net


def _with_gradients_of_another_dtype() -> nn.Module:
    net = seeded(Net)
    net.head.bias.grad_dtype = torch.bfloat16
    return net


# -- wrong arguments ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _LaterPolicy(MixedPrecisionPolicy):
    """What torch 2.15 added."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


def _no_factor_of_its_own_mesh() -> Case:
    net = seeded(Net)
    info = FSDPMeshInfo(_two_by_two()["tp"], shard_mesh_dim=0)
    kwargs = {**_last_is_placed(net, ShardPlacementResult(None, info)), "reshard_after_forward": 4}
    return Case(net, ValueError, r"factor of the 2 ranks that head\.bias, which", kwargs)


def _keeps_a_dtensor() -> Case:
    net, mesh = seeded(Net), _two_by_two()
    cut = distribute_tensor(net.head.weight.detach(), mesh["tp"], [Replicate()])
    net.head.weight = nn.Parameter(cut)
    kwargs = {"mesh": mesh["dp"], "reshard_after_forward": 2}
    # Two of two ranks is all of them: nothing is kept.
    fully_shard(_layer(), **kwargs)
    cube = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    cut = distribute_tensor(net.head.weight.full_tensor().detach(), cube["tp"], [Replicate()])
    net.head.weight = nn.Parameter(cut)
    kwargs["mesh"] = cube["dp"]
    return Case(net, NotImplementedError, r"head\.weight on rank \d: an integer", kwargs)


def _no_groups_to_keep_in() -> Case:
    def fail(*_: Any) -> Any:
        raise ConnectionError("no groups today")

    without = patch.object(DataMesh, "of_groups_of", fail)
    return Case(
        seeded(Net), ConnectionError, "no groups today", {"reshard_after_forward": 2}, without
    )


# -- wrong placements --------------------------------------------------------------------------


def _last_is_placed(net: nn.Module, answer: Any) -> dict[str, Any]:
    """Answer so for the parameter that comes last."""
    last = list(net.parameters())[-1]

    def place(param: nn.Parameter) -> Any:
        if param is last and isinstance(answer, BaseException):
            raise answer
        return answer if param is last else None

    return {"shard_placement_fn": place}


def _placed(answer: Any, kind: type[BaseException], says: str) -> Case:
    net = seeded(Net)
    return Case(net, kind, says, _last_is_placed(net, answer))


def _tied_over_two_meshes() -> Case:
    first, second = _layer(), nn.Sequential(_layer(), _layer())
    second[1].weight = first.weight
    fully_shard(first, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    kwargs = {"mesh": _two_by_two()["dp"]}
    alive = nullcontext(first)  # without it there is no tie
    return Case(second, ValueError, r"1\.weight is tied to weight", kwargs, alive)


def _on(mesh: DeviceMesh, *placements: Sequence[Any]) -> nn.Module:
    """A module with one ``DTensor`` parameter for each list of placements."""
    net = nn.Module()
    net.forward = lambda x: x
    for i, each in enumerate(placements):
        whole = torch.arange(16.0).view(4, 4)
        net.register_parameter(f"p{i}", nn.Parameter(distribute_tensor(whole, mesh, list(each))))
    return net


def _second(make: Callable[[DeviceMesh], nn.Parameter], says: str) -> Case:
    """The first parameter is right for a mesh of both dimensions, and the second is wrong."""
    mesh = _two_by_two()
    net = _on(mesh, [Replicate(), Shard(0)])
    net.p1 = make(mesh)
    kwargs = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    return Case(net, ValueError, says, kwargs)


def _second_is_cut_over_the_mesh() -> Case:
    mesh = _two_by_two()["dp"]
    net = nn.Sequential(_layer(), _on(mesh, [Shard(0)]))
    return Case(net, ValueError, "expected meshes that have only this rank", {"mesh": mesh})


CASES: dict[str, Callable[[], Case]] = {
    "sharded already": lambda: Case(
        [_layer(), fully_shard(_layer())], ValueError, "already been applied"
    ),
    "replicated": lambda: Case([_layer(), _replicated()], ValueError, r"torch's replicate\(\)"),
    "no subclasses": lambda: Case([_layer(), _Final(4, 4)], TypeError, "nobody inherits"),
    "a container": lambda: Case(nn.ModuleList([_layer()]), ValueError, "no forward of its own"),
    "scripted inside": lambda: Case(
        nn.Sequential(_layer(), _scripted()),
        ValueError,
        r"1\.weight on rank \d.*compiled by torch\.jit",
    ),
    "scripted itself": lambda: Case(_scripted(), ValueError, "compiled by torch.jit"),
    "outside in": lambda: Case(
        [_layer(), fully_shard(nn.Sequential(_layer(), _layer()))[1]],
        ValueError,
        "Apply fully_shard from the inside out",
    ),
    "lazy": lambda: Case(
        nn.Sequential(_layer(), nn.LazyLinear(4)),
        ValueError,
        r"1\.weight on rank \d: found a parameter of a lazy module",
    ),
    "half an extension": lambda: Case(Half(OnlyOne, 4), ValueError, "has only one of"),
    "cannot be cut": lambda: Case(_that_cannot_be_cut(), ArithmeticError, "no copies"),
    "gradients of another dtype": lambda: Case(
        _with_gradients_of_another_dtype(),
        NotImplementedError,
        r"head\.bias on rank \d.*reduce_dtype",
    ),
    "a cube": lambda: Case(
        seeded(Net),
        ValueError,
        "found 3 dimensions",
        {"mesh": init_device_mesh("cpu", (1, 1, WORLD_SIZE))},
    ),
    "a pigeon": lambda: Case(seeded(Net), ValueError, "one of auto", {"transport": "pigeon"}),
    "no policy": lambda: Case(
        seeded(Net), TypeError, "expected a MixedPrecisionPolicy", {"mp_policy": None}
    ),
    "a third dtype for single parameters": lambda: Case(
        seeded(Net),
        ValueError,
        "param_dtype_override_fn returned torch.float16, expected None, the param_dtype",
        {"mp_policy": _LaterPolicy(torch.bfloat16, param_dtype_override_fn=lambda _: torch.half)},
    ),
    "no factor": lambda: Case(
        seeded(Net), ValueError, "factor of the 4 ranks", {"reshard_after_forward": 3}
    ),
    "no factor of its own mesh": _no_factor_of_its_own_mesh,
    "warned, where warnings are errors": lambda: Case(
        seeded(Net), UserWarning, "keeps full parameters", {"reshard_after_forward": 1}
    ),
    "keeps a DTensor": _keeps_a_dtensor,
    "keeps an extension": lambda: Case(
        Half(Halved, 4),
        NotImplementedError,
        r"first\.weight on rank \d: an",
        {"reshard_after_forward": 2},
    ),
    "no groups to keep in": _no_groups_to_keep_in,
    "no such dimension": lambda: _placed(Shard(2), ValueError, "expected a dimension"),
    "no shard": lambda: _placed(Replicate(), ValueError, r"expected Shard\(dim\)"),
    "no answer": lambda: _placed(LookupError("what?"), LookupError, "what"),
    "tied over two meshes": _tied_over_two_meshes,
    "second is cut over data parallel ranks": lambda: _second(
        lambda mesh: _on(mesh, [Shard(0), Replicate()]).p0,
        r"p1 on rank \d: expected Replicate\(\) on the data parallel",
    ),
    "second is on another mesh": lambda: _second(
        lambda mesh: _on(mesh["tp"], [Shard(0)]).p0,
        r"p1 on rank \d: with dp_mesh_dims, expected every",
    ),
    "second is plain": lambda: _second(
        lambda mesh: nn.Parameter(torch.ones(4)), r"p1 is a plain tensor of shape \(4,\)"
    ),
    "second is cut over the mesh": _second_is_cut_over_the_mesh,
}


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
    for name, make in CASES.items():
        try:
            _refuse(make())
        except (AssertionError, pytest.fail.Exception) as error:
            wrong[name] = str(error)
        dist.barrier()
    return wrong


def test_a_call_that_raises_has_changed_nothing(threads: Ranks) -> None:
    for rank, wrong in enumerate(threads(_refuse_all, WORLD_SIZE)):
        assert not wrong, f"rank {rank}"


@on_threads(2)
def test_the_right_call_comes_through_after_wrong_ones(rank: int, world_size: int) -> None:
    net, twin = seeded(Net), fully_shard(seeded(Net))
    for kwargs in (_last_is_placed(net, Shard(2)), {"mp_policy": None}, _last_is_placed(net, 1)):
        with pytest.raises((ValueError, TypeError)):
            fully_shard(net, **kwargs)
    fully_shard(net)
    assert isinstance(net, FSDPModule)
    x = batches(world_size)[rank]
    assert torch.equal(loss_of(net, x), loss_of(twin, x))
