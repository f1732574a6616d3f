"""Programs that write, raise and hand things on at odd moments compute what one process does.

Each is written once, for a model that may be sharded or whole, and run both ways on every rank with
that rank's data. One rank is slower than the other, so that a value that is read too early or too
late would show.
"""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise import FSDPModule, clip_grad_norm_, fully_shard, register_fsdp_forward_method
from shardwise.base.errors import MisuseError, ShardwiseError
from shardwise.sharding.states import GroupState
from tests.corpus.gathering import wholes
from tests.corpus.models import Box, Learned
from tests.harness import Processes
from tests.sharding.nets import (
    WIDTH,
    Block,
    Net,
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    check_backward,
    group_of,
    in_turn,
    loss_of,
    run_backward,
    run_over,
    seeded,
    shard_blocks,
    sharded_net,
    step_all,
)
from tests.worlds import Ranks, on_processes, on_threads, on_transport

#: Returns what is to be the same, sharded or whole.
Program = Callable[[nn.Module, torch.Tensor, int], list[torch.Tensor]]

TRANSPORTS = ["shm", "c10d"]
STRATEGIES = [True, False, None]


def _run(
    rank: int,
    world_size: int,
    make: Callable[[], nn.Module],
    program: Program,
    transport: str,
    reshard: bool | None,
) -> None:
    x = batches(world_size)[rank]
    net = sharded_net(make, transport=transport, reshard_after_forward=reshard)
    found = program(net, x.clone(), rank)
    expected = program(seeded(make), x.clone(), 0)
    for i, (whole, theirs) in enumerate(zip(wholes(found), expected, strict=True)):
        torch.testing.assert_close(
            whole, theirs, msg=lambda text, i=i: f"{program.__name__}, value {i}: {text}"
        )


def _slow(rank: int) -> None:
    time.sleep(0.01 * rank)


def _values(net: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in net.parameters()]


# -- writes in the middle of a forward ---------------------------------------------------------


class Contrast(nn.Module):
    """Two encoders, of which the second follows the first by momentum inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)
            key = self.key(x)
        return query * key


def _momentum(net: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    outputs = []
    optimizer = torch.optim.SGD(net.query.parameters(), lr=0.0)
    for _ in range(3):
        _slow(rank)
        output = net(x)
        outputs.append(output.detach())
        output.sum().backward()
        optimizer.step()
    return [*outputs, *_values(net.key)]


def _hook_writes_to_the_next(net: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    following = list(net.blocks[1].parameters())

    def write(*_: object) -> None:
        _slow(rank)
        with torch.no_grad():
            for param in following:
                param.mul_(0.7)

    net.blocks[0].register_forward_hook(write)
    return [net(x).detach() for _ in range(3)]


def _hook_writes_to_its_own(net: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    def write(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.7)

    def dawdle(*_: object) -> None:
        _slow(rank)

    for block in net.blocks:
        block.up.register_forward_hook(dawdle)
        block.register_forward_hook(write)
    with torch.no_grad():
        return [net(x) for _ in range(3)] + _values(net.blocks)


def _module_writes_to_its_own(net: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    def clamp(module: nn.Module, *_: object) -> None:
        _slow(rank)
        with torch.no_grad():
            module.weight.clamp_(-0.2, 0.2)

    for block in net.blocks:
        block.up.register_forward_pre_hook(clamp)
    net.head.register_forward_pre_hook(clamp)
    outputs = [net(x).detach(), net(x).detach()]
    net(x).sum().backward()
    return [*outputs, *_values(net)]


MIDDLE: list[tuple[Callable[[], nn.Module], Program]] = [
    (Contrast, _momentum),
    (Net, _hook_writes_to_the_next),
    (Net, _hook_writes_to_its_own),
    (Net, _module_writes_to_its_own),
]


_OF_SHARDS = (_momentum, _hook_writes_to_its_own)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_what_is_written_in_the_middle_of_a_forward_is_used_from_then_on(
    rank: int, world_size: int, transport: str
) -> None:
    for make, program in MIDDLE:
        for reshard in STRATEGIES:
            if program in _OF_SHARDS and reshard is False:
                continue  # then modules hold full parameters where these programs expect shards
            _run(rank, world_size, make, program, transport, reshard)


def _in_one_call(net: nn.Module, **kwargs: Any) -> nn.Module:
    """The first two of three blocks are one group."""
    fully_shard(list(net.blocks[:2]), **kwargs)
    fully_shard(net.blocks[2], **kwargs)
    return fully_shard(net, **kwargs)


def _ahead(net: nn.Module, **kwargs: Any) -> nn.Module:
    """The second block is gathered when the forward of the first begins."""
    shard_blocks(net, **kwargs)
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
    return net


#: When the second block is gathered, but has yet to run.
MOMENTS: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "before the first": lambda net, hook: net.blocks[0].register_forward_pre_hook(hook),
    "in the first": lambda net, hook: net.blocks[0].up.register_forward_hook(hook),
    "after the first": lambda net, hook: net.blocks[0].register_forward_hook(hook),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda param: param.mul_(2.0),
    "by copying": lambda param: param.copy_(param * 2.0),
    "to rows": lambda param: (param.to_local() if isinstance(param, DTensor) else param).mul_(2.0),
}


def _writes(
    net: nn.Module, block: int, write: Callable[[torch.Tensor], object]
) -> Callable[..., None]:
    """A hook that writes to the parameters that a block has between steps."""
    params = list(net.blocks[block].parameters())

    @torch.no_grad()
    def hook(*_: object) -> None:
        for param in params:
            write(param)

    return hook


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("shard", [_in_one_call, _ahead])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_threads()
def test_a_block_that_is_gathered_and_then_written_to_before_it_runs_is_refused(
    rank: int, world_size: int, shard: Callable[..., nn.Module], moment: str
) -> None:
    """On one rank full parameters are the shards: there it computes with what was written."""
    x = batches(world_size)[rank]
    bf16 = MixedPrecisionPolicy(torch.bfloat16)
    for write in WRITES.values():
        for options in ({}, {"mp_policy": bf16}, {"reshard_after_forward": False}):
            net, whole = shard(seeded(Net), **options), seeded(Net)
            for each in (net, whole):
                MOMENTS[moment](each, _writes(each, 1, write))
            if world_size == 1 and "mp_policy" not in options:
                torch.testing.assert_close(net(x), whole(x))
                continue
            with pytest.raises(MisuseError, match=r"blocks\.1\..* was written to while group"):
                net(x)


@pytest.mark.parametrize("shard", [_in_one_call, _ahead])
@on_threads(2)
def test_a_block_that_is_resharded_after_a_write_to_it_computes_with_what_was_written(
    rank: int, world_size: int, shard: Callable[..., nn.Module]
) -> None:
    net, whole = shard(seeded(Net)), seeded(Net)
    for each in (net, whole):
        MOMENTS["after the first"](each, _writes(each, 1, WRITES["in place"]))
    net.blocks[0].register_forward_hook(lambda *_: net.blocks[1].reshard())
    x = batches(1)[0]  # the same on all ranks, as each forward writes
    for each in (net, whole):
        loss_of(each, x).backward()
    assert_same_gradients(net, whole)


@pytest.mark.parametrize("shard", [_in_one_call, _ahead])
@on_threads(2)
def test_a_block_may_be_written_to_after_it_has_run_while_another_one_of_its_group_has_not(
    rank: int, world_size: int, shard: Callable[..., nn.Module]
) -> None:
    net, whole = shard(seeded(Net)), seeded(Net)
    for each in (net, whole):
        MOMENTS["after the first"](each, _writes(each, 0, WRITES["in place"]))
    x = batches(world_size)[rank]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(net(x), whole(x))


# -- writes between forwards -------------------------------------------------------------------


def _forward_without_a_backward(net: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Gradients are on, but the loss is only looked at."""
    shards = list(net.parameters())
    seen = []
    for _ in range(3):
        _slow(rank)
        seen.append(net(x).detach())
        for param in shards:
            param.data.mul_(0.8)
    net(x).sum().backward()
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_a_forward_uses_what_was_written_since_the_last_one(
    rank: int, world_size: int, transport: str
) -> None:
    for reshard in STRATEGIES:
        _run(rank, world_size, Net, _forward_without_a_backward, transport, reshard)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_a_write_that_one_rank_alone_makes_reaches_all(
    rank: int, world_size: int, transport: str
) -> None:
    """After an evaluation each rank writes other rows, or none."""
    for reshard in STRATEGIES:
        net = sharded_net(transport=transport, reshard_after_forward=reshard)
        whole = seeded(Net)
        shards = [net.head.weight, net.head.bias]
        x = batches(world_size)[rank]
        with torch.no_grad():
            net(x)
        if rank == 0:
            with torch.no_grad():
                for param in shards:
                    param.to_local().mul_(3.0)
        with torch.no_grad():
            for param in (whole.head.weight, whole.head.bias):
                param[:3].mul_(3.0)  # of 5 rows the first rank has 3
            torch.testing.assert_close(net(x), whole(x))


# -- memory of the user's ----------------------------------------------------------------------


def _assigned_there_and_back(rank: int, world_size: int, transport: str) -> None:
    net = sharded_net(transport=transport)
    x = batches(world_size)[rank]
    with torch.no_grad():
        before = net(x)
        net.reshard()
    keep = dict(net.state_dict())
    held = {name: value.to_local().clone() for name, value in keep.items()}
    new = {name: torch.zeros_like(value) for name, value in keep.items()}
    net.load_state_dict(new, assign=True)
    with torch.no_grad():
        assert not net(x).any()
        net.reshard()
        for name, value in keep.items():
            assert torch.equal(value.to_local(), held[name]), f"{name} was written to"
        net.load_state_dict(keep, assign=True)
        assert torch.equal(net(x), before)


def _swapped_there_and_back(rank: int, world_size: int, transport: str) -> None:
    net = sharded_net(transport=transport, reshard_after_forward=True)
    other = sharded_net(transport=transport, reshard_after_forward=True)
    x = batches(world_size)[rank]
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
        before = net(x)

        def swap() -> None:
            for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
                torch.utils.swap_tensors(mine, theirs)

        swap()
        assert not net(x).any()
        assert torch.equal(other(x), before)
        swap()
        assert torch.equal(net(x), before)
        assert not other(x).any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_user_put_aside_is_not_written_to(transport: str) -> None:
    run_over(transport, in_turn, 2, _assigned_there_and_back, _swapped_there_and_back)


class Aside(nn.Module):
    """Keeps what it computes to itself, for others to fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fetched: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fetched = [self.linear(self.linear(x))]
        return x * 1.0


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_a_backward_that_begins_unseen_raises(rank: int, world_size: int, transport: str) -> None:
    net = fully_shard(nn.Sequential(fully_shard(Aside(), transport=transport)), transport=transport)
    net(batches(world_size)[rank].requires_grad_())
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|out of bounds"):
        net[0].fetched[0].sum().backward()


@on_threads(2)
def test_a_view_of_a_parameter_inside_an_object_raises(rank: int, world_size: int) -> None:
    class Boxed(Learned):
        def forward(self, count: int) -> Any:
            return Box(self.table[:count])

    net = fully_shard(nn.Sequential(fully_shard(Boxed())))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(MisuseError, match="Boxed returns a view of its own parameter"):
            net(3)


# -- exceptions --------------------------------------------------------------------------------


class _CaughtError(Exception):
    """Ends a forward that has seen enough."""


def _catches_features(net: nn.Module, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """As tools that quantize layer by layer catch the inputs of a layer."""
    seen: list[torch.Tensor] = []

    def catch(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        _slow(rank)
        seen.append(output.detach().clone())
        raise _CaughtError

    shards = list(net.parameters())
    handle = net.blocks[1].up.register_forward_hook(catch)
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(_CaughtError):
                net(x)
            for param in shards:
                param.mul_(0.5)
        handle.remove()
        return [*seen, net(x)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_weights_may_be_written_to_after_a_forward_that_raised(
    rank: int, world_size: int, transport: str
) -> None:
    for reshard in STRATEGIES:
        _run(rank, world_size, Net, _catches_features, transport, reshard)


def _goes_on_alone(rank: int, world_size: int, transport: str) -> float:
    """One rank raises in the second block, catches it, and begins the next forward."""
    net = sharded_net(lambda: Net(5), transport=transport, reshard_after_forward=True)
    x = batches(world_size)[rank]

    def fail(*_: object) -> None:
        raise _CaughtError

    handle = net.blocks[1].up.register_forward_hook(fail) if rank == 0 else None
    start = time.monotonic()
    if handle is not None:
        with pytest.raises(_CaughtError):
            net(x)
        handle.remove()
    with pytest.raises(ShardwiseError):
        loss_of(net, x).backward()
    return time.monotonic() - start


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_raises_and_goes_on_is_noticed_by_all(ranks: Ranks, transport: str) -> None:
    assert max(ranks(_goes_on_alone, 2, transport, pg_timeout=60)) < 30


# -- hooks on gradients ------------------------------------------------------------------------


class Tied(nn.Module):
    """A weight in two groups, and a block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.block = Block()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.block(self.embed(x))))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_an_optimizer_in_backward_steps_once_with_the_whole_gradient(
    rank: int, world_size: int, transport: str, reshard: bool
) -> None:
    net, whole = seeded(Tied), seeded(Tied)
    for each in (net.embed, net.block, net.out, net):
        fully_shard(each, transport=transport, reshard_after_forward=reshard)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(step)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        x = batches(world_size, number)
        run_backward(net, whole, x, rank)
        theirs.step()
        theirs.zero_grad()
    for (name, mine), expected in zip(net.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected, msg=name)


def _step_then_write(block: nn.Module, before: nn.Module) -> None:
    """Have ``block`` step in backward, and be written to in the backward of what comes before."""
    shards = list(block.parameters())
    optimizer = torch.optim.SGD(shards, lr=0.1)

    def step(param: torch.Tensor) -> None:
        optimizer.step()
        param.grad = None

    for param in shards:
        param.register_post_accumulate_grad_hook(step)

    def write(*_: object) -> None:
        with torch.no_grad():
            for param in shards:
                param.mul_(0.5)

    before.register_full_backward_hook(write)


@pytest.mark.parametrize("other", ["dropped", "left to another backward"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_an_optimizer_in_backward_steps_before_the_backward_of_what_comes_next(
    rank: int, world_size: int, transport: str, other: str
) -> None:
    """Also where the output of another forward was dropped, or has its backward later.

    A hook in the backward of one block writes to the block whose backward is over.
    """
    net, whole = sharded_net(transport=transport), seeded(Net)
    for model in (net, whole):
        _step_then_write(model.blocks[2], model.blocks[0].down)
    x = batches(1)[0]  # the same on every rank
    others = [model(x) for model in (net, whole)]
    if other == "dropped":
        others.clear()
    loss_of(net, x).backward()
    loss_of(whole, x).backward()
    for mine, theirs in zip(net.blocks[2].parameters(), whole.blocks[2].parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@on_threads(2)
def test_an_optimizer_in_backward_steps_when_the_last_of_several_backwards_is_over(
    rank: int, world_size: int
) -> None:
    """A block runs twice; a hook in what comes before it writes to it."""
    net, whole = seeded(Tied), seeded(Tied)
    for each in (net.block, net):
        fully_shard(each)
    for model in (net, whole):
        _step_then_write(model.block, model.embed)
    x = batches(1)[0].requires_grad_()
    loss_of(net, x).backward()
    loss_of(whole, x).backward()
    for mine, theirs in zip(net.block.parameters(), whole.block.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


class Shift(nn.Module):
    """Adds a parameter, whose value backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


def _step_each(model: nn.Module) -> None:
    """Have every parameter step in a hook as soon as its gradient is complete."""

    def step(param: torch.Tensor) -> None:
        with torch.no_grad():
            param.add_(param.grad.to(param.dtype), alpha=-0.1)  # type: ignore[union-attr]
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("kind", [Block, Shift])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_a_backward_notices_a_step_in_the_backward_of_a_later_forward(
    rank: int, world_size: int, transport: str, reshard: bool, kind: type[nn.Module]
) -> None:
    """It raises where it needs the values of before the step, as in one process."""
    x = batches(1)[0].requires_grad_()  # the same on every rank
    net, whole = (nn.Sequential(seeded(kind), seeded(kind)) for _ in range(2))
    for each in (*net, net):
        fully_shard(each, transport=transport, reshard_after_forward=reshard)
    ended = []
    for model in (net, whole):
        _step_each(model)
        losses = [loss_of(model, x) for _ in range(2)]
        losses.pop().backward()
        try:
            losses.pop().backward()
            ended.append("")
        except RuntimeError as error:
            ended.append(str(error).split(":")[0])
        losses.clear()
        loss_of(model, x).backward()  # a step later, all is well
    assert ended[0] == ended[1]
    assert ("modified by an inplace operation" in ended[0]) == (kind is not Shift)
    if kind is Shift:
        assert_same_values(net, whole)


@on_threads(2)
def test_no_step_writes_to_what_is_computed_in_another_dtype(rank: int, world_size: int) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net = sharded_net(mp_policy=precision)
    _step_each(net)
    losses = [loss_of(net, batches(world_size)[rank]) for _ in range(2)]
    for loss in reversed(losses):
        loss.backward()


def _order_of_steps(model: nn.Module, x: torch.Tensor) -> list[str]:
    """In which order hooks run that follow the gradients of block 1, and its end."""
    seen: list[str] = []

    def mark(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: seen.append("block 0 begins"))

    for name, param in model.blocks[1].named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    model.blocks[0].register_forward_hook(mark)
    model(x)  # nobody goes back through this one
    loss_of(model, x).backward()
    return [*sorted(seen[:-1]), seen[-1]]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_a_forward_that_nobody_goes_back_through_delays_no_optimizer_in_backward(
    rank: int, world_size: int, transport: str
) -> None:
    x = batches(world_size)[rank]
    found = _order_of_steps(sharded_net(transport=transport), x)
    assert found == _order_of_steps(seeded(Net), x)
    assert found[-1] == "block 0 begins"


@on_threads(2)
def test_what_is_kept_after_forward_is_kept_in_it(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    net.blocks[0].register_forward_hook(lambda *_: net.reshard())
    x = batches(world_size)[rank]
    torch.testing.assert_close(net(x), whole(x))


class TakesOut(nn.Module):
    """Uses a view of its own parameter, and returns it, after its blocks have run."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.arange(5.0 * WIDTH).view(5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        taken = self.offset[:2]
        for block in self.blocks:
            x = block(x)
        return x * taken.sum(0), taken


def _uses_what_was_taken_out_before(
    rank: int, world_size: int, transport: str, interrupt: Callable[[nn.Module], object]
) -> None:
    x = batches(world_size)
    for reshard in STRATEGIES:
        net = sharded_net(TakesOut, transport=transport, reshard_after_forward=reshard)
        whole, group = seeded(TakesOut), group_of(net)
        for unshards_first in (False, True):
            handle = net.blocks[0].register_forward_hook(
                lambda *_, net=net: interrupt(net) and None
            )
            if unshards_first:
                net.unshard()
            out, taken = net(x[rank])
            handle.remove()
            is_freed = group.fulls is not None and not group.fulls.is_allocated
            assert is_freed or group.state is GroupState.UNSHARDED
            torch.testing.assert_close((out, taken), whole(x[rank]), rtol=0, atol=0)
            out.square().mean().backward()
            for batch in x:
                (whole(batch)[0].square().mean() / world_size).backward()
        assert_same_gradients(net, whole)


def _reshard_twice(net: nn.Module) -> None:
    """Reshard as a state dict of a group with two modules does: the hook of each calls."""
    for _ in range(2):
        net.reshard()  # type: ignore[operator]


def _reshard_and_differentiate(net: nn.Module) -> None:
    """Reshard, and go through a whole backward inside of the forward."""
    net.reshard()  # type: ignore[operator]
    x = torch.ones(1, WIDTH, requires_grad=True)
    torch.autograd.grad(net.blocks[1](x).sum(), x)  # type: ignore[operator, index]


class TakesOutOfBlocks(nn.Module):
    """Uses and returns views of parameters that its blocks have returned to it."""

    class Block(nn.Module):
        """Returns a view of its parameter, where the runtime cannot replace it if asked to."""

        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.arange(64.0 * WIDTH).view(64, WIDTH))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + self.offset[0], self.offset[:1]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, first = self.blocks[0](x)
        x, second = self.blocks[1](x)
        return x + first, first, second


def _uses_what_blocks_have_returned(rank: int, world_size: int, transport: str) -> None:
    x = batches(world_size)
    net = sharded_net(TakesOutOfBlocks, transport=transport, reshard_after_forward=False)
    whole, group = seeded(TakesOutOfBlocks), group_of(net.blocks[0])
    for reads in (nn.Module.state_dict, lambda net: net.load_state_dict(net.state_dict())):
        handle = net.blocks[0].register_forward_hook(lambda *_, reads=reads: reads(net) and None)
        for train in (True, False):
            with torch.set_grad_enabled(train):
                outputs = net(x[rank])
                torch.testing.assert_close(outputs, whole(x[rank]), rtol=0, atol=0)
            assert group.fulls is not None
            assert not group.fulls.is_allocated
            assert group.state is GroupState.SHARDED
            if train:
                sum(each.square().mean() for each in outputs).backward()  # type: ignore[union-attr]
        for batch in x:
            outputs = whole(batch)
            (sum(each.square().mean() for each in outputs) / world_size).backward()
        assert_same_gradients(net, whole)
        handle.remove()


def _loads_in_its_forward(rank: int, world_size: int, transport: str) -> None:
    net = sharded_net(TakesOut, transport=transport)
    net.blocks[0].register_forward_hook(lambda *_: net.load_state_dict(net.state_dict()) and None)
    with pytest.raises(MisuseError, match=r"the root.*would have replaced .* running forward"):
        net(batches(world_size)[rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_program_took_out_of_a_module_stays_until_its_forward_is_over(
    transport: str,
) -> None:
    resharding = (_reshard_twice, _reshard_and_differentiate)
    for interrupt in (nn.Module.state_dict, FSDPModule.reshard, *resharding):
        run_over(transport, _uses_what_was_taken_out_before, 2, interrupt)
    run_over(transport, _uses_what_blocks_have_returned, 2)
    run_over(transport, _loads_in_its_forward, 2)


# -- keeping parameters unsharded --------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_parameters_are_kept_for_many_forwards_where_asked_for(
    rank: int, world_size: int, transport: str
) -> None:
    net, whole = sharded_net(transport=transport), seeded(Net)
    x = batches(world_size)[rank]
    shards = list(net.parameters())
    with torch.no_grad(), net.keep_unsharded():
        for _ in range(3):
            torch.testing.assert_close(net(x), whole(x))
            assert all(group_of(b).state is GroupState.UNSHARDED for b in net.blocks)
    assert all(group_of(module).state is GroupState.SHARDED for module in (net, *net.blocks))
    with torch.no_grad(), net.keep_unsharded():
        net(x)
        for param in shards:
            param.mul_(2.0)
        with pytest.raises(MisuseError, match="was written to while group"):
            net(x)


@on_threads(2)
def test_kept_parameters_are_gathered_once(rank: int, world_size: int) -> None:
    net = sharded_net()
    log = group_of(net).mesh.shard.calls  # of the fake transport
    x = batches(world_size)[rank]
    with torch.no_grad(), net.keep_unsharded():
        for _ in range(3):
            net(x)
    assert [call.partition(" ")[0] for call in log] == ["all_gather"] * 4
    with torch.no_grad():
        net(x)
        net(x)
    assert len(log) == 4 + 2 * 4, "else every forward gathers, also what the last one has left"


# -- memory formats ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_shards_may_be_put_into_another_memory_format(
    rank: int, world_size: int, transport: str
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))

    net, whole = seeded(make), seeded(make)
    for each in (net[0], net[2], net):
        fully_shard(each, transport=transport)
    net.to(memory_format=torch.channels_last)
    whole.to(memory_format=torch.channels_last)
    for _ in range(2):
        x = torch.randn(world_size, 2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
        loss_of(net, x[rank].to(memory_format=torch.channels_last)).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)


# -- one rank does more ------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_processes(2, pg_timeout=10)
def test_one_rank_alone_may_read_its_state_dict(rank: int, world_size: int, transport: str) -> None:
    """After an evaluation the first rank alone reads a state dict, which reshards its modules."""
    net = sharded_net(lambda: Net(5), transport=transport, reshard_after_forward=False)
    whole = seeded(lambda: Net(5))
    for step in range(4):
        x = batches(world_size, step)
        with torch.no_grad():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]))
        if rank == step % 2:
            net.state_dict()
        check_backward(net, whole, x, rank)


# -- full parameters that are exchanged --------------------------------------------------------


class Exchanging(nn.Module):
    """Gives its weight other data in forward, as old tricks with ``.data`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.5
        return x @ self.weight.T @ self.weight


def _exchanges(rank: int, world_size: int, transport: str) -> None:
    for reshard in STRATEGIES:
        net, whole = seeded(Exchanging), seeded(Exchanging)
        net = nn.Sequential(fully_shard(net, reshard_after_forward=reshard, transport=transport))
        fully_shard(net, transport=transport)
        x = batches(world_size)[rank]
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(net(x), whole(x))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_data_that_a_module_gives_its_parameter_stays(transport: str) -> None:
    run_over(transport, _exchanges, 2)
    run_over(transport, _exchanges, 1)


class Replacing(Exchanging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = nn.Parameter(self.weight.detach() * 0.5)
        return x @ self.weight.T


@on_threads(2)
def test_a_parameter_that_a_module_replaces_in_forward_is_not_lost_in_silence(
    rank: int, world_size: int
) -> None:
    net = fully_shard(Replacing(), reshard_after_forward=True)
    with pytest.raises(MisuseError, match=r"weight on rank \d: a module .* replaced or deleted"):
        net(batches(world_size)[rank])
    assert isinstance(net.weight, DTensor)


@on_threads(2)
def test_a_step_without_gradients_writes_to_no_shard(rank: int, world_size: int) -> None:
    """After an exception in backward a program may write to what its modules hold."""
    net, whole = sharded_net(), seeded(Net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    handle = net.blocks[1].register_forward_hook(lambda *args: args[2].register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        loss_of(net, batches(world_size)[rank]).backward()
    handle.remove()
    optimizer.zero_grad()
    optimizer.step()
    written = {name for name, param in net.named_parameters() if type(param) is nn.Parameter}
    assert written, "modules hold full parameters"
    with torch.no_grad():
        for name in written:
            for model in (net, whole):
                model.get_parameter(name).mul_(2.0)
    net.state_dict()  # gives the shards what was written
    assert_same_values(net, whole)


@on_threads(2)
def test_writes_to_a_shard_and_to_its_full_parameter_at_once_raise(
    rank: int, world_size: int
) -> None:
    net = sharded_net(reshard_after_forward=True)
    shard = net.blocks[0].up.weight

    def write(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)
            shard.mul_(0.5)

    net.blocks[0].up.register_forward_hook(write)
    with pytest.raises(MisuseError, match="both its full parameter, which its module holds while"):
        net(batches(world_size)[rank])


@pytest.mark.parametrize(
    "when", ["at once", "before another forward", "in a hook of the next layer"]
)
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("reshard", [True, False])
@on_threads(1)
def test_on_one_rank_backward_notices_what_was_written_since_forward_as_without_sharding(
    rank: int, world_size: int, reshard: bool, name: str, when: str
) -> None:
    """There the full parameter is the shard, and so loses the value that backward needs."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    whole = copy.deepcopy(net)
    for layer in net:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(net, reshard_after_forward=reshard)
    x = torch.ones(2, 4)
    ended = []
    for model in (net, whole):
        held = getattr(model[1], name)  # as an optimizer holds it: the shard

        def write(*_: object, held: nn.Parameter = held) -> None:
            with torch.no_grad():
                held.mul_(2)

        loss = model(x).sum()
        if when == "before another forward":
            write()
            model(x)
        elif when == "in a hook of the next layer":
            loss.register_hook(write)
        else:
            write()
        try:
            loss.backward()
            ended.append("")
        except RuntimeError as error:
            ended.append(str(error).split(":")[0])
    assert ended[0] == ended[1]
    assert bool(ended[0]) == (name == "weight")  # whose value backward needs
    if not ended[0]:
        assert_same_gradients(net, whole)


@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_a_new_memory_format_between_forward_and_backward_is_no_write(
    rank: int, world_size: int
) -> None:
    """Backward needs the values of forward, which an exchange of the shards leaves as they were."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    whole = copy.deepcopy(net)
    fully_shard(net)
    for model in (net, whole):
        model.to(memory_format=torch.channels_last)
        loss = model(x).sum()
        model.to(memory_format=torch.channels_last)
        loss.backward()
    assert_same_gradients(net, whole)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_a_backward_notices_what_was_loaded_while_it_ran(
    rank: int, world_size: int, reshard: bool
) -> None:
    """Also where a forward has left the parameters unsharded, or they are the shards."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    whole = copy.deepcopy(net)
    # One group, whose backward is under way when the hook runs.
    fully_shard(net, reshard_after_forward=reshard)
    for model in (net, whole):
        values = {name: 2 * value for name, value in model.state_dict().items()}

        def load(grad: torch.Tensor, model: Any = model, values: Any = values) -> None:
            model.load_state_dict(values)

        def watch(module: nn.Module, args: Any, load: Any = load) -> None:
            args[0].register_hook(load)

        model[2].register_forward_pre_hook(watch)
        refused = "would have replaced" if model is net else "modified by an inplace operation"
        with pytest.raises((MisuseError, RuntimeError), match=refused):
            model(torch.ones(2, 4)).sum().backward()


# -- too few addresses -------------------------------------------------------------------------


@on_processes(2, processes=Processes.NEW)
def test_under_a_limit_of_addresses_ranks_exchange_messages_and_say_so(
    rank: int, world_size: int
) -> None:
    """One rank is under ``ulimit -v``, so that no rank shares memory."""
    if rank == 1:
        limit = 6 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with pytest.warns(
            UserWarning, match=r"rank 1: ulimit -v limits its address space to 6\.00"
        ):
            net = sharded_net()
    else:
        net = sharded_net()
    assert group_of(net).mesh.shard.name == "gloo"
    whole = seeded(Net)
    x = batches(world_size)
    check_backward(net, whole, x, rank)
    with pytest.raises(
        ValueError, match=r"transport 'shm' is not available here: .*rank 1: ulimit"
    ):
        sharded_net(transport="shm")


# -- what users do between steps ---------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_users_find_shards_after_an_evaluation(rank: int, world_size: int, transport: str) -> None:
    """After an evaluation: make an optimizer, freeze, clip and clear; clear before backward."""
    net, whole = sharded_net(transport=transport), seeded(Net)
    x = batches(world_size)
    for model in (net, whole):
        with torch.no_grad():
            model(x[rank])
        model.head.weight.requires_grad_(False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, whole)]
    for step in range(3):
        x = batches(world_size, step)
        loss = loss_of(net, x[rank])
        net.zero_grad(set_to_none=step != 1)  # the root is unsharded now
        loss.backward()
        whole.zero_grad()
        average_backward(whole, x)
        with torch.no_grad():
            net(x[rank])
        assert_same_gradients(net, whole)
        norms = [clip_grad_norm_(m.parameters(), 0.1) for m in (net, whole)]
        torch.testing.assert_close(norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
    assert_same_values(net, whole)
    net.set_requires_gradient_sync(False)
    loss_of(net, 100 * x[rank]).backward()
    net.zero_grad()
    net.set_requires_gradient_sync(True)
    whole.zero_grad()
    check_backward(net, whole, x, rank)


@on_threads(2)
def test_hooks_on_gradients_change_them(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    for model in (net, whole):
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 0.5)
    x = batches(world_size)
    check_backward(net, whole, x, rank)


@on_threads(2)
def test_parameters_that_are_replaced_between_steps_are_used_or_refused(
    rank: int, world_size: int
) -> None:
    net, whole = sharded_net(), seeded(Net)
    x = batches(world_size)[rank]
    with torch.no_grad():
        net(x)
        for model in (net, whole):
            old = model.blocks[0].up.weight
            model.blocks[0].up.weight = nn.Parameter(old.detach() * 2.0)
        torch.testing.assert_close(net(x), whole(x))
        net.blocks[1].up.bias = None
        with pytest.raises(
            MisuseError, match=r"up.bias on rank \d: the parameter 'bias' of a Linear was"
        ):
            net(x)
    net = sharded_net()
    net(x)
    net.blocks[0].up.weight = nn.Parameter(torch.zeros(7, WIDTH))
    with pytest.raises(ValueError, match="was replaced by a Parameter of shape"):
        net(x)


def _frozen_by_a_hook_of_its_backward(rank: int, world_size: int, transport: str) -> None:
    net, whole = sharded_net(transport=transport), seeded(Net)
    x = batches(world_size)[rank]
    for model in (net, whole):
        frozen = model.blocks[1].up.weight

        def mark(_: nn.Module, __: Any, output: torch.Tensor, frozen: Any = frozen) -> None:
            output.register_hook(lambda _: _freeze(frozen))

        model.blocks[1].register_forward_hook(mark)
        loss_of(model, x).backward()
        assert frozen.grad is None


def _freeze(param: torch.Tensor) -> None:
    param.requires_grad_(False)


def _frozen_after_it_accumulated(rank: int, world_size: int, transport: str) -> None:
    """What was accumulated before stays, and is reduced."""
    net, whole = sharded_net(transport=transport), seeded(Net)
    x = batches(world_size)
    average_backward(whole, x)
    net.set_requires_gradient_sync(False)
    loss_of(net, x[rank]).backward()
    net.set_requires_gradient_sync(True)
    for model in (net, whole):
        model.blocks.requires_grad_(False)
    average_backward(whole, x)
    loss_of(net, x[rank]).backward()
    assert_same_gradients(net, whole)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(transport: str) -> None:
    run_over(
        transport,
        in_turn,
        2,
        _frozen_by_a_hook_of_its_backward,
        _frozen_after_it_accumulated,
    )


def _replaced_before_its_backward(rank: int, world_size: int, transport: str) -> None:
    net = sharded_net(transport=transport)
    loss = loss_of(net, batches(world_size)[rank])
    new = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(new, assign=True)
    with pytest.raises(MisuseError, match=r"replaced .* between a forward and the end of its"):
        loss.backward()


def _replaced_in_its_backward(rank: int, world_size: int, transport: str) -> None:
    net = sharded_net(transport=transport)
    x = batches(world_size)[rank]
    new = {name: value.clone() for name, value in net.state_dict().items()}

    def load(_: torch.Tensor) -> None:
        net.load_state_dict(new, assign=True)

    def mark(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(load)

    handle = net.blocks[0].register_forward_hook(mark)
    loss = loss_of(net, x)
    with pytest.raises(MisuseError, match=r"replaced .* running forward or backward"):
        loss.backward()
    handle.remove()
    net.load_state_dict(new, assign=True)
    loss_of(net, x).backward()
    assert all(param.grad is not None for param in net.parameters())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_that_are_replaced_between_forward_and_backward_are_refused(
    transport: str,
) -> None:
    run_over(transport, in_turn, 2, _replaced_before_its_backward, _replaced_in_its_backward)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@on_threads(2)
def test_what_is_written_to_a_scalar_after_its_gather_is_for_the_next(
    rank: int, world_size: int
) -> None:
    net = fully_shard(nn.Sequential(fully_shard(Gain())))
    gain = net[0].gain

    def double(_: torch.Tensor) -> None:
        with torch.no_grad():
            gain.mul_(2.0)

    x = torch.ones(2, requires_grad=True)
    out = net(x)
    out.register_hook(double)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    assert gain.item() == 6.0


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "cpu"])
@on_threads(2)
def test_ties_stay_if_both_names_are_given_equal_values(
    rank: int, world_size: int, apart: bool, on_meta: bool
) -> None:
    """A state dict has a value for each name of a tie, as after ``distribute_tensor``."""
    whole = seeded(Tied)
    with torch.device("meta" if on_meta else "cpu"):
        net = seeded(Tied)
    for each in (net.embed, net.out, net) if apart else (net,):
        fully_shard(each)
    x = batches(world_size)
    shards = {
        name: distribute_tensor(value, net.embed.weight.device_mesh, [Shard(0)])
        for name, value in seeded(Tied).state_dict().items()
    }
    state = {name: value.clone() for name, value in shards.items()}
    net.load_state_dict(state, assign=True)
    for name in reversed(state):  # one module after the other, the last one first
        module = net.get_submodule(name.rpartition(".")[0])
        module.load_state_dict({name.rpartition(".")[2]: state[name].clone()}, False, True)
    assert net.out.weight is net.embed.weight
    check_backward(net, whole, x, rank)
    net.load_state_dict({**state, "out.weight": state["out.weight"] * 2.0}, assign=True)
    with pytest.raises(ValueError, match="was tied to it, but is another parameter now"):
        net(x[rank])
    net.out.weight = net.embed.weight
    with torch.no_grad():
        net(x[rank])
    net.out.weight = nn.Parameter(net.embed.weight.detach().clone())  # meant, if no state dict
    with pytest.raises(ValueError, match="was tied to it, but is another parameter now"):
        net(x[rank])


@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_parameters_that_are_swapped_are_used(rank: int, world_size: int) -> None:
    """What one rank alone has shares the memory of its shard."""
    net, whole, other = sharded_net(), seeded(Net), sharded_net()
    x = batches(world_size)[rank]
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2.0)
        for param in whole.parameters():
            param.mul_(2.0)
        net(x)
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            torch.utils.swap_tensors(mine, theirs)
        torch.testing.assert_close(net(x), whole(x))


def _accumulates_and_keeps(rank: int, world_size: int, transport: str) -> None:
    net, whole = sharded_net(transport=transport, reshard_after_forward=False), seeded(Net)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in (net, whole)]
    net.set_reshard_after_backward(False)
    for step in range(3):
        for last in (False, True):
            net.set_requires_gradient_sync(last)
            x = batches(world_size, 2 * step + last)
            run_backward(net, whole, x, rank)
        for module in (net, *net.blocks):
            module.reshard()
        assert_same_gradients(net, whole)
        step_all(optimizers)
    assert_same_values(net, whole)


class DropsGradients(torch.optim.Optimizer):
    """Subtracts gradients, and frees them as the last part of a step."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        torch._foreach_sub_(params, [param.grad for param in params])
        self.zero_grad()


def _steps_while_kept(rank: int, world_size: int, transport: str) -> None:
    for kind in (torch.optim.SGD, DropsGradients):
        net = sharded_net(transport=transport)
        optimizer = kind(net.parameters(), lr=0.1, foreach=True)
        x = batches(world_size)
        loss_of(net, x[rank]).backward()
        with torch.no_grad(), net.keep_unsharded():
            net(x[rank])
            optimizer.step()
            with pytest.raises(MisuseError, match="was written to while group"):
                net(x[rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_of_optimizers_are_noticed_however_they_write(transport: str) -> None:
    run_over(transport, in_turn, 2, _accumulates_and_keeps, _steps_while_kept)


def _scale(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(2.0)


def _swap(param: nn.Parameter) -> None:
    torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 2.0))


@pytest.mark.parametrize("change", [_scale, _swap])
@on_threads(2)
def test_a_write_between_unshard_and_forward_is_noticed(
    rank: int, world_size: int, change: Callable[[nn.Parameter], None]
) -> None:
    net, whole = sharded_net(), seeded(Net)
    x = batches(world_size)[rank]
    handle = net.blocks[0].unshard(async_op=True)
    torch.testing.assert_close(net(x), whole(x))
    handle.wait()
    shards = list(net.blocks[0].parameters())
    net.blocks[0].unshard()
    for param in shards:
        change(param)
    with pytest.raises(MisuseError, match="was written to while group"):
        net(x)


@pytest.mark.parametrize("when", ["in its forward", "after its forward", "in backward"])
@on_threads(2)
def test_shards_have_what_was_written_to_full_parameters_that_stay_unsharded(
    rank: int, world_size: int, when: str
) -> None:
    net = sharded_net(reshard_after_forward=False)
    net.set_reshard_after_backward(False)
    block, expected = net.blocks[0], seeded(Net).blocks[0]
    shards = list(block.parameters())

    def write(*_: object) -> None:
        with torch.no_grad():
            for param in (*block.parameters(), *expected.parameters()):
                param.mul_(2.0)

    def check(*_: object) -> None:
        for param, values in zip(shards, expected.parameters(), strict=True):
            assert isinstance(param, DTensor)
            torch.testing.assert_close(param.full_tensor(), values.detach())

    x = batches(world_size)[rank].requires_grad_()
    if when == "in its forward":
        block.register_forward_pre_hook(write)
        net.blocks[1].register_forward_pre_hook(check)
    elif when == "after its forward":
        block.register_forward_hook(write)
    loss = loss_of(net, x)
    if when == "in backward":
        x.register_hook(write)
        loss.backward()
    assert not isinstance(next(block.parameters()), DTensor), "they stay"
    check()


def _writes_in_a_forward_that_keeps(rank: int, world_size: int, transport: str) -> None:
    """While gradients accumulate, a hook writes to the root after the root was gathered."""
    net = sharded_net(transport=transport)
    net.set_reshard_after_backward(False)
    net.set_requires_gradient_sync(False)
    shards = list(net.head.parameters())

    def write(*_: object) -> None:
        with torch.no_grad():
            for param in shards:
                param.mul_(2.0)

    handle = net.blocks[1].register_forward_hook(write)
    x = batches(world_size)[rank]
    net(x)
    handle.remove()
    with pytest.raises(MisuseError, match="was written to while group"):
        net(x)


def _writes_before_the_last_microbatch(rank: int, world_size: int, transport: str) -> None:
    """The switches of the last microbatch do not make what the one before it kept current."""
    net = sharded_net(transport=transport)
    net.set_reshard_after_backward(False)
    net.set_requires_gradient_sync(False)
    x = batches(world_size)[rank]
    shards = list(net.parameters())
    loss_of(net, x).backward()
    with torch.no_grad():
        for param in shards:
            param.mul_(2.0)
    net.set_reshard_after_backward(True)
    net.set_requires_gradient_sync(True)
    with pytest.raises(MisuseError, match="was written to while group"):
        net(x)
    net.reset_iter_state()
    net.zero_grad()
    loss_of(net, x).backward()
    whole = seeded(Net)
    with torch.no_grad():
        for param in whole.parameters():
            param.mul_(2.0)
    average_backward(whole, batches(world_size))
    assert_same_gradients(net, whole)


def _writes_before_the_last_backward(rank: int, world_size: int, transport: str) -> None:
    """What is reduced is complete, so shards may be written to, whatever backward is the last."""
    net, whole = sharded_net(transport=transport), seeded(Net)
    net.set_reshard_after_backward(False)
    net.set_is_last_backward(False)
    shards = list(net.parameters())
    x = batches(world_size)
    for _ in range(2):
        run_backward(net, whole, x, rank)
        with torch.no_grad():
            for param in (*shards, *whole.parameters()):
                param.mul_(2.0)
    net.set_is_last_backward(True)
    run_backward(net, whole, x, rank)
    for module in (net, *net.blocks):
        module.reshard()
    assert_same_gradients(net, whole)


def _evaluates_what_is_kept(rank: int, world_size: int, transport: str) -> None:
    """After an evaluation there are shards, unless the switches say that more is to come."""
    net = sharded_net(transport=transport)
    x = batches(world_size)[rank]
    net.set_requires_gradient_sync(False)
    for freed in (False, True):
        net.set_reshard_after_backward(False)
        loss_of(net, x).backward()
        net.set_reshard_after_backward(freed)
        with torch.no_grad():
            net(x)
        assert [group_of(each).state for each in (net, *net.blocks)] == [
            GroupState.SHARDED if freed or each is not net else GroupState.UNSHARDED
            for each in (net, *net.blocks)
        ]


def _writes_before_the_first_forward(rank: int, world_size: int, transport: str) -> None:
    net = sharded_net(transport=transport)
    shards = list(net.parameters())
    with torch.no_grad(), net.keep_unsharded():
        for param in shards:
            param.mul_(2.0)
        with pytest.raises(MisuseError, match="was written to while group"):
            net(batches(world_size)[rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_write_after_the_gather_of_what_is_kept_is_noticed(transport: str) -> None:
    run_over(
        transport,
        in_turn,
        2,
        _writes_in_a_forward_that_keeps,
        _writes_before_the_first_forward,
        _writes_before_the_last_microbatch,
        _writes_before_the_last_backward,
        _evaluates_what_is_kept,
    )


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x)) * 2.0


@on_threads(2)
def test_methods_that_run_as_forward_may_call_it_while_an_exception_is_handled(
    rank: int, world_size: int
) -> None:
    net, whole = seeded(Recursive), seeded(Recursive)
    fully_shard(net)
    register_fsdp_forward_method(net, "generate")
    x = batches(world_size)[rank]
    try:
        raise ValueError("handled below")
    except ValueError:
        with torch.no_grad():
            torch.testing.assert_close(net.generate(x), whole.generate(x))


@on_threads(2)
def test_a_module_that_is_resharded_in_its_own_forward_is_named(rank: int, world_size: int) -> None:
    net = sharded_net()
    net.blocks[1].register_forward_pre_hook(lambda *_: net.state_dict() and None)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        net(batches(world_size)[rank])
    (note,) = caught.value.__notes__
    assert note.startswith(f"blocks.1 on rank {rank}: its parameters were resharded while")


class FusedLoss(nn.Module):
    """Reads the weight of its head, as kernels that fuse the head with the loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(x), self.head.weight)


@on_threads(2)
def test_modules_whose_shards_another_one_reads_are_named(rank: int, world_size: int) -> None:
    net, whole = seeded(FusedLoss), seeded(FusedLoss)
    for module in (net.body, net.head, net):
        fully_shard(module)
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        net(x)
    (note,) = caught.value.__notes__
    assert note.startswith(f"the root on rank {rank}: parameters of body, head are sharded apart")
    assert "fully_shard([module, ...])" in note

    together = seeded(FusedLoss)
    fully_shard(together.body)
    fully_shard(together)  # takes the head, too
    torch.testing.assert_close(together(x), whole(x))
