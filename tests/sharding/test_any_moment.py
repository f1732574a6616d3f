"""Programs that do odd things at odd moments compute what one process does, or raise.

Those that the language of the random programs has words for are in ``test_named_programs.py``.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise import FSDPModule, clip_grad_norm_, fully_shard, register_fsdp_forward_method
from shardwise.base.errors import MisuseError, ShardwiseError
from shardwise.sharding.states import GroupState
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
    sharded_net,
)
from tests.worlds import Ranks, on_processes, on_threads, on_transport

TRANSPORTS = ["shm", "c10d"]
STRATEGIES = [True, False, None]


# -- memory of the user's ----------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "world_size"), [("shm", 2), ("c10d", 2), ("c10d", 1)])
@on_transport()
def test_parameters_that_are_swapped_are_used_and_left_alone_after_they_are_swapped_back(
    rank: int, world_size: int, transport: str
) -> None:
    """What one rank alone has shares the memory of its shard."""
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
    interrupts = (nn.Module.state_dict, FSDPModule.reshard, *resharding)
    uses = (partial(_uses_what_was_taken_out_before, interrupt=each) for each in interrupts)
    run_over(transport, in_turn, 2, *uses, _uses_what_blocks_have_returned, _loads_in_its_forward)


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


@on_threads(2)
def test_users_find_shards_after_an_evaluation(rank: int, world_size: int) -> None:
    """After an evaluation: make an optimizer, freeze, clip and clear; clear before backward."""
    net, whole = sharded_net(), seeded(Net)
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_what_a_hook_of_its_backward_freezes_gets_no_gradient(
    rank: int, world_size: int, transport: str
) -> None:
    net, whole = sharded_net(transport=transport), seeded(Net)
    x = batches(world_size)[rank]
    for model in (net, whole):
        frozen = model.blocks[1].up.weight

        def freeze(_: torch.Tensor, frozen: Any = frozen) -> None:
            frozen.requires_grad_(False)

        def mark(_: nn.Module, __: Any, output: torch.Tensor, freeze: Any = freeze) -> None:
            output.register_hook(freeze)

        model.blocks[1].register_forward_hook(mark)
        loss_of(model, x).backward()
        assert frozen.grad is None


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_parameters_that_are_replaced_in_a_backward_are_refused(
    rank: int, world_size: int, transport: str
) -> None:
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


class DropsGradients(torch.optim.Optimizer):
    """Subtracts gradients, and frees them as the last part of a step."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        torch._foreach_sub_(params, [param.grad for param in params])
        self.zero_grad()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_transport(2)
def test_steps_of_optimizers_are_noticed_however_they_write(
    rank: int, world_size: int, transport: str
) -> None:
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
