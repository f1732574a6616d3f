"""What people's models do, each against an unsharded twin."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from shardwise.sharding.group_state import GroupState
from shardwise.sharding.hooks import state_of
from tests.sharding.nets import (
    WIDTH,
    Block,
    Net,
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    loss_of,
    seeded,
)

Ranks = Callable[..., list[Any]]


def _shard(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Shard every block, then the model."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **kwargs)
    return fully_shard(model, **kwargs)


def _twins(make: Callable[[], nn.Module], **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    return _shard(seeded(make), **kwargs), seeded(make)


def _train(
    net: nn.Module,
    whole: nn.Module,
    rank: int,
    world_size: int,
    *args: Any,
    steps: int = 3,
    make: Any = torch.optim.SGD,
    **kwargs: Any,
) -> None:
    """Take some steps with both; gradients and values stay equal."""
    optimizers = [make(m.parameters(), lr=0.05, **kwargs) for m in (net, whole)]
    for step in range(steps):
        x = batches(world_size, step)
        net(x[rank], *args).square().mean().backward()
        for batch in x:
            (whole(batch, *args).square().mean() / world_size).backward()
        assert_same_gradients(net, whole)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(net, whole)


# -- what goes in and comes out ----------------------------------------------------------------


@dataclass
class Pair:
    left: torch.Tensor
    more: dict[str, Any]


class Nested(nn.Module):
    """Takes and returns tensors in dictionaries, lists and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: dict[str, Any], *, pair: Pair) -> dict[str, Any]:
        x = inputs["list"][0] + pair.left * self.scale
        left = self.block(x)
        return {"pair": Pair(left, {"right": [x * self.scale, None]}), "name": "nested"}


class NestedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Nested(), Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.first, self.second):
            output = module({"list": [x, 3]}, pair=Pair(x, {}))
            assert output["name"] == "nested"
            assert isinstance(output["pair"], Pair)
            x = output["pair"].left + output["pair"].more["right"][0]
        return x


def _nested(rank: int, world_size: int) -> None:
    net, whole = seeded(NestedNet), seeded(NestedNet)
    fully_shard(net.first)
    fully_shard(net.second)
    fully_shard(net)
    _train(net, whole, rank, world_size)


def test_nested_inputs_and_outputs(ranks: Ranks) -> None:
    ranks(_nested, 2)


class Stack(nn.ModuleList):
    """A container with a forward of its own."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def _container(rank: int, world_size: int) -> None:
    net, whole = fully_shard(seeded(Stack)), seeded(Stack)
    assert len(net) == 2
    _train(net, whole, rank, world_size)


def test_a_container_with_a_forward_of_its_own(ranks: Ranks) -> None:
    ranks(_container, 2)


# -- which parameters train --------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen layer, and two thin ones that train beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.Sequential(LowRank(), LowRank())
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


def _adapted(rank: int, world_size: int, whole_groups: bool) -> None:
    net, whole = seeded(Adapted), seeded(Adapted)
    for layer in net.layers:
        if whole_groups:  # some groups have nothing to train at all
            fully_shard(layer.base)
        fully_shard(layer)
    for layer in (net.embed, net.head):
        fully_shard(layer)
    fully_shard(net)
    _train(net, whole, rank, world_size)
    for model in (net, whole):
        model.layers[1].base.requires_grad_(True)
        model.layers[0].down.requires_grad_(False)
    _train(net, whole, rank, world_size)
    for model in (net, whole):
        model.requires_grad_(False)
        model.embed.requires_grad_(True)
    _train(net, whole, rank, world_size)
    assert all(state_of(layer).groups[0].state is GroupState.SHARDED for layer in net.layers)


@pytest.mark.parametrize("whole_groups", [False, True], ids=["part of a group", "whole groups"])
def test_adapters_and_freezing_while_training(ranks: Ranks, whole_groups: bool) -> None:
    ranks(_adapted, 2, whole_groups)


class Skipping(nn.Module):
    """Runs only the blocks that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        for i in which:
            x = self.blocks[i](x)
        return x


def _skips(rank: int, world_size: int) -> None:
    net, whole = _twins(Skipping)
    for which in [(0, 1, 2), (0, 2), (2, 1, 0), (1,), (0, 1, 2)]:
        _train(net, whole, rank, world_size, which, steps=2)
        for block in net.blocks:
            assert state_of(block).groups[0].state is GroupState.SHARDED


def test_steps_that_run_other_modules_in_other_orders(ranks: Ranks) -> None:
    ranks(_skips, 2)


# -- how often they run ------------------------------------------------------------------------


class Twice(nn.Module):
    """Enters one block three times: one after the other, and side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.other = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.block(self.block(x)))
        return x + self.block(2 * x)


def _twice(rank: int, world_size: int) -> None:
    for free in (True, False):
        net, whole = _twins(Twice, reshard_after_forward=free)
        _train(net, whole, rank, world_size)


def test_one_module_entered_several_times(ranks: Ranks) -> None:
    ranks(_twice, 2)


def _many_forwards(rank: int, world_size: int, guard: Any) -> None:
    net, whole = _twins(Net)
    for step in range(2):
        x, other = batches(world_size, step), batches(world_size, step + 1)
        losses = [loss_of(net, part[rank]) for part in (x, other)]
        with guard():
            net(x[rank])
        sum(losses).backward()
        average_backward(whole, x)
        average_backward(whole, other)
        assert_same_gradients(net, whole)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_forwards_and_an_evaluation_before_one_backward(ranks: Ranks, guard: Any) -> None:
    ranks(_many_forwards, 2, guard)


def _evaluates_before_the_step(rank: int, world_size: int, guard: Any, options: Any) -> None:
    net, whole = _twins(Net, reshard_after_forward=None)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **options) for m in (net, whole)]
    for step in range(3):
        x = batches(world_size, step)
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        with guard():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with guard():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]), msg="stale values")


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_what_stayed_whole_over_a_step_is_gathered_anew(
    ranks: Ranks, guard: Any, options: Any
) -> None:
    ranks(_evaluates_before_the_step, 2, guard, options)


# -- activation checkpointing ------------------------------------------------------------------


class Inside(nn.Module):
    """A block that computes its own inside again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())

        return x + checkpoint(inside, x, use_reentrant=self.reentrant)


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward: each, all of them together, or inside of each."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            Inside(reentrant) if where == "inside" else Block() for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 2)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.where == "each":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.where == "all":
            x = checkpoint(self._run, x, use_reentrant=self.reentrant)
        else:
            x = self._run(x)
        return self.head(x)


def _checkpointed(rank: int, world_size: int, where: str, reentrant: bool, k: Any) -> None:
    def make() -> nn.Module:
        return Checkpointed(where, reentrant)

    net, whole = seeded(make), seeded(make)
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=k)
    fully_shard(net)
    if where == "whole":
        _train(_Whole(net, reentrant), _Whole(whole, reentrant), rank, world_size)
    else:
        _train(net, whole, rank, world_size)
    for block in net.blocks:
        assert state_of(block).groups[0].state is GroupState.SHARDED
    assert not state_of(net).root.forward_root


class _Whole(nn.Module):
    """Computes all of a model again."""

    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("k", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("where", ["each", "all", "inside", "whole"])
def test_activation_checkpointing(ranks: Ranks, where: str, reentrant: bool, k: Any) -> None:
    ranks(_checkpointed, 2, where, reentrant, k)


# -- dtypes ------------------------------------------------------------------------------------


class EveryKind(nn.Module):
    """Parameters of one group: of many dtypes, with none or one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.none = nn.Parameter(torch.empty(4, 0, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.phase = nn.Parameter(torch.tensor(1 + 1j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.linear(x) * self.narrow) @ self.wide.T.float()
        x = (x * self.waves * self.phase).abs() * self.scalar
        return x + self.empty.sum() + self.none.sum()


def _every_kind(rank: int, world_size: int, transport: str) -> None:
    net, whole = _twins(EveryKind, transport=transport)
    dtypes = [param.dtype for param in whole.parameters()]
    _train(net, whole, rank, world_size)
    assert [param.dtype for param in net.parameters()] == dtypes
    assert net.empty.to_local().numel() == 0
    assert whole.empty.grad is None or net.empty.grad is None
    _train(net, whole, rank, world_size, momentum=0.9)


@pytest.mark.parametrize("transport", ["c10d", "collectives"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_many_dtypes_no_elements_and_scalars_in_one_group(
    ranks: Ranks, world_size: int, transport: str
) -> None:
    ranks(_every_kind, world_size, transport)


class Product(nn.Module):
    """Its weight's gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _no_rounding(rank: int, world_size: int) -> None:
    net = fully_shard(
        Product(),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True),
    )
    for sync, value in ((False, 1.0), (False, 2.0**-9), (True, 2.0**-10)):
        net.set_requires_gradient_sync(sync)
        net(torch.full((4,), value)).backward()
    expected = 1.0 + 2.0**-9 + 2.0**-10  # bfloat16 has eight bits: it would stay at one
    assert torch.equal(net.weight.grad.full_tensor(), torch.full((4,), expected))


def test_gradients_accumulate_in_reduce_dtype_without_rounding(ranks: Ranks) -> None:
    ranks(_no_rounding, 2)


class _Overflowing(Net):
    """Overflows in one layer where it is told to."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def _overflows(rank: int, world_size: int) -> None:
    net = _shard(seeded(_Overflowing))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    scales = []
    for step in range(4):
        before = [param.full_tensor().clone() for param in net.parameters()]
        net.factor = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale(loss_of(net, batches(world_size, step)[rank])).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(net.parameters(), 1e6)
        assert bool(torch.isfinite(norm)) == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = [param.full_tensor() for param in net.parameters()]
        same = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        assert all(same) if step == 1 else not any(same), f"step {step}"
    assert scales == [16.0, 8.0, 8.0, 16.0]


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    ranks(_overflows, 2)


class _OneOverflows(nn.Module):
    """The second row of the weight belongs to the second rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _one_shard_overflows(rank: int, world_size: int) -> None:
    net = fully_shard(_OneOverflows())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.tensor([[1.0], [float("inf")]]).expand(2, 3)
    scaler.scale(net(x)).backward()
    finite = bool(torch.isfinite(net.weight.grad.to_local()).all())
    assert finite == (rank == 0), "only one rank can see it"
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(net.weight.full_tensor(), torch.ones(2, 3))
    assert scaler.get_scale() == 2.0


def test_an_overflow_in_one_shard_skips_the_step_on_all(ranks: Ranks) -> None:
    ranks(_one_shard_overflows, 2)


# -- optimizers and norms ----------------------------------------------------------------------


def _norms(rank: int, world_size: int) -> None:
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        ours, theirs, whole = _shard(seeded(Net)), _shard(seeded(Net)), seeded(Net)
        x = batches(world_size)
        loss_of(ours, x[rank]).backward()
        loss_of(theirs, x[rank]).backward()
        average_backward(whole, x)
        norms = [
            clip_grad_norm_(ours.parameters(), 0.1, norm_type),
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, norm_type).full_tensor(),
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type),
        ]
        assert norms[2] > 0.1, "there is something to clip"
        for norm in norms[:2]:
            torch.testing.assert_close(norm, norms[2])
        assert_same_gradients(ours, whole)
        assert_same_gradients(theirs, whole)


def test_torchs_clipping_and_ours_agree(ranks: Ranks) -> None:
    ranks(_norms, 2)


def _optimizers(rank: int, world_size: int) -> None:
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        net, whole = _twins(Net)
        _train(net, whole, rank, world_size, make=torch.optim.AdamW, **options)


def test_foreach_and_fused_optimizers(ranks: Ranks) -> None:
    ranks(_optimizers, 2)


def _recreated(rank: int, world_size: int) -> None:
    net, whole = _twins(Net)
    models = (net, whole)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in models]
    for step in range(4):
        if step == 2:
            states = [optimizer.state_dict() for optimizer in optimizers]
            assert isinstance(states[0]["state"][0]["exp_avg"], DTensor)
            optimizers = [torch.optim.Adam(m.parameters(), lr=0.0) for m in models]
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        x = batches(world_size, step)
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(net, whole)


def test_an_optimizer_made_anew_from_its_state_dict_trains_on(ranks: Ranks) -> None:
    ranks(_recreated, 2)


# -- conversions and state dicts ---------------------------------------------------------------


@contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _swapped(rank: int, world_size: int, after_a_step: bool) -> None:
    net, whole = _twins(Net)
    if after_a_step:
        _train(net, whole, rank, world_size, steps=1)
    params = list(net.parameters())
    with _swapping():
        net.double()
        whole.double()
        assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
        assert all(param.dtype == torch.float64 for param in params)
        x = batches(world_size).double()
        for _ in range(2):
            loss_of(net, x[rank]).backward()
            average_backward(whole, x)
            assert_same_gradients(net, whole)
        for model in (net, whole):
            model.load_state_dict({name: v.clone() for name, v in model.state_dict().items()})
            model.zero_grad()
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)


@pytest.mark.parametrize("after_a_step", [False, True], ids=["before a step", "after a step"])
def test_conversions_that_swap_parameters(ranks: Ranks, after_a_step: bool) -> None:
    ranks(_swapped, 2, after_a_step)


def _assigned(rank: int, world_size: int) -> None:
    net, whole = _twins(Net)
    other, other_whole = _shard(seeded(Net, seed=1)), seeded(Net, seed=1)
    _train(net, whole, rank, world_size, steps=1)
    net.load_state_dict(other.state_dict(), assign=True)
    whole.load_state_dict(other_whole.state_dict())
    _train(net, whole, rank, world_size)


def test_assigned_state_dicts_train_on(ranks: Ranks) -> None:
    ranks(_assigned, 2)


def _broadcast(rank: int, world_size: int) -> None:
    net, whole = _twins(Stack)
    _train(net, whole, rank, world_size, make=torch.optim.Adam, steps=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    loss_of(net, batches(world_size)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = get_model_state_dict(net, options=to_rank_0)
    # On CPUs torch gives out the steps that the optimizer counts on.
    state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=to_rank_0))
    assert bool(values) == (rank == 0)

    other = _shard(seeded(Stack, seed=1))
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.05)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, values, options=from_rank_0)
    set_optimizer_state_dict(other, other_optimizer, state, options=from_rank_0)
    x = batches(world_size, 1)[rank]
    for model, its in ((net, optimizer), (other, other_optimizer)):
        loss_of(model, x).backward()
        its.step()
    for (name, param), twin in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), twin.full_tensor()), name


def test_full_state_dicts_of_one_rank_load_on_all(ranks: Ranks) -> None:
    ranks(_broadcast, 2)


# -- views and compiled blocks -----------------------------------------------------------------


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(-1, 2, 4)


def _views(rank: int, world_size: int) -> None:
    net = fully_shard(Viewing())
    with pytest.warns(UserWarning, match="Viewing returned a view"):
        net(torch.ones(1, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            net(torch.ones(1, WIDTH))
        fully_shard(Block())(torch.ones(1, WIDTH))


def test_a_view_as_output_warns(ranks: Ranks) -> None:
    ranks(_views, 1)


def _compiled(rank: int, world_size: int, in_place: bool) -> None:
    # Dynamo itself looks at the gradients of a graph's inputs.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    net, whole = seeded(Net), seeded(Net)
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    for i, block in enumerate(net.blocks):
        if in_place:
            block.compile(backend=backend)
        fully_shard(block)
        if not in_place:
            net.blocks[i] = torch.compile(block, backend=backend)
    fully_shard(net)
    managed = [module for module in net.modules() if not hasattr(module, "_orig_mod")]
    assert all(module._is_fsdp_managed_module for module in managed)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (net, whole)]
    for step in range(3):
        x = batches(world_size, step)
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        grads = [param.grad.full_tensor() for param in net.parameters()]
        for found, param in zip(grads, whole.parameters(), strict=True):
            torch.testing.assert_close(found, param.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert frames, "something was compiled"
    for graph in frames:
        assert "all_gather" not in graph.code
        assert "shardwise" not in graph.code
    targets = {node.target for graph in frames for node in graph.graph.nodes}
    assert any("linear" in str(target) for target in targets), targets


@pytest.mark.parametrize("in_place", [True, False], ids=["module.compile", "torch.compile"])
def test_compiled_blocks_train_alike_with_hooks_outside_of_graphs(
    ranks: Ranks, in_place: bool
) -> None:
    ranks(_compiled, 2, in_place)
