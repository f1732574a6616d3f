"""Adafactor on any mesh computes what torch's Adafactor computes on one process."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shardwise import checkpoint
from shardwise._torch import dtensor
from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.optim import Adafactor, factored, pieces
from shardwise.transport.peers import Peers
from tests.harness import run_ranks
from tests.optim.nets import (
    ACCUMULATIONS,
    Mesh,
    Net,
    Set,
    part_of,
    set_gradients,
    train_on_microbatches,
)
from tests.worlds import on_threads

Threads = Callable[..., list[Any]]

STEPS = 2
SETTINGS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.05}


class Reference:
    """Torch's Adafactor on full tensors of fp32, rounded to a dtype after each step."""

    def __init__(self, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.net = Net().to(dtype).float()
        self._dtype = dtype
        self._optimizer = torch.optim.Adafactor(self.net.parameters(), **SETTINGS | settings)

    def step(self, number: int, has: Callable[[str], bool] = lambda name: True) -> None:
        set_gradients(self.net, number, has)
        for param in self.net.parameters():
            param.grad = None if param.grad is None else param.grad.to(self._dtype).float()
        self._optimizer.step()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for param in self.net.parameters():
                param.copy_(param.to(self._dtype))

    def state(self, name: str, key: str) -> torch.Tensor:
        found: torch.Tensor = self._optimizer.state[self.net.get_parameter(name)][key]
        return found

    def assert_same(self, net: nn.Module, what: str, tolerance: float = 1e-6) -> None:
        for name, param in net.named_parameters():
            wanted = self.net.get_parameter(name).detach().to(param.dtype)
            found, expected = dtensor.plain(param.detach()), dtensor.plain(part_of(wanted, param))
            torch.testing.assert_close(
                found, expected, rtol=tolerance, atol=1e-6, msg=f"{what}: {name}"
            )


def _make(net: nn.Module, **settings: Any) -> Adafactor:
    return Adafactor(net.named_parameters(), **SETTINGS | settings)


def _trains_as_one_process(
    rank: int, world_size: int, mesh: Mesh, settings: dict[str, Any]
) -> None:
    net = mesh.build()
    adafactor, reference = _make(net, **settings), Reference(**settings)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        adafactor.step()
        reference.step(step)
        reference.assert_same(net, f"{mesh}, step {step}")
    for name, param in net.named_parameters():
        for key, value in adafactor.state[param].items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            torch.testing.assert_close(whole, reference.state(name, key), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh({"dp": 1}),
        Mesh({"dp": 2}),
        Mesh({"dp": 3}),
        Mesh({"dp": 8}),
        Mesh({"dp": 4}, dim=1),
        Mesh({"dp": 3}, dim=2),
        Mesh({"replicate": 2, "shard": 2}),
        Mesh({"dp": 2, "tp": 2}),
        Mesh({"replicate": 2, "shard": 2, "tp": 2}),
    ],
    ids=lambda mesh: "-".join(f"{n}{s}" for n, s in mesh.sizes.items()) + f"-{mesh.dim}",
)
def test_update_and_state_are_those_of_one_process(threads: Threads, mesh: Mesh) -> None:
    threads(_trains_as_one_process, mesh.size, mesh, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"beta2_decay": -0.5, "eps": (1e-3, 0.1)},
        {"d": 3.0, "weight_decay": 0.0},
        {"maximize": True, "lr": torch.tensor(0.01)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_are_those_of_torch(threads: Threads, settings: dict[str, Any]) -> None:
    threads(_trains_as_one_process, 2, Mesh({"dp": 2}), settings)


@on_threads(3)
def test_parameters_in_bfloat16_are_rounded_from_fp32(rank: int, world_size: int) -> None:
    net = Mesh({"dp": world_size}).build(torch.bfloat16)
    adafactor, reference = _make(net), Reference(torch.bfloat16)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        adafactor.step()
        reference.step(step)
        reference.assert_same(net, f"step {step}", tolerance=2**-7)  # one rounding of a tie
    state = adafactor.state[net.up.weight]
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("at_once", [1, 10, 100])
def test_pieces_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    net, reference = Net(), Reference()
    adafactor = _make(net)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        adafactor.step()
        reference.step(step)
    reference.assert_same(net, f"{at_once} elements at once")


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


# -- gradients that are missing, and ranks that fail -----------------------------------------------


@on_threads(2)
def test_parameters_without_a_gradient_are_left_alone(rank: int, world_size: int) -> None:
    net = Mesh({"dp": world_size}).build()
    adafactor, reference = _make(net), Reference()
    every = ("embed.weight", "experts", "up.bias")
    for step, missing in enumerate([(), ("up.weight",), every, (), ()]):

        def has(name: str, missing: tuple[str, ...] = missing) -> bool:
            return name not in missing

        set_gradients(net, step, has)
        adafactor.step()
        reference.step(step, has)
        reference.assert_same(net, f"without {missing}")


def _torchs(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(net.parameters(), **SETTINGS)


@pytest.mark.parametrize("tell", ACCUMULATIONS)
def test_gradients_of_several_backwards_are_added_up(threads: Threads, tell: Set) -> None:
    threads(train_on_microbatches, 3, _make, _torchs, tell)


def _cannot_step(rank: int, world_size: int, what: str) -> str:
    net = Mesh({"dp": world_size}).build()
    adafactor = _make(net)
    set_gradients(net, 1)
    adafactor.step()
    before = copy.deepcopy([dtensor.plain(param) for param in net.parameters()])
    expected: type[Exception] = RanksDivergedError
    state = adafactor.state[net.up.weight]
    kept = state["row_var"]
    if what == "gradient":
        set_gradients(net, 2, lambda name: rank != 1 or name != "down.weight")
    elif rank == 1:
        state["row_var"], expected = torch.zeros(1), ValueError
    with pytest.raises(expected) as caught:
        adafactor.step()
    state["row_var"] = kept
    assert all(map(torch.equal, before, map(dtensor.plain, net.parameters())))
    assert all(own["step"] == 1 for own in adafactor.state.values())
    set_gradients(net, 3)
    adafactor.step()  # and training can go on
    return str(caught.value)


def test_gradients_of_some_ranks_only_are_an_error_on_all(threads: Threads) -> None:
    first, second = threads(_cannot_step, 2, "gradient")
    assert "down.weight on rank 0 only, none on rank 1 only" in first
    assert "none on rank 1 only, down.weight on rank 0 only" in second


def test_what_one_rank_cannot_use_stops_all_of_them(threads: Threads) -> None:
    first, second = threads(_cannot_step, 2, "state")
    assert "up.weight: row_var: found torch.float32 of shape [1], expected torch.float32" in second
    assert "rank 1 raised an error before it" in first


def _fails_in_the_middle(rank: int, world_size: int) -> str:
    """Rank 1 runs out of memory between two messages; it lives until the others have noticed."""
    net = Mesh({"dp": world_size}).build()
    adafactor = _make(net)
    set_gradients(net, 1)
    before = copy.deepcopy([dtensor.plain(param) for param in net.parameters()])

    def fail(*args: object) -> None:
        raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(factored.FactoredUpdate, "compute", fail)
        with pytest.raises(MemoryError if rank == 1 else PeerLostError) as caught:
            adafactor.step()
    store = Peers().store
    if rank == 1:
        store.wait(["noticed 0", "noticed 2"], timedelta(seconds=30))
    else:
        store.set(f"noticed {rank}", "")
    assert all(map(torch.equal, before, map(dtensor.plain, net.parameters())))
    assert all(own["step"] == 0 for own in adafactor.state.values())
    return str(caught.value)


def test_nobody_waits_for_a_rank_that_fails_in_the_middle() -> None:
    first, second, third = run_ranks(_fails_in_the_middle, 3, pg_timeout=60)
    assert second == "no memory"
    for message in (first, third):
        assert "during the all-reduce of the means and norms of Adafactor" in message


# -- messages --------------------------------------------------------------------------------------


def _all_reduces(rank: int, world_size: int, mesh: Mesh) -> list[int]:
    """The elements of each all-reduce of a step."""
    net = mesh.build()
    adafactor = _make(net)
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


def test_a_step_takes_two_all_reduces_for_each_dimension_that_cuts(ranks: Threads) -> None:
    """Of the columns and two means of four matrices, and of the norms of nine parameters."""
    assert ranks(_all_reduces, 2, Mesh({"dp": 2}))[0] == [6 + 6 + 16 + 5 + 2 * 4 + 9, 9]
    assert ranks(_all_reduces, 1, Mesh({"dp": 1}))[0] == []
    replicas = Mesh({"replicate": 2, "shard": 1})
    assert ranks(_all_reduces, 2, replicas)[0] == []


# -- states ----------------------------------------------------------------------------------------


def test_a_copy_and_a_pickled_optimizer_go_on() -> None:
    net = Net()
    adafactor = _make(net)
    set_gradients(net, 1)
    adafactor.step()
    twin, copied = copy.deepcopy((net, adafactor))
    _, pickled = pickle.loads(pickle.dumps((net, adafactor)))
    for optimizer in (adafactor, copied, pickled):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)


def test_the_state_of_torchs_adafactor_can_be_loaded_and_loads_there() -> None:
    ours, theirs = Net(), Net()
    adafactor = _make(ours)
    other = torch.optim.Adafactor(theirs.named_parameters(), **SETTINGS)
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


def _go_on(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for step in (3, 4):
        set_gradients(net, step)
        optimizer.step()
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in net.named_parameters()
    }


def _saves(rank: int, world_size: int, mesh: Mesh, folder: Path) -> None:
    net = mesh.build()
    adafactor = _make(net)
    for step in (1, 2):
        set_gradients(net, step)
        adafactor.step()
    checkpoint.save(folder, net, adafactor)


def _loads(rank: int, world_size: int, meshes: list[Mesh], folder: Path) -> list[Any]:
    found = []
    for mesh in meshes:
        net = mesh.build()
        adafactor = _make(net)  # it has no state yet
        checkpoint.load(folder, net, adafactor)
        # Through torch's own state dict as well, into another optimizer.
        another = _make(net)
        set_optimizer_state_dict(net, another, get_optimizer_state_dict(net, adafactor))
        found.append(_go_on(net, another))
        dist.barrier()
    return found


def test_training_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    reference = Reference()
    for step in range(1, 5):
        reference.step(step)
    expected = {name: param.detach() for name, param in reference.net.named_parameters()}
    run_ranks(_saves, 3, Mesh({"dp": 3}), tmp_path / "saved")
    meshes = [Mesh({"dp": 4}, dim=1), Mesh({"dp": 2, "tp": 2})]
    for found in run_ranks(_loads, 4, meshes, tmp_path / "saved")[0]:
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: found -1.0, expected 0 or more"),
        ({"lr": torch.ones(2)}, "lr: found a tensor of 2 elements, expected 1"),
        ({"beta2_decay": 0.5}, "beta2_decay: found 0.5, expected 0 or less"),
        ({"eps": (-1.0, 0.0)}, "eps: found (-1.0, 0.0), expected"),
        ({"d": 0.5}, "d: found 0.5, expected 1 or more"),
        ({"weight_decay": float("nan")}, "weight_decay: found nan, expected 0 or more"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Adafactor([nn.Parameter(torch.ones(2, 2))], **settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        Adafactor([{"params": [nn.Parameter(torch.ones(2, 2))], **settings}])


def test_a_closure_is_called() -> None:
    param = nn.Parameter(torch.ones(3))

    def closure() -> float:
        param.grad = torch.ones(3)
        return 2.5

    assert Adafactor([param]).step(closure) == 2.5
    assert param[0] < 1
