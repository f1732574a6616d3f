"""What programs written for torch's ``fully_shard`` rely on, where it shows beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.corpus.gathering import in_full
from tests.sharding.nets import (
    WIDTH,
    Block,
    Net,
    average_backward,
    batches,
    check_backward,
    loss_of,
    seeded,
)
from tests.worlds import on_processes, on_threads

# -- unsharding by hand ------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [True, False])
@on_threads(2)
def test_modules_may_be_unsharded_before_the_first_forward(
    rank: int, world_size: int, async_op: bool
) -> None:
    net, whole = seeded(Net), seeded(Net)
    sharded = [fully_shard(block) for block in net.blocks]
    fully_shard(net)
    for block in sharded:
        block.unshard(async_op=async_op)
    x = batches(world_size)
    check_backward(net, whole, x, rank)


@on_threads(2)
def test_a_parameter_replaced_before_is_the_one_that_is_unsharded(
    rank: int, world_size: int
) -> None:
    layer = fully_shard(nn.Linear(4, 3, bias=False))
    old = cast(DTensor, layer.weight)
    new = distribute_tensor(torch.full((3, 4), 2.0), old.device_mesh, old.placements)
    layer.weight = nn.Parameter(new)
    layer.unshard()
    torch.testing.assert_close(layer.weight.detach(), torch.full((3, 4), 2.0))


# -- several modules as one group --------------------------------------------------------------


class _StemThenBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@on_threads(2)
def test_a_container_may_be_in_a_group_with_a_module_that_runs_before_it(
    rank: int, world_size: int
) -> None:
    """It has no forward, so the other one's gathers its parameters."""
    model, whole = seeded(_StemThenBlocks), seeded(_StemThenBlocks)
    fully_shard([model.stem, model.blocks])
    fully_shard(model)
    for step in range(2):
        x = batches(world_size, step)
        check_backward(model, whole, x, rank)


# -- switches ----------------------------------------------------------------------------------


@on_threads(2)
def test_no_factor_divides_by_the_number_of_ranks_again(rank: int, world_size: int) -> None:
    net, whole = fully_shard(seeded(Net)), seeded(Net)
    x = batches(world_size)
    net.set_gradient_divide_factor(0.5)
    net.set_gradient_divide_factor(None)
    check_backward(net, whole, x, rank)


# -- the sequence of collectives ---------------------------------------------------------------

Event = tuple[str, int, torch.dtype]


@contextmanager
def _recorded(events: list[Event]) -> Iterator[None]:
    """Note the kind of each collective, and the size and dtype of what it writes."""
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    functions = {name: getattr(dist, name) for name in names}

    def recording(name: str) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            written = args[0] if args else kwargs["output"]
            events.append((name, written.numel(), written.dtype))
            return functions[name](*args, **kwargs)

        return stand_in

    for name in names:
        setattr(dist, name, recording(name))
    try:
        yield
    finally:
        for name in names:
            setattr(dist, name, functions[name])


class _Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, checkpoint(super().forward, x, use_reentrant=False))


Shard = Callable[..., Any]
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _layers(block: type[Block] = Block) -> nn.Sequential:
    return cast(nn.Sequential, seeded(lambda: nn.Sequential(*(block() for _ in range(4)))))


def _by_layer(shard: Shard, layers: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    for layer in layers:
        shard(layer, **kwargs)
    return cast(nn.Sequential, shard(layers, **kwargs))


def _frozen(shard: Shard) -> nn.Sequential:
    layers = _layers()
    for block in layers:
        cast(Block, block).up.requires_grad_(False)
    return _by_layer(shard, layers)


def _prefetching(shard: Shard) -> nn.Sequential:
    layers = _by_layer(shard, _layers())
    sharded = cast(list[FSDPModule], list(layers))
    sharded[0].set_modules_to_forward_prefetch(sharded[1:3])  # type: ignore[arg-type]
    sharded[3].set_modules_to_backward_prefetch([sharded[2], sharded[1]])
    return layers


def _partly_used(shard: Shard) -> nn.Sequential:
    layers = _layers()
    unused = nn.Linear(3, 3)
    layers[2].add_module("unused", unused)
    shard([layers[2].up, unused])
    return _by_layer(shard, layers)


MODELS: dict[str, Callable[[Shard], nn.Sequential]] = {
    "by layer": lambda shard: _by_layer(shard, _layers()),
    "resharded after forward": lambda s: _by_layer(s, _layers(), reshard_after_forward=True),
    "kept after forward": lambda s: _by_layer(s, _layers(), reshard_after_forward=False),
    "mixed precision": lambda shard: _by_layer(shard, _layers(), mp_policy=MIXED),
    "reduced as by default": lambda shard: _by_layer(shard, _layers(), mp_policy=LOW),
    "checkpointed": lambda shard: _by_layer(shard, _layers(_Checkpointed)),
    "half of each group frozen": _frozen,
    "prefetching by hand": _prefetching,
    "two layers a group": lambda shard: shard(_pairs(shard, _layers())),
    "one module of a group unused": _partly_used,
}


def _pairs(shard: Shard, layers: nn.Sequential) -> nn.Sequential:
    shard([layers[0], layers[1]])
    shard([layers[2], layers[3]])
    return layers


def _step(model: nn.Sequential, x: torch.Tensor, step: int) -> None:
    """A plain step; one with two forwards; one that accumulates."""
    if step == 1:
        (loss_of(model, x) + loss_of(model, x)).backward()
    elif step == 2:
        cast(FSDPModule, model).set_requires_gradient_sync(False)
        loss_of(model, x).backward()
        cast(FSDPModule, model).set_requires_gradient_sync(True)
    loss_of(model, x).backward()


def _sequence(shard: Shard, name: str, x: torch.Tensor) -> list[Any]:
    model, events = MODELS[name](shard), list[Any]()
    # Of two forwards in a row, ours gathers for the second, too, what the first has left.
    steps = (0, 2) if name == "kept after forward" else (0, 1, 2)
    with _recorded(events):
        for step in steps:
            events.append(f"step {step}")
            _step(model, x, step)
    return events


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="named otherwise by older torch")
@pytest.mark.parametrize("name", MODELS)
@on_processes(2)
def test_collectives_are_torchs_in_order_size_and_dtype(
    rank: int, world_size: int, name: str
) -> None:
    x = batches(world_size)[rank]

    def ours(module: Any, **kwargs: Any) -> Any:
        return shardwise.fully_shard(module, transport="collectives", **kwargs)

    found = _sequence(ours, name, x)
    expected = _sequence(torch_fsdp.fully_shard, name, x)
    # One more number for each parameter: whether any rank has a gradient. Torch leaves parameters
    # out that this rank has none for.
    more = {"half of each group frozen": {1}, "two layers a group": {6}}.get(name, {3})
    if name == "one module of a group unused":
        more = {3, 1, 2 + 2 + 6 + 2}
    assert len(found) == len(expected)
    for own, theirs in zip(found, expected, strict=True):
        if theirs[0] == "reduce_scatter_single":
            assert own[1] - theirs[1] in more
            assert own[::2] == theirs[::2]
        else:
            assert own == theirs


# -- which bits are promised -------------------------------------------------------------------


class _Decoder(nn.Module):
    """Takes what an encoder made, as the blocks of T5 do, and uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.key(memory).tanh() * self.value(memory)


class _Transducer(nn.Module):
    """An encoder whose output goes to each block of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Decoder() for _ in range(3))
        self.as_views = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        for block in self.blocks:
            x = block(x, memory.view_as(memory) if self.as_views else memory)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_gradients_of_an_input_of_several_modules_are_added_up_module_by_module(
    rank: int, world_size: int, dtype: torch.dtype
) -> None:
    x = batches(world_size).to(dtype)
    grads = []
    for as_views in (False, True):
        whole = seeded(_Transducer).to(dtype)
        whole.as_views = as_views
        average_backward(whole, x)
        grads.append([param.grad for param in whole.parameters()])
    net = seeded(_Transducer).to(dtype)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    loss_of(net, x[rank]).backward()
    found = [cast(DTensor, param.grad).full_tensor() for param in net.parameters()]
    plain, as_views = grads
    assert all(map(torch.equal, found, as_views)), "each block has one view of its input"
    for mine, other in zip(found, plain, strict=True):
        step = float(other.abs().max()) * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, other, rtol=0, atol=2 * step)
    assert not all(map(torch.equal, found, plain)), "no test of the order"


def _step_clipped(net: nn.Module, rank: int, max_norm: float | None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, batches(2, step)[rank]).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
    return [in_full(param.detach()) for param in net.parameters()]


class _WithoutScalar(Net):
    """Torch does not shard scalars."""

    def __init__(self) -> None:
        super().__init__()
        del self.gain
        self.gain = 1.5


@on_processes(2)
def test_over_two_ranks_the_bits_are_those_of_fsdp2_and_without_clipping_of_ddp(
    rank: int, world_size: int
) -> None:
    for make in (_WithoutScalar, _Transducer):
        for max_norm in (None, 0.05):
            found = {}
            for shard in (shardwise.fully_shard, torch_fsdp.fully_shard):
                net = seeded(make)
                for block in net.blocks:
                    shard(block)
                found[shard] = _step_clipped(shard(net), rank, max_norm)
            net = seeded(make)
            ddp = _step_clipped(nn.parallel.DistributedDataParallel(net), rank, max_norm)
            ours, fsdp2 = found.values()
            assert all(map(torch.equal, ours, fsdp2)), f"{make}, {max_norm}"
            torch.testing.assert_close(ours, ddp, rtol=1e-6, atol=1e-6)
            if make is _WithoutScalar and max_norm is None:
                assert all(map(torch.equal, ours, ddp)), "nothing is added up in another order"
