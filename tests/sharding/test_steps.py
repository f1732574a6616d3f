"""Optimizers that hold what the model held before are told so; others step as ever."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import FullyShardedDataParallel, fully_shard, materialize, relayout
from shardwise.optim import in_backward, whole
from tests.worlds import on_threads


class Pair(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Two steps, which change every parameter."""
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for param, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(param.detach(), old)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


# -- nobody would use the gradients ----------------------------------------------------------------


def _before_all() -> None:
    model = Pair()
    optimizer = _adamw(model)
    fully_shard(model.body)
    fully_shard(model)
    _train(model, optimizer)


def _after_a_step() -> None:
    model = Pair()
    optimizer = _adamw(model)
    _train(model, optimizer)
    fully_shard(model)
    _train(model, optimizer)


def _wrapped() -> None:
    model = Pair()
    optimizer = _adamw(model)
    wrapper = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    _train(wrapper, optimizer)


def _with_a_closure() -> None:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):  # the first step cannot know yet
        optimizer.step(closure)


def _on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Pair()
    fully_shard(model)
    optimizer = _adamw(model)
    materialize(model)
    _train(model, optimizer)


def _half() -> None:
    model = Pair()
    fully_shard(model.body)
    optimizer = _adamw(model)
    fully_shard(model)
    _train(model, optimizer)


def _assigned() -> None:
    model = Pair()
    fully_shard(model)
    optimizer = _adamw(model)
    _train(model, optimizer)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    _train(model, optimizer)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (_before_all, "body.weight as it was before fully_shard"),
        (_after_a_step, "body.weight as it was before fully_shard"),
        (_wrapped, "body.weight as it was before fully_shard"),
        (_with_a_closure, "body.weight as it was before fully_shard"),
        (_half, "head.weight as it was before fully_shard"),
        (_on_the_meta_device, "body.weight as it was before load_state_dict"),
        (_assigned, "body.weight as it was before load_state_dict"),
    ],
)
@on_threads(2)
def test_an_optimizer_of_what_was_replaced_is_refused_on_all_ranks(
    rank: int, world_size: int, program: Callable[[], None], found: str
) -> None:
    with pytest.raises(ValueError, match=rf"step of \w+ on rank {rank}: found {found}"):
        program()


# -- somebody uses them ----------------------------------------------------------------------------


def _points_elsewhere() -> None:
    """As Accelerate and Fabric do."""
    model = Pair()
    optimizer = _adamw(model)
    before = dict(model.named_parameters())
    fully_shard(model)
    now = {before[name]: param for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [now[param] for param in group["params"]]
    _train(model, optimizer)


def _has_both() -> None:
    model = Pair()
    optimizer = _adamw(model)
    fully_shard(model)
    optimizer.add_param_group({"params": list(model.parameters())})
    _train(model, optimizer)


def _of_another_model() -> None:
    model, other = Pair(), Pair()
    its = _adamw(other)
    copied = copy.deepcopy(model)
    of_copy = _adamw(copied)
    fully_shard(model)
    twin = copy.deepcopy(model)
    for each, optimizer in (
        (model, _adamw(model)),
        (other, its),
        (copied, of_copy),
        (twin, _adamw(twin)),
    ):
        _train(each, optimizer)


def _of_a_model_that_shares_a_layer() -> None:
    model, other = Pair(), Pair()
    other.body.weight = model.body.weight
    its = _adamw(other)
    fully_shard(model)
    mine = _adamw(model)
    for _ in range(2):
        _train(model, mine)
        _train(other, its)


def _of_what_is_ignored_or_frozen() -> None:
    model = Pair()
    model.body.weight.requires_grad_(False)
    ignored, frozen = _adamw(model.head), torch.optim.AdamW([model.body.weight])
    fully_shard(model, ignored_params=set(model.head.parameters()))
    optimizer = _adamw(model.body)
    model(torch.ones(2, 4)).square().sum().backward()
    for each in (ignored, frozen, optimizer):
        each.step()


def _in_backward() -> None:
    model = fully_shard(Pair())
    _train(model, in_backward(model, torch.optim.AdamW))


@pytest.mark.parametrize(
    "program",
    [
        _points_elsewhere,
        _has_both,
        _of_another_model,
        _of_a_model_that_shares_a_layer,
        _of_what_is_ignored_or_frozen,
        _in_backward,
    ],
)
@on_threads(2)
def test_no_other_optimizer_is(rank: int, world_size: int, program: Callable[[], None]) -> None:
    program()


# -- parameters that move --------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "whole": lambda model: whole(torch.optim.AdamW, model.parameters()),
    "whole-sgd": lambda model: whole(torch.optim.SGD, model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_threads(4)
def test_an_optimizer_that_relayout_was_not_given_is_refused_on_all_ranks(
    rank: int, world_size: int, name: str
) -> None:
    first, second = (
        DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    )
    model = fully_shard(Pair(), mesh=first)
    optimizer = OPTIMIZERS[name](model)
    _train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    relayout(model, mesh=second)
    model(torch.ones(2, 4)).square().sum().backward()
    values = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="pass the optimizer to relayout, or load a checkpoint"):
        optimizer.step()
    assert all(map(torch.equal, values, (param.detach() for param in model.parameters())))
    optimizer.zero_grad()
    # Back where the states are, or with other states, it goes on.
    if name != "adamw":
        optimizer.load_state_dict(saved)
    else:
        relayout(model, mesh=first)
    _train(model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_threads(4)
def test_an_optimizer_that_relayout_was_given_steps_as_if_nothing_had_moved(
    rank: int, world_size: int, name: str
) -> None:
    torch.manual_seed(0)
    alone = Pair()
    model = fully_shard(copy.deepcopy(alone))
    kinds = {"adamw": torch.optim.AdamW, "whole": torch.optim.AdamW, "whole-sgd": torch.optim.SGD}
    its, optimizer = kinds[name](alone.parameters(), lr=0.001), OPTIMIZERS[name](model)
    if name == "whole-sgd":
        its = torch.optim.SGD(alone.parameters(), lr=0.1)
    for strategy in ("no-shard", "full", "grad-op"):
        _train(alone, its)
        _train(model, optimizer)
        relayout(model, optimizer, strategy=strategy)
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor().detach(), wanted.detach())


# -- which of torch's optimizers step shards, as docs/optimizers.md says ---------------------------

TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "fused Adagrad": lambda params: torch.optim.Adagrad(params, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=1, foreach=True),
    "Rprop": torch.optim.Rprop,
}


@on_threads(3)
def test_torchs_optimizers_step_shards_as_whole_parameters(rank: int, world_size: int) -> None:
    for name, make in TORCHS.items():
        torch.manual_seed(0)
        alone = Pair()
        model = fully_shard(copy.deepcopy(alone))  # four rows on three ranks
        for each in (alone, model):
            _train(each, make(each.parameters()))
        for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            found = param.full_tensor().detach()
            assert torch.allclose(found, wanted.detach(), rtol=1e-5, atol=1e-6), name


@on_threads(2)
def test_one_that_looks_at_whole_parameters_raises_an_error(rank: int, world_size: int) -> None:
    model = fully_shard(Pair())
    with pytest.raises((RuntimeError, NotImplementedError), match="aten"):
        _train(model, torch.optim.Adafactor(model.parameters()))
