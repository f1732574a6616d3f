"""Muon, Adafactor and Lion on any mesh compute what they compute on one process."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Collection
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

from shardwise import checkpoint
from shardwise._torch import dtensor
from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.optim import Adafactor, Lion, Muon
from shardwise.transport.peers import Peers
from tests.harness import run_ranks
from tests.optim.nets import ACCUMULATIONS, Mesh, Net, Set, set_gradients, train_on_microbatches
from tests.optim.references import (
    HIDDEN,
    OPTIMIZERS,
    AdafactorReference,
    assert_same,
    assert_same_state,
    make_adafactor,
    make_lion,
)
from tests.threads import run_threads
from tests.worlds import Ranks, on_threads

STEPS = 2
_MESHES = [
    Mesh({"dp": 1}),
    Mesh({"dp": 3}),
    Mesh({"dp": 8}),
    Mesh({"dp": 4}, dim=1),
    Mesh({"dp": 2, "tp": 2}),
    Mesh({"replicate": 2, "shard": 2}),
    Mesh({"replicate": 2, "shard": 2, "tp": 2}),
]
#: Lion computes element by element: three meshes show all that it does.
MESHES = {
    "muon": [*_MESHES, Mesh({"replicate": 3, "shard": 1}), Mesh({"dp": 3, "tp": 2})],
    "adafactor": [*_MESHES, Mesh({"dp": 3}, dim=2)],
    "lion": [Mesh({"dp": 1}), Mesh({"dp": 3}), Mesh({"dp": 2, "tp": 2})],
}
#: Eight ranks of which smaller meshes show all pairs of dimensions.
LONG = [("muon", _MESHES[2]), ("adafactor", _MESHES[2]), ("adafactor", _MESHES[-1])]


def _check_steps(name: str, mesh: Mesh, **settings: Any) -> None:
    make, reference_of = OPTIMIZERS[name]
    net, reference = mesh.build(), reference_of(**settings)
    optimizer = make(net, **settings)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        optimizer.step()
        reference.step(step)
        assert_same(net, reference, f"{mesh}, step {step}")
    assert_same_state(net, optimizer, reference)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=pytest.mark.long if (name, mesh) in LONG else ())
        for name, meshes in MESHES.items()
        for mesh in meshes
    ],
    ids=str,
)
def test_update_and_state_are_those_of_one_process(threads: Ranks, name: str, mesh: Mesh) -> None:
    threads(lambda *_: _check_steps(name, mesh), mesh.size)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("muon", {"nesterov": False, "weight_decay": 0.0}),
        ("muon", {"momentum": 0.5, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}),
        ("muon", {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"}),
        ("adafactor", {"beta2_decay": -0.5, "eps": (1e-3, 0.1)}),
        ("adafactor", {"d": 3.0, "weight_decay": 0.0}),
        ("adafactor", {"maximize": True, "lr": torch.tensor(0.01)}),
    ],
    ids=lambda case: case if isinstance(case, str) else next(iter(case)),
)
@on_threads(2)
def test_settings_are_those_of_torch(
    rank: int, world_size: int, name: str, settings: dict[str, Any]
) -> None:
    _check_steps(name, Mesh({"dp": world_size}), **settings)


def _check_plain_tensors(name: str, what: str) -> None:
    make, reference_of = OPTIMIZERS[name]
    net, reference = Net(), reference_of()
    optimizer = make(net)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        optimizer.step()
        reference.step(step)
    assert_same(net, reference, what)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_tensors_need_no_process_group(name: str) -> None:
    _check_plain_tensors(name, "one process")


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_threads(2)
def test_parameters_without_a_gradient_are_left_alone(
    rank: int, world_size: int, name: str
) -> None:
    make, reference_of = OPTIMIZERS[name]
    net, reference = Mesh({"dp": world_size}).build(), reference_of()
    optimizer = make(net)
    of_each_kind = ("embed.weight", "experts", "up.bias")
    for step, missing in enumerate([(), ("up.weight",), of_each_kind, HIDDEN, (), ()]):

        def has(name: str, missing: tuple[str, ...] = missing) -> bool:
            return name not in missing

        set_gradients(net, step, has)
        optimizer.step()
        reference.step(step, has)
        assert_same(net, reference, f"without {missing}")


def _torchs_adafactor(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(net.parameters(), **AdafactorReference.SETTINGS)


@pytest.mark.parametrize(
    ("make", "reference"), [(make_adafactor, _torchs_adafactor), (make_lion, make_lion)]
)
@pytest.mark.parametrize("tell", ACCUMULATIONS)
def test_gradients_of_several_backwards_are_added_up(
    threads: Ranks, make: Any, reference: Any, tell: Set
) -> None:
    threads(train_on_microbatches, 3, make, reference, tell)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_and_a_pickled_optimizer_go_on(name: str) -> None:
    net = Net()
    optimizer = OPTIMIZERS[name][0](net)
    set_gradients(net, 1)
    optimizer.step()
    twin, copied = copy.deepcopy((net, optimizer))
    _, pickled = pickle.loads(pickle.dumps((net, optimizer)))
    for each in (optimizer, copied, pickled):
        for group in each.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        each.step()
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)


def _saves(rank: int, world_size: int, folder: Path) -> None:
    for name, (make, _) in OPTIMIZERS.items():
        net = Mesh({"dp": world_size}).build()
        optimizer = make(net)
        for step in (1, 2):
            set_gradients(net, step)
            optimizer.step()
        checkpoint.save(folder / name, net, optimizer)


def _loads(rank: int, world_size: int, folder: Path) -> None:
    for name, (make, reference_of) in OPTIMIZERS.items():
        reference = reference_of()
        for step in range(1, 5):
            reference.step(step)
        for mesh in (Mesh({"dp": 4}, dim=1), Mesh({"dp": 2, "tp": 2})):
            net = mesh.build()
            optimizer = make(net)  # it has no state yet
            checkpoint.load(folder / name, net, optimizer)
            # Through torch's own state dict as well, into another optimizer.
            another = make(net)
            set_optimizer_state_dict(net, another, get_optimizer_state_dict(net, optimizer))
            for step in (3, 4):
                set_gradients(net, step)
                another.step()
            assert_same(net, reference, f"{name} on {mesh}")
            dist.barrier()


def test_training_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    run_threads(_saves, 3, tmp_path)
    run_threads(_loads, 4, tmp_path)


@pytest.mark.parametrize("at_once", [1, 10, 100])
@pytest.mark.parametrize("name", ["adafactor", "lion"])
def test_pieces_change_nothing_but_rounding(
    monkeypatch: pytest.MonkeyPatch, name: str, at_once: int
) -> None:
    monkeypatch.setattr(f"shardwise.optim.{name}.AT_ONCE", at_once)
    _check_plain_tensors(name, f"{at_once} elements at once")


def test_lion_rounds_a_parameter_in_bfloat16_once() -> None:
    """Decay alone is too small to move it, and so would be lost if it were rounded by itself."""
    before = torch.full((8,), 1.0, dtype=torch.bfloat16)
    param = nn.Parameter(before.clone())
    lion = Lion([param], lr=2**-8, weight_decay=0.5)
    param.grad = torch.ones(8, dtype=torch.bfloat16)
    lion.step()
    expected = (before.float() - 2**-8 * (1 + 0.5 * before.float())).bfloat16()
    assert torch.equal(param.detach(), expected)
    assert lion.state[param]["exp_avg"].dtype == torch.bfloat16


# -- gradients that are missing, and ranks that fail -----------------------------------------------


def _cannot_step(
    rank: int, world_size: int, name: str, lacks: Collection[str], spoiled: str | None = None
) -> str:
    """Try a step for which rank 1 lacks gradients, or has a state of another size."""
    net = Mesh({"dp": world_size}).build()
    optimizer = OPTIMIZERS[name][0](net)
    set_gradients(net, 1)
    optimizer.step()
    before = copy.deepcopy([dtensor.plain(param) for param in net.parameters()])
    state = optimizer.state[net.up.weight]
    kept = dict(state)
    if rank == 1 and spoiled is not None:  # as from a file that was read by hand
        state[spoiled] = torch.zeros(1)
    set_gradients(net, 2, lambda each: rank != 1 or each not in lacks)
    own = rank == 1 and spoiled is not None
    with pytest.raises(ValueError if own else RanksDivergedError) as caught:
        optimizer.step()
    state.update(kept)
    assert all(map(torch.equal, before, map(dtensor.plain, net.parameters())))
    assert all(each.get("step", 1) == 1 for each in optimizer.state.values())
    set_gradients(net, 3)
    optimizer.step()  # and training can go on
    return str(caught.value)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_gradients_of_some_ranks_only_are_an_error_on_all(threads: Ranks, name: str) -> None:
    first, second, third = threads(_cannot_step, 3, name, {"down.weight"})
    assert "down.weight on rank 0 only, none on rank 1 only" in first
    assert "none on rank 1 only, down.weight on rank 0 only" in second
    assert "down.weight on rank 2 only, none on rank 1 only" in third
    assert "set and clear gradients alike" in first


def test_a_rank_without_any_gradient_is_an_error_on_all(threads: Ranks) -> None:
    first, *_ = threads(_cannot_step, 2, "muon", {*HIDDEN, "experts"})
    assert "experts, up.weight, down.weight and 1 more on rank 0 only" in first


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("muon", "momentum_buffer", "up.weight: found a momentum_buffer of shape (1,)"),
        ("adafactor", "row_var", "up.weight: row_var: found torch.float32 of shape [1], expected"),
    ],
)
def test_what_one_rank_cannot_use_stops_all_of_them(
    threads: Ranks, name: str, state: str, message: str
) -> None:
    first, second = threads(_cannot_step, 2, name, (), state)
    assert message in second
    assert "rank 1 raised an error before it" in first


def _fails_in_the_middle(rank: int, world_size: int, name: str, computes: str) -> str:
    """Rank 1 runs out of memory between two messages; it lives until the others have noticed."""
    net = Mesh({"dp": world_size}).build()
    optimizer = OPTIMIZERS[name][0](net)
    set_gradients(net, 1)
    before = copy.deepcopy([dtensor.plain(param) for param in net.parameters()])

    def fail(*args: object) -> None:
        raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(computes, fail)
        with pytest.raises(MemoryError if rank == 1 else PeerLostError) as caught:
            optimizer.step()
    store = Peers().store
    if rank == 1:
        store.wait(["noticed 0", "noticed 2"], timedelta(seconds=30))
    else:
        store.set(f"noticed {rank}", "")
    assert all(map(torch.equal, before, map(dtensor.plain, net.parameters())))
    assert all(own.get("step", 0) == 0 for own in optimizer.state.values())
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "computes", "message"),
    [
        ("muon", "shardwise.optim.matrices.orthogonalize", "all-to-all of Muon"),
        (
            "adafactor",
            "shardwise.optim.adafactor.FactoredUpdate.compute",
            "all-reduce of the means and norms of Adafactor",
        ),
    ],
)
def test_nobody_waits_for_a_rank_that_fails_in_the_middle(
    name: str, computes: str, message: str
) -> None:
    first, second, third = run_ranks(_fails_in_the_middle, 3, name, computes, pg_timeout=60)
    assert second == "no memory"
    for each in (first, third):
        assert f"during the {message}" in each


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Muon, {"lr": -1.0}, "lr: found -1.0, expected 0 or more"),
        (Muon, {"momentum": float("nan")}, "momentum: found nan, expected 0 or more"),
        (Muon, {"ns_steps": 100}, "ns_steps: found 100, expected 0 to 99"),
        (Muon, {"ns_coefficients": (1.0,)}, "ns_coefficients: found (1.0,), expected three"),
        (Muon, {"adjust_lr_fn": "rms"}, "adjust_lr_fn: found 'rms', expected one of"),
        (Muon, {"lr": torch.ones(2)}, "lr: found a tensor of 2 elements, expected 1"),
        (Adafactor, {"lr": -1.0}, "lr: found -1.0, expected 0 or more"),
        (Adafactor, {"lr": torch.ones(2)}, "lr: found a tensor of 2 elements, expected 1"),
        (Adafactor, {"beta2_decay": 0.5}, "beta2_decay: found 0.5, expected 0 or less"),
        (Adafactor, {"eps": (-1.0, 0.0)}, "eps: found (-1.0, 0.0), expected"),
        (Adafactor, {"d": 0.5}, "d: found 0.5, expected 1 or more"),
        (Adafactor, {"weight_decay": float("nan")}, "weight_decay: found nan, expected 0 or"),
        (Lion, {"lr": -1.0}, "lr: found -1.0, expected 0 or more"),
        (Lion, {"betas": (0.9, 1.5)}, "betas: found (0.9, 1.5), expected two from 0 to 1"),
        (Lion, {"weight_decay": float("nan")}, "weight_decay: found nan, expected 0 or more"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else getattr(case, "__name__", ""),
)
def test_impossible_settings_are_named(make: Any, settings: dict[str, Any], message: str) -> None:
    matrix = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        make([matrix], **settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        make([{"params": [matrix], **settings}])
