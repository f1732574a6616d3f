"""``in_backward``: every group steps in backward, with the numbers of a step after it."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import FSDPModule, fully_shard
from shardwise.base.errors import MisuseError, StepInterruptedError
from shardwise.diloco import DiLoCo
from shardwise.optim import (
    Adafactor,
    AdamW8bit,
    ClipBy,
    Lion,
    Muon,
    NonFinite,
    OptimizerInBackward,
    in_backward,
    muon_groups,
    param_groups,
)
from shardwise.sharding.state import groups_of
from shardwise.transport import memory
from tests.corpus.models import MODELS, make_model
from tests.sharding.nets import (
    Net,
    batches,
    hybrid_mesh,
    in_turn,
    loss_of,
    run_over,
    seeded,
    shard_blocks,
    sharded_net,
    step_all,
)
from tests.worlds import Ranks, on_threads


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose step depends on the steps before."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


class Recomputing(Net):
    """Blocks that are recomputed: if ``reentrant``, each in a backward of its own."""

    numbers: tuple[int, ...] = (0, 1)
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.numbers:
            x = checkpoint(self.blocks[number], x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        out: torch.Tensor = self.head(x)
        return out


def odd(**kwargs: Any) -> nn.Module:
    net = make_model("odd")
    for block in MODELS["odd"].blocks(net):
        fully_shard(block, **kwargs)
    return fully_shard(net, **kwargs)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shards, by name, also while modules hold full parameters."""
    forms = {
        each: param.form
        for group in groups_of(model)
        for param in group.params
        for each in (param.full, param.sharded)
    }
    return {name: forms[p].local.clone() for name, p in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Twins:
    """A model that steps in backward, and its twin, which an ordinary optimizer steps.

    Args:
        shard: makes each model.
        make: makes its optimizer.
        settings: of ``in_backward``.
    """

    def __init__(
        self,
        shard: Callable[[], nn.Module] = sharded_net,
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **settings: Any,
    ) -> None:
        self.mine, self.theirs = shard(), shard()
        self.both = self.mine, self.theirs
        self.optimizer = in_backward(self.mine, lambda _: make(self.mine), **settings)
        self.ordinary = make(self.theirs)

    def backward(self, x: torch.Tensor) -> None:
        """Go backward through both."""
        for model in self.both:
            loss_of(model, x).backward()

    def step(self, x: torch.Tensor) -> None:
        """Go backward through both, and step the twin."""
        self.backward(x)
        self.ordinary.step()
        self.ordinary.zero_grad()
        self.assert_same()

    def assert_same(self) -> None:
        """Compare bit for bit."""
        assert_equal(values(self.mine), values(self.theirs))


def _stepping(model: nn.Module, **settings: Any) -> OptimizerInBackward:
    """Let a model step in backward with AdamW."""
    return in_backward(model, lambda _: adamw(model), **settings)


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's second moments, by name."""
    return {
        name: optimizer.state[p]["exp_avg_sq"].to_local()
        for name, p in model.named_parameters()
        if p in optimizer.state
    }


def _same(
    rank: int,
    world_size: int,
    transport: str,
    make: Callable[..., nn.Module],
    hybrid: bool = False,
    **kwargs: Any,
) -> None:
    mesh = hybrid_mesh(world_size) if hybrid else None
    twins = Twins(lambda: make(mesh=mesh, transport=transport, **kwargs))
    for step in range(2):
        x = batches(world_size, step)[rank]
        with torch.no_grad():
            assert torch.equal(twins.mine(x), twins.theirs(x))
        twins.step(x)
        assert all(p.grad is None for p in twins.mine.parameters())
    assert_equal(moments(twins.optimizer, twins.mine), moments(twins.ordinary, twins.theirs))


STRATEGIES = {
    "zero3": {"reshard_after_forward": True},
    "zero2": {"reshard_after_forward": False},
    "over fewer": {"reshard_after_forward": 2},
    "hybrid": {"hybrid": True},
}
CASES = [
    (world_size, name)
    for world_size in (1, 2, 3, 4)
    for name in STRATEGIES
    if world_size == 4 or (name in ("zero3", "zero2"))
]


@pytest.mark.parametrize(
    ("world_size", "strategy", "make"),
    [
        # One model after the other: with each strategy and with each number of ranks.
        pytest.param(*case, make, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, case in enumerate(CASES)
        for j, make in enumerate((sharded_net, odd))
    ],
)
def test_numbers_are_those_of_a_step_after_backward(
    threads: Ranks, world_size: int, strategy: str, make: Callable[..., nn.Module]
) -> None:
    threads(_same, world_size, "c10d", make, **STRATEGIES[strategy])


def _same_if_large(rank: int, world_size: int, transport: str) -> None:
    """All gradients count as large: their memory is given back, and groups step at once."""
    with mock.patch.object(memory, "RETURNED_BYTES", 0):
        _same(rank, world_size, transport, odd)


def test_numbers_are_the_same_in_shared_memory_also_if_gradients_are_given_back_early() -> None:
    run_over("shm", in_turn, 2, functools.partial(_same, make=odd), _same_if_large)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(muon_groups(model, adamw={"lr": 0.02}), lr=0.1)


def _adamw8bit(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW8bit(model.parameters(), lr=0.02)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return Adafactor(param_groups(model, {"*bias": {"lr": 0.05}}), lr=0.1)


def _lion(model: nn.Module) -> torch.optim.Optimizer:
    return Lion(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("make", [_muon, _adamw8bit, _adafactor, _lion])
@on_threads(2)
def test_optimizers_that_need_whole_matrices_or_blocks_step_too(
    rank: int, world_size: int, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    twins = Twins(make=make)
    for step in range(2):
        twins.step(batches(world_size, step)[rank])


@pytest.mark.parametrize("reentrant", [False, True])
@on_threads(2)
def test_numbers_are_the_same_if_activations_are_recomputed(
    rank: int, world_size: int, reentrant: bool
) -> None:
    twins = Twins(lambda: sharded_net(Recomputing))
    for step in range(2):
        for model in twins.both:
            model.reentrant = reentrant
        twins.step(batches(world_size, step)[rank].requires_grad_())


def _names_with_gradients(model: nn.Module) -> set[str]:
    """The modules some of whose shards have a gradient."""
    return {
        param.fqn.rpartition(".")[0]
        for group in groups_of(model)
        for param in group.params
        if param.sharded.grad is not None
    }


@pytest.mark.parametrize("hybrid", [False, True])
@on_threads(4)
def test_the_gradients_of_two_groups_never_exist_together(
    rank: int, world_size: int, hybrid: bool
) -> None:
    net = sharded_net(mesh=hybrid_mesh(world_size) if hybrid else None, transport="c10d")
    seen: list[set[str]] = []

    def make(_: Any) -> torch.optim.Optimizer:
        inner = adamw(net)
        inner.register_step_pre_hook(lambda *_: seen.append(_names_with_gradients(net)))
        return inner

    in_backward(net, make)
    loss_of(net, batches(world_size)[rank]).backward()
    blocks = [{f"blocks.{i}.up", f"blocks.{i}.down"} for i in range(3)]
    assert seen == [blocks[2], blocks[1], {"head", ""}, blocks[0]]


def _without_sync(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def _with_sync(model: FSDPModule, is_last: bool) -> None:
    model.set_is_last_backward(is_last)


def _within_replicas(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)
    model.set_is_last_backward(is_last)


def _accumulates(rank: int, world_size: int, set_last: Callable[..., None]) -> None:
    mesh = hybrid_mesh(world_size) if set_last is _within_replicas else None
    twins = Twins(lambda: odd(mesh=mesh))
    for step in range(2):
        for micro in range(3):
            before = values(twins.mine)
            for model in twins.both:
                set_last(model, micro == 2)
            x = batches(world_size, 3 * step + micro)[rank]
            if micro == 2:
                twins.step(x)
            else:
                twins.backward(x)
                assert_equal(values(twins.mine), before)


@pytest.mark.parametrize("set_last", [_without_sync, _with_sync, _within_replicas])
def test_the_last_of_several_backwards_steps(threads: Ranks, set_last: Callable[..., None]) -> None:
    threads(_accumulates, 4 if set_last is _within_replicas else 2, set_last)


@on_threads(2)
def test_groups_that_the_last_backward_does_not_reach_step_too(rank: int, world_size: int) -> None:
    twins = Twins()
    x = batches(world_size)[rank]
    for model in twins.both:
        model.set_is_last_backward(False)
        loss_of(model, x).backward()
        model.set_is_last_backward(True)
        model(x)
        model.blocks[0](x).sum().backward()
    twins.ordinary.step()
    twins.assert_same()


class Skipping(Net):
    """Leaves one block out, and the bias of another."""

    skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.skipped:
                continue
            bias = block.up.bias if number != (self.skipped or -2) + 1 else None
            x = x + block.down(nn.functional.linear(x, block.up.weight, bias).relu())  # type: ignore[union-attr]
        out: torch.Tensor = self.head(x) * self.gain
        return out


@pytest.mark.parametrize("max_norm", [None, math.inf])
@on_threads(2)
def test_what_zero_grad_fills_with_zeros_decays_alike(
    rank: int, world_size: int, max_norm: float | None
) -> None:
    twins = Twins(lambda: fully_shard(seeded(Skipping)), max_norm=max_norm)
    for step, (skipped, set_to_none) in enumerate(
        [(1, False), (None, False), (1, False), (0, False), (None, True), (1, True), (0, False)]
    ):
        for model in twins.both:
            model.skipped = skipped
        twins.backward(batches(world_size, step)[rank])
        for optimizer in (twins.optimizer, twins.ordinary):
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        twins.assert_same()
    before = values(twins.mine)
    assert_equal(moments(twins.optimizer, twins.mine), moments(twins.ordinary, twins.theirs))
    twins.optimizer.step()
    twins.ordinary.step()
    twins.assert_same()
    assert any(not torch.equal(each, before[name]) for name, each in values(twins.mine).items())


@on_threads(2)
def test_step_steps_with_what_is_left_and_is_harmless_otherwise(rank: int, world_size: int) -> None:
    twins = Twins()
    x = batches(world_size)[rank]
    for model in twins.both:
        model.set_is_last_backward(False)
        loss_of(model, x).backward()
        model.set_is_last_backward(True)
        loss_of(model, x)
        loss_of(model, x).mul(0).backward()
    twins.ordinary.step()
    before = values(twins.mine)
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert_equal(values(twins.mine), before)
    twins.assert_same()
    for model, optimizer in ((twins.mine, twins.optimizer), (twins.theirs, twins.ordinary)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    twins.assert_same()


@on_threads(2)
def test_parameters_outside_of_groups_wait_for_step(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        net = seeded(Net)
        return shard_blocks(net, ignored_params={net.gain})

    net = make()
    optimizer = _stepping(net)
    before = net.gain.clone()
    loss_of(net, batches(world_size)[rank]).backward()
    assert torch.equal(net.gain, before)
    torch.distributed.all_reduce(net.gain.grad)
    optimizer.step()
    assert not torch.equal(net.gain, before)
    assert net.gain.grad is None
    other = make()
    with pytest.raises(ValueError, match="gain belongs to no group"):
        _stepping(other, max_norm=1.0)


@on_threads(2)
def test_manual_finalization_steps(rank: int, world_size: int) -> None:
    twins = Twins()
    for model in twins.both:
        model.set_manual_backward_finalization(True)
    before = values(twins.mine)
    for micro in range(2):
        twins.backward(batches(world_size, micro)[rank])
        assert_equal(values(twins.mine), before)
    for model in twins.both:
        model.finalize_backward()
    twins.ordinary.step()
    twins.assert_same()


# -- the face of an optimizer --------------------------------------------------------------------


def _decayed(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05)


@on_threads(2)
def test_schedules_set_the_learning_rate_and_do_not_warn(rank: int, world_size: int) -> None:
    twins = Twins(make=_decayed)
    optimizers: tuple[torch.optim.Optimizer, ...] = twins.optimizer, twins.ordinary
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    for step in range(2):
        twins.step(batches(world_size, step)[rank])
        for schedule in schedules:
            schedule.step()
    assert [group["lr"] for group in twins.optimizer.param_groups] == [0.05 / 4] * 2


@on_threads(2)
def test_state_dicts_are_those_of_one_ordinary_optimizer(rank: int, world_size: int) -> None:
    twins = Twins(make=_decayed)
    twins.step(batches(world_size)[rank])
    found, expected = twins.optimizer.state_dict(), twins.ordinary.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    by_name = get_optimizer_state_dict(twins.theirs, twins.ordinary)
    assert get_optimizer_state_dict(twins.mine, twins.optimizer).keys() == by_name.keys()
    for load in ("plain", "torch"):
        again = Twins(make=_decayed)
        for model in again.both:
            model.load_state_dict(twins.theirs.state_dict())
        again.ordinary.load_state_dict(_copied(expected))
        if load == "plain":
            again.optimizer.load_state_dict(_copied(expected))
        else:
            set_optimizer_state_dict(again.mine, again.optimizer, _copied(by_name))
        again.step(batches(world_size, 1)[rank])


def _saved(rank: int, world_size: int, folder: Path) -> None:
    net = sharded_net()
    optimizer = _stepping(net, max_norm=0.1)
    loss_of(net, batches(1)[0]).backward()
    shardwise.checkpoint.save(folder / "saved", net, optimizer)
    loss_of(net, batches(1, 1)[0]).backward()
    shardwise.checkpoint.save(folder / "later", net, optimizer)


def _loaded(rank: int, world_size: int, folder: Path) -> None:
    net, expected = (seeded(Net) for _ in range(2))
    for each in (net, expected):
        with torch.no_grad():
            for p in each.parameters():
                p.zero_()
        shard_blocks(each)
    optimizer = _stepping(net, max_norm=0.1)
    shardwise.checkpoint.load(folder / "saved", net, optimizer)
    loss_of(net, batches(1, 1)[0]).backward()
    # An ordinary optimizer of the same parameters loads it, too.
    shardwise.checkpoint.load(folder / "later", expected, adamw(expected))
    torch.testing.assert_close(values(net), values(expected))


def test_a_checkpoint_goes_on_over_another_number_of_ranks(threads: Ranks, tmp_path: Path) -> None:
    threads(_saved, 2, tmp_path)
    threads(_loaded, 3, tmp_path)


@on_threads(2)
def test_diloco_steps_around_it(rank: int, world_size: int) -> None:
    twins = Twins()
    pairs = (twins.mine, twins.optimizer), (twins.theirs, twins.ordinary)
    optimizers = [DiLoCo(net, each, every=2, group=None) for net, each in pairs]
    for step in range(4):
        twins.backward(batches(world_size, step)[rank])
        step_all(optimizers)
        twins.assert_same()
    with pytest.raises(ValueError, match="pass what in_backward returns to DiLoCo"):
        in_backward(sharded_net(), lambda _: optimizers[1])


class Counting(torch.optim.SGD):
    """Counts steps in its parameter groups, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


@on_threads(2)
def test_what_parameter_groups_count_counts_once_a_step(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = in_backward(net, lambda params: Counting(params, lr=0.1))
    for step in range(2):
        loss_of(net, batches(world_size, step)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [group["steps"] for group in optimizer.param_groups] == [2]
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))


@on_threads(2)
def test_without_it_gradients_wait_for_a_step_after_backward(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = _stepping(net)
    with pytest.raises(ValueError, match="steps in backward already"):
        _stepping(net.blocks[0])
    optimizer.remove()
    before = values(net)
    loss_of(net, batches(world_size)[rank]).backward()
    assert_equal(values(net), before)
    assert all(p.grad is not None for p in net.parameters())
    _stepping(net)


# -- clipping ----------------------------------------------------------------------------------


def _norm(grads: dict[str, torch.Tensor], prefix: str = "") -> float:
    found = [g.double().square().sum().item() for n, g in grads.items() if n.startswith(prefix)]
    return math.sqrt(sum(found))


@pytest.mark.parametrize("clip_by", list(ClipBy))
@on_threads(2)
def test_gradients_are_clipped_by_a_norm_that_is_known(
    rank: int, world_size: int, clip_by: ClipBy
) -> None:
    def sgd(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    twins = Twins(make=sgd, max_norm=0.3, clip_by=clip_by)
    previous: float | None = None
    for step in range(2):
        twins.backward(batches(world_size, step)[rank])
        params = dict(twins.theirs.named_parameters())
        whole = {name: p.grad.full_tensor().clone() for name, p in params.items()}
        total = _norm(whole)
        for name, p in params.items():
            own = _norm(whole, ".".join(name.split(".")[:2]) if "blocks" in name else "")
            if "blocks" not in name:
                own = _norm({n: g for n, g in whole.items() if "blocks" not in n})
            by = own if previous is None or clip_by is ClipBy.GROUP_NORM else previous
            p.grad.mul_(min(1.0, 0.3 / (by + 1e-6)))
        step_all([twins.ordinary])
        assert twins.optimizer.grad_norm is not None
        torch.testing.assert_close(twins.optimizer.grad_norm.item(), total, rtol=1e-5, atol=0)
        torch.testing.assert_close(values(twins.mine), values(twins.theirs))
        previous = total
    saved = twins.optimizer.state_dict()["param_groups"][0].get("previous_norm")
    last = None if clip_by is ClipBy.GROUP_NORM else twins.optimizer.grad_norm.item()
    assert saved == last


@pytest.mark.parametrize("nonfinite", list(NonFinite))
@on_threads(2)
def test_a_group_whose_gradients_are_not_finite_may_be_skipped_on_every_rank(
    rank: int, world_size: int, nonfinite: NonFinite
) -> None:
    net = sharded_net()
    optimizer = _stepping(net, max_norm=math.inf, nonfinite=nonfinite)
    before = values(net)

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return grad.mul(math.nan)

    if rank == 0:
        net.blocks[1].up.register_full_backward_hook(
            lambda _, inputs, __: (inputs[0] * 1.0,)  # the module's own weights stay finite
        )
    handle = net.blocks[1].up.weight.register_hook(spoil if rank == 0 else lambda grad: grad)
    loss_of(net, batches(world_size)[rank]).backward()
    handle.remove()
    changed = {n for n, value in values(net).items() if not torch.equal(value, before[n])}
    spoiled = {n for n in before if n.startswith("blocks.1.")}
    assert optimizer.grad_norm is not None
    assert not math.isfinite(optimizer.grad_norm.item())
    if nonfinite is NonFinite.SKIP_GROUP:
        assert optimizer.skipped == ("blocks.1",)
        assert not changed & spoiled
        assert net.blocks[1].up.weight not in optimizer.state
        assert net.blocks[0].up.weight in optimizer.state
    else:
        assert optimizer.skipped == ()
        assert "blocks.1.up.weight" in changed or rank != 0
    loss_of(net, batches(world_size, 1)[rank]).backward()
    assert optimizer.skipped == ()


# -- what can go wrong -----------------------------------------------------------------------------


class _CaughtError(Exception):
    pass


@contextlib.contextmanager
def raising_in_backward_of(module: nn.Module) -> Iterator[None]:
    """Let a module raise in backward, which the block does not survive."""

    def fail(*_: object) -> None:
        raise _CaughtError

    handle = module.register_full_backward_hook(fail)  # type: ignore[arg-type]
    with pytest.raises(_CaughtError):
        yield
    handle.remove()


@on_threads(2)
def test_an_exception_in_the_middle_leaves_a_state_that_is_named_and_refused(
    rank: int, world_size: int
) -> None:
    net = sharded_net()
    optimizer = _stepping(net)
    x = batches(world_size)[rank].requires_grad_()
    loss_of(net, x).backward()
    saved, state = net.state_dict(), optimizer.state_dict()
    saved = {name: value.clone() for name, value in saved.items()}
    state = _copied(state)
    expected = values(net)

    with raising_in_backward_of(net.blocks[0].up):
        loss_of(net, x).backward()
    now = values(net)
    stepped = {name for name in now if not torch.equal(now[name], expected[name])}
    assert {name.rpartition(".")[0] for name in stepped} == {"blocks.2.up", "blocks.2.down"}
    for call in (lambda: net(x), optimizer.state_dict, optimizer.step, net.state_dict):
        with pytest.raises(StepInterruptedError, match=r"1 of 4 groups had stepped: 'blocks\.2'"):
            call()
    optimizer.load_state_dict(state)
    net.load_state_dict(saved)
    assert_equal(values(net), expected)
    loss_of(net, x).backward()


@on_threads(2)
def test_an_interrupted_step_may_be_accepted(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = _stepping(net)
    x = batches(world_size)[rank].requires_grad_()
    with raising_in_backward_of(net.blocks[0].up):
        loss_of(net, x).backward()
    other = net.blocks[2].down.weight
    with pytest.raises(StepInterruptedError):
        loss_of(net, x)
    optimizer.accept_interrupted_step()
    loss_of(net, x).backward()
    assert optimizer.state[other]["step"] == 2
    assert optimizer.state[net.head.weight]["step"] == 1


@on_threads(2)
def test_an_exception_before_any_group_has_stepped_makes_no_step(
    rank: int, world_size: int
) -> None:
    net = sharded_net()
    optimizer = _stepping(net)
    x = batches(world_size)[rank]
    before = values(net)
    with raising_in_backward_of(net.blocks[2].up):
        loss_of(net, x).backward()
    assert_equal(values(net), before)
    assert not optimizer.state_dict()["state"]
    loss_of(net, x).backward()
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


@on_threads(2)
def test_an_optimizer_that_raises_interrupts_the_step(rank: int, world_size: int) -> None:
    net = sharded_net()

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(p is net.blocks[1].up.weight for p in self.param_groups[0]["params"]):
                raise _CaughtError
            return super().step(closure)

    optimizer = in_backward(net, lambda params: Failing(params, lr=0.1))
    with pytest.raises(_CaughtError):
        loss_of(net, batches(world_size)[rank]).backward()
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))
    with pytest.raises(StepInterruptedError, match=r"2 of 4 groups .*'blocks\.2', 'blocks\.1'"):
        optimizer.state_dict()


@on_threads(2)
def test_a_second_backward_needs_the_values_of_its_forward(rank: int, world_size: int) -> None:
    twins = Twins()
    losses = [loss_of(model, batches(world_size)[rank]) for model in twins.both]
    for model, loss in zip(twins.both, losses, strict=True):
        model.set_is_last_backward(False)
        loss.backward(retain_graph=True)
        model.set_is_last_backward(True)
        loss.backward(retain_graph=True)
    twins.ordinary.step()
    twins.assert_same()
    with pytest.raises(MisuseError, match="stepped in another backward since this forward"):
        losses[0].backward()


@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_kept_parameters_are_gathered_again_after_a_step(rank: int, world_size: int) -> None:
    twins = Twins()
    with twins.mine.keep_unsharded():
        for step in range(2):
            x = batches(world_size, step)[rank]
            twins.step(x)
        assert torch.equal(twins.mine(x), twins.theirs(x))
    twins.assert_same()


@on_threads(2)
def test_prefetched_and_kept_parameters_are_never_stale(rank: int, world_size: int) -> None:
    twins = Twins()
    for before, after in itertools.pairwise(twins.mine.blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    twins.mine.set_reshard_after_backward(False)
    for step in range(2):
        twins.step(batches(world_size, step)[rank])


@on_threads(2)
def test_a_block_of_which_two_backwards_inside_of_another_add_gradients_cannot_step(
    rank: int, world_size: int
) -> None:
    net = sharded_net(Recomputing)
    net.numbers = (0, 0)
    _stepping(net)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.\S+ on rank \d: got another gradient"):
        loss_of(net, batches(world_size)[rank].requires_grad_()).backward()


@on_threads(2)
def test_a_gradient_that_comes_after_the_step_is_an_error(rank: int, world_size: int) -> None:
    net = sharded_net()
    _stepping(net)
    block = net.blocks[2]

    def add_to_gradients(*_: object) -> None:
        for p in block.parameters():
            p.grad = torch.zeros_like(p)

    net.blocks[0].up.register_full_backward_hook(add_to_gradients)
    with pytest.raises(RuntimeError, match=r"blocks\.2\.\S+ on rank \d: got another gradient"):
        loss_of(net, batches(world_size)[rank].requires_grad_()).backward()


@on_threads(1)
def test_wrong_use_is_refused(rank: int, world_size: int) -> None:
    net = sharded_net()
    with pytest.raises(ValueError, match="without groups"):
        _stepping(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="make returned"):
        in_backward(net, lambda params: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="needs a closure"):
        in_backward(net, torch.optim.LBFGS)
    with pytest.raises(ValueError, match="does not have"):
        in_backward(net, lambda _: adamw(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="max_norm"):
        _stepping(net, max_norm=math.nan)
    optimizer = _stepping(net)
    with pytest.raises(NotImplementedError, match="add them to the inner optimizer"):
        optimizer.add_param_group({"params": []})
    optimizer.state = defaultdict(dict)
    assert optimizer.inner.state == {}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(net, batches(world_size)[rank])).backward()
    with pytest.raises(NotImplementedError, match="GradScaler"):
        scaler.step(optimizer)
    net.load_state_dict(net.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="was replaced"):
        net(batches(world_size)[rank])


@on_threads(2)
def test_a_copied_model_does_not_step(rank: int, world_size: int) -> None:
    net = sharded_net()
    _stepping(net)
    x = batches(world_size)[rank]
    loss_of(net, x).backward()
    copied = copy.deepcopy(net)
    before = values(net)
    loss_of(copied, x).backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert_equal(values(net), before)
