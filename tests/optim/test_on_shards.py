"""Any optimizer on shards: it computes what it computes on one process, or is refused."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import (
    FullyShardedDataParallel,
    PeerLostError,
    RanksDivergedError,
    checkpoint,
    fully_shard,
    init_mesh,
    relayout,
)
from shardwise.optim import in_backward, local, offload, whole
from tests.corpus.gathering import in_full
from tests.optim.nets import Mesh, Net, OneByOne, set_gradients, train_on_microbatches
from tests.threads import run_threads
from tests.worlds import on_processes, on_threads

Way = Callable[..., torch.optim.Optimizer]


class Averages(torch.optim.Optimizer):
    """Element by element: a lerp, with a count in the group, as in many optimizers."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.7) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                state["average"].lerp_(param.grad, 1 - group["beta"])
                param.sub_(state["average"] * group["lr"] / math.sqrt(group["count"]))


class MiniShampoo(OneByOne):
    """A factor for each dimension: a list of tensors of other shapes."""

    def __init__(self, params: Any, lr: float = 0.05, eps: float = 0.1) -> None:
        super().__init__(params, lr=lr, eps=eps)

    def update(self, param: Any, grad: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        grad = grad.float()
        if not state:
            state["step"] = 0
            state["factors"] = [group["eps"] * torch.eye(n) for n in param.shape]
        state["step"] += 1
        for dim, factor in enumerate(state["factors"]):
            flat = grad.movedim(dim, 0).flatten(1) if grad.ndim > 1 else grad[:, None]
            factor.add_(flat @ flat.T)
            inverse = torch.linalg.inv(factor)
            grad = torch.tensordot(inverse, grad.movedim(dim, 0), 1).movedim(0, dim)
        param.sub_(grad.to(param.dtype), alpha=group["lr"])


class Coupled(torch.optim.Optimizer):
    """The norm of all gradients scales each update, as with ``max_grad_norm`` of LAMB."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([param.grad.float().norm() for param in every]).norm()
        for group in self.param_groups:
            group["norm"] = float(norm)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / norm.to(param.dtype), alpha=group["lr"])


class ByNorm(OneByOne):
    """The norm of a parameter scales its update, as with LARS."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr)

    def update(self, param: Any, grad: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        param.sub_(grad * param.norm() / grad.norm(), alpha=group["lr"])


class Assigning(OneByOne):
    """Gives a parameter other memory, where others write to it."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr)

    def update(self, param: Any, grad: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        param.data = param - group["lr"] * grad


MESHES = (
    Mesh({"dp": 3}),
    Mesh({"dp": 3}, dim=1),
    Mesh({"replicate": 2, "shard": 2}),
    Mesh({"dp": 2, "tp": 2}),
)
OPTIMIZERS: dict[str, tuple[Way, Any, dict[str, Any]]] = {
    "local-adamw": (local, torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "local-averages": (local, Averages, {}),
    "local-sgd": (local, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "local-assigning": (local, Assigning, {}),
    "local-adagrad": (local, torch.optim.Adagrad, {"lr": 0.1}),
    "whole-averages": (whole, Averages, {}),
    "whole-adagrad": (whole, torch.optim.Adagrad, {"lr": 0.1}),
    "whole-adafactor": (whole, torch.optim.Adafactor, {"lr": 0.1}),
    "whole-shampoo": (whole, MiniShampoo, {}),
    "whole-norms": (whole, ByNorm, {}),
    "whole-coupled": (whole, Coupled, {}),
}


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups with other hyperparameters; a frozen parameter is in one."""
    params = dict(net.named_parameters())
    params["norm.bias"].requires_grad_(False)
    vectors = [param for param in params.values() if param.ndim < 2]
    others = [param for param in params.values() if param.ndim > 1]
    return [{"params": others}, {"params": vectors, "lr": 0.01}]


def _has(step: int) -> Callable[[str], bool]:
    """Which parameters have a gradient in a step: one begins later, one never has any."""
    return lambda name: name != "norm.bias" and (name != "down.weight" or step > 1)


def _take(net: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    """Train with a schedule."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in steps:
        set_gradients(net, step, _has(step))
        optimizer.step()
        schedule.step()


def _step_alike(pairs: Iterable[tuple[nn.Module, torch.optim.Optimizer]], *steps: int) -> None:
    """Take the same steps with several nets, with gradients for all parameters."""
    for net, optimizer in pairs:
        for step in steps:
            set_gradients(net, step)
            optimizer.step()


def _assert_same(net: nn.Module, wanted: nn.Module, what: str, error: float = 1e-6) -> None:
    for name, param in wanted.named_parameters():
        found = in_full(net.get_parameter(name)).detach()
        off = (found - param.detach()).abs().max().item() if param.numel() else 0.0
        assert off <= error, f"{what} {name} is off by {off:.1e}"


def _updated() -> list[Any]:
    """Each optimizer on every second mesh, and `make long` has all."""
    return [
        pytest.param(name, mesh, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, name in enumerate(OPTIMIZERS)
        for j, mesh in enumerate(MESHES)
        if name != "whole-coupled" or "tp" not in mesh.sizes  # which is refused
    ]


@pytest.mark.parametrize(("name", "mesh"), _updated(), ids=str)
def test_the_update_is_that_of_one_process(name: str, mesh: Mesh) -> None:
    run_threads(_updates, mesh.size, name, mesh)


def _updates(rank: int, world_size: int, name: str, mesh: Mesh) -> None:
    way, kind, settings = OPTIMIZERS[name]
    for dtype in (torch.float32, torch.bfloat16):
        wanted, net = Net().to(dtype), mesh.build(dtype)
        _take(wanted, kind(_groups(wanted), **settings), range(3))
        _take(net, way(kind, _groups(net), **settings), range(3))
        # Torch rounds some elements of bfloat16 in another way, depending on where they lie.
        error = 1e-6 if way is whole or dtype is torch.float32 else 2**-6
        _assert_same(net, wanted, f"{name} on {mesh}, {dtype}:", error)


#: One of each kind of states: made by the first step or with the optimizer, lists, or none.
SAVED = (
    *("local-adamw", "local-averages", "local-adagrad"),
    *("whole-adagrad", "whole-adafactor", "whole-shampoo", "whole-coupled"),
)


def _saves(rank: int, world_size: int, folder: Path) -> None:
    for name in SAVED:
        way, kind, settings = OPTIMIZERS[name]
        net = Mesh({"dp": 3}).build()
        optimizer = way(kind, _groups(net), **settings)
        _take(net, optimizer, range(2))
        checkpoint.save(folder / name, net, optimizer)


def _loads(rank: int, world_size: int, folder: Path, mesh: Mesh) -> None:
    for name in SAVED:
        way, kind, settings = OPTIMIZERS[name]
        wanted, net = Net(), mesh.build() if world_size > 1 else Net()
        optimizer, its = way(kind, _groups(net), **settings), kind(_groups(wanted), **settings)
        _take(wanted, its, range(2))
        checkpoint.load(folder / name, net, optimizer)
        for each, steps in ((net, optimizer), (wanted, its)):
            for step in (2, 3):
                set_gradients(each, step, _has(step))
                steps.step()
        _assert_same(net, wanted, f"{name} on {mesh}:")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks have saved, by optimizer."""
    folder = tmp_path_factory.mktemp("saved")
    run_threads(_saves, 3, folder)
    return folder


@pytest.mark.parametrize("mesh", [Mesh({"dp": 2}), Mesh({"replicate": 2, "shard": 2}), Mesh({})])
def test_training_goes_on_from_a_checkpoint_on_another_mesh(mesh: Mesh, saved: Path) -> None:
    run_threads(_loads, mesh.size, saved, mesh)


WAYS = {"local": (local, Averages), "whole": (whole, MiniShampoo), "together": (whole, Coupled)}


@pytest.mark.parametrize("name", WAYS)
@on_threads(2)
def test_torchs_own_shards(rank: int, world_size: int, name: str) -> None:
    way, kind = WAYS[name]
    wanted, net = Net(), Net()
    torch.distributed.fsdp.fully_shard(net.up)
    torch.distributed.fsdp.fully_shard(net)
    _take(wanted, kind(_groups(wanted)), range(3))
    _take(net, way(kind, _groups(net)), range(3))
    _assert_same(net, wanted, name)


class Odd(nn.Module):
    """A scalar, one element, a parameter that is not sharded, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.tensor([3.0]))
        self.rows = nn.Parameter(torch.randn(2, 5, generator=generator))
        self.plain = nn.Parameter(torch.randn(3, 4, generator=generator))


def _odd() -> tuple[Odd, Odd]:
    net = Odd()
    fully_shard(net, ignored_params={net.plain})
    assert not isinstance(net.plain, DTensor)
    return net, Odd()


@pytest.mark.parametrize("name", WAYS)
@on_threads(3)
def test_scalars_plain_parameters_and_ranks_without_rows(
    rank: int, world_size: int, name: str
) -> None:
    way, kind = WAYS[name]
    net, wanted = _odd()
    optimizer, its = way(kind, net.parameters()), kind(wanted.parameters())
    _step_alike([(net, optimizer), (wanted, its)], 0, 1, 2)
    _assert_same(net, wanted, name)


#: Optimizers with scalars in the states of all parameters: steps, and ``eta`` and ``mu`` of ASGD.
COUNTING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "local-asgd": lambda params: local(torch.optim.ASGD, params, t0=1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, t0=1, foreach=True),
}


@pytest.mark.parametrize("name", COUNTING)
@on_threads(2)
def test_what_counts_is_told_from_the_state_of_a_scalar(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    make = COUNTING[name]
    wanted, trained = Odd(), Odd()
    wrapped = FullyShardedDataParallel(trained, device_id=torch.device("cpu"))
    its, optimizer = make(wanted.parameters()), make(wrapped.parameters())
    _step_alike([(wanted, its), (trained, optimizer)], 0, 1)
    for each in (its, optimizer):
        each.zero_grad()
    kinds = {key: type(value) for key, value in optimizer.state[trained.rows].items()}
    assert {torch.Tensor, DTensor} == set(kinds.values())
    checkpoint.save(tmp_path / "saved", wrapped, optimizer)
    by_name = FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)
    checkpoint.save_rank_checkpoint(str(tmp_path / "files"), wrapped, optimizer)
    fresh = make(wrapped.parameters())
    checkpoint.load(tmp_path / "saved", wrapped, fresh)
    loaded = [optimizer, fresh]
    loaded += [make(wrapped.parameters()) for _ in range(2)]
    FullyShardedDataParallel.optim_state_dict_to_load(
        wrapped, loaded[2], by_name, load_directly=True
    )
    checkpoint.load_rank_checkpoint(str(tmp_path / "files"), wrapped, loaded[3])
    for each in loaded:
        assert {key: type(value) for key, value in each.state[trained.scalar].items()} == kinds
    relayout(wrapped, fresh, strategy="no-shard")
    assert {key: type(value) for key, value in fresh.state[trained.scalar].items()} == kinds
    _step_alike([(wanted, its), (trained, fresh)], 2)
    _assert_same(trained, wanted, name)


@pytest.mark.parametrize("name", WAYS)
@on_threads(2)
def test_the_state_dict_of_a_rank_is_loaded_by_the_same_rank(
    rank: int, world_size: int, name: str
) -> None:
    way, kind = WAYS[name]
    wanted, net, other = Net(), Mesh({"dp": 2}).build(), Mesh({"dp": 2}).build()
    first, second = (way(kind, _groups(each)) for each in (net, other))
    its = kind(_groups(wanted))
    _take(net, first, range(2))
    _take(wanted, its, range(2))
    other.load_state_dict(net.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state_dict()["param_groups"] == first.state_dict()["param_groups"]
    _step_alike([(other, second), (wanted, its)], 2)
    _assert_same(other, wanted, name)


@pytest.mark.parametrize("name", WAYS)
@on_threads(2)
def test_groups_hooks_closures_and_none_of_them_again(
    rank: int, world_size: int, name: str
) -> None:
    way, kind = WAYS[name]
    wanted, net = Net(), Mesh({"dp": 2}).build()
    seen: list[str] = []

    def closure() -> str:
        seen.append("closure")
        assert torch.is_grad_enabled()
        return "loss"

    for each, make in ((wanted, kind), (net, lambda *params: way(kind, *params))):
        some, *rest = list(each.parameters())
        optimizer = make([some])
        optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
        set_gradients(each, 0)
        assert optimizer.step(closure) in ("loss", None)  # the small ones call none
        optimizer.add_param_group({"params": rest, "lr": 0.02})
        set_gradients(each, 1)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step() if kind is not Coupled else None  # which has no norm then
    _assert_same(net, wanted, name)
    assert seen.count("hook") == (4 if kind is Coupled else 6)
    assert "closure" in seen


@pytest.mark.parametrize("name", ["local", "whole"])
@on_threads(2)
def test_a_step_in_backward(rank: int, world_size: int, name: str) -> None:
    way, kind = WAYS[name]
    train_on_microbatches(
        rank,
        world_size,
        lambda net: in_backward(net, lambda params: way(kind, params)),
        lambda net: kind(net.parameters()),
        lambda net, is_last: net.set_is_last_backward(is_last),
    )


@pytest.mark.parametrize("name", WAYS)
@on_threads(4)
def test_another_layout_in_memory(rank: int, world_size: int, name: str) -> None:
    way, kind = WAYS[name]
    wanted, net = Net(), Mesh({"dp": 4}).build()
    pairs = [(net, optimizer := way(kind, _groups(net))), (wanted, kind(_groups(wanted)))]
    _step_alike(pairs, 0)
    for _, each in pairs:
        each.zero_grad()
    relayout(net, optimizer, mesh=init_mesh(device_type="cpu", replicate=2, shard=2))
    _step_alike(pairs, 1)
    _assert_same(net, wanted, name)


@on_threads(2)
def test_gradients_on_some_ranks_only_are_named(rank: int, world_size: int) -> None:
    net = Mesh({"dp": 2}).build()
    optimizer = whole(MiniShampoo, net.named_parameters())
    set_gradients(net, 0, lambda name: rank == 0 or name != "up.bias")
    before = {name: in_full(param).clone() for name, param in net.named_parameters()}
    with pytest.raises(RanksDivergedError, match=r"up\.bias on rank 0"):
        optimizer.step()
    for name, param in net.named_parameters():
        assert torch.equal(in_full(param), before[name])
    local(Averages, net.parameters()).step()  # which sends nothing


class Fails(MiniShampoo):
    """Has no memory for one matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].shape == (16, 6):
            raise MemoryError("no memory")
        super().step()


@on_processes(3, pg_timeout=60)
def test_nobody_waits_for_a_rank_that_fails_in_the_middle(rank: int, world_size: int) -> None:
    net = Mesh({"dp": 3}).build()
    optimizer = whole(Fails, net.parameters())
    set_gradients(net, 0)
    with pytest.raises((MemoryError, PeerLostError)) as caught:
        optimizer.step()
    kept = optimizer.kept()
    assert kept is not None
    if net.up.weight not in kept:
        assert "during the all-to-all of step of shardwise.optim.whole(Fails)" in str(caught.value)


class WithArgument(torch.optim.SGD):
    """Wants more than gradients."""

    def step(self, loss: Any) -> None:  # type: ignore[override]
        raise AssertionError


def test_what_cannot_work_is_refused() -> None:
    net = Net()
    refusals = {
        (local, ByNorm): "its update depends on how a parameter is cut",
        (local, MiniShampoo): "its update depends on how a parameter is cut",
        (local, Coupled): "its update depends on how a parameter is cut",
        (local, torch.optim.LBFGS): "needs a closure",
        (whole, torch.optim.LBFGS): "needs a closure",
        (whole, WithArgument): "raised TypeError",
    }
    for (way, kind), message in refusals.items():
        with pytest.raises(
            ValueError, match=re.escape(f"{way.__name__}({kind.__name__})")
        ) as error:
            way(kind, net.parameters())
        assert message in str(error.value)
    optimizer = whole(MiniShampoo, net.parameters())
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="states of its own"):
        offload(optimizer, "host")


@on_threads(4)
def test_coupled_parameters_on_several_meshes_are_refused(rank: int, world_size: int) -> None:
    net = Mesh({"dp": 2, "tp": 2}).build()
    with pytest.raises(ValueError, match="parameters on 2 meshes, expected one"):
        whole(Coupled, net.parameters())


@on_threads(2)
def test_coupled_parameters_step_together(rank: int, world_size: int) -> None:
    net = Mesh({"dp": 2}).build()
    optimizer = whole(Coupled, net.parameters())
    set_gradients(net, 0)
    shown = optimizer.param_groups[0]
    optimizer.param_groups = [{**shown, "params": shown["params"][:2]}]
    with pytest.raises(RuntimeError, match=r"a step of 2 of \d+ parameters"):
        optimizer.step()


@on_threads(3)
def test_ranks_share_the_states(rank: int, world_size: int) -> None:
    net = Mesh({"dp": 3}).build()
    optimizer = whole(torch.optim.AdamW, net.parameters())
    set_gradients(net, 0)
    optimizer.step()
    assert set(optimizer.state) == optimizer.kept()
    held: list[Any] = [None] * 3
    mine = [name for name, param in net.named_parameters() if param in optimizer.state]
    torch.distributed.all_gather_object(held, mine)
    assert sorted(name for own in held for name in own) == sorted(
        name for name, _ in net.named_parameters()
    )
    assert all(held)
