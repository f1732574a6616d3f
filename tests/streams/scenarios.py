"""What is run on the modeled device: ordinary trainings, on the unmodified runtime.

A scenario is a function of a :class:`Run`. :data:`SCENARIOS` lists them by name.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import checkpoint_module, fully_shard, offload_activations
from shardwise._torch import dtensor
from shardwise.base import activations, devices
from shardwise.base.scratch import file as scratch_file
from shardwise.checkpoint.ranks import agreement, saving, state
from shardwise.diloco import DiLoCo, Streaming, members
from shardwise.diloco.settings import WireFormat
from shardwise.optim import Muon, deal, in_backward, muon_groups, offload, shared_work
from shardwise.optim.offloaded import optimizer
from shardwise.transport import select
from shardwise.transport.carrier import Announced, Carrier, carried_by
from shardwise.transport.collectives import NcclTransport
from shardwise.transport.peers import Peers
from tests.corpus.collectives import customize
from tests.streams import mutation
from tests.streams.device import NAME, Device, OnRace, Pageable, Stream, modeled
from tests.streams.mutation import Place
from tests.streams.process_group import world

WIDTH = 64


@dataclass
class Run:
    """One run of a scenario.

    Attributes:
        device: the model.
        mesh: over the ranks of the world.
        after_step: called after every training step, with its number.
    """

    device: Device
    mesh: DeviceMesh
    after_step: Sequence[Callable[[int], None]] = ()


@dataclass(frozen=True)
class Scenario:
    """A scenario by name.

    Attributes:
        run: runs it.
        shape: of the mesh: ``(shard,)`` or ``(replicate, shard)``.
        rank: the rank to be.
        per_host: how many ranks share a host; 0: all.
        pageable: how copies to pageable memory behave.
    """

    run: Callable[[Run], None]
    shape: tuple[int, ...] = (2,)
    rank: int = 0
    per_host: int = 0
    pageable: Pageable = Pageable.BLOCKS


SCENARIOS: dict[str, Scenario] = {}


def scenario(**options: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """List a function as a scenario, under its name."""

    def listed(function: Callable[[Run], None]) -> Callable[[Run], None]:
        SCENARIOS[function.__name__] = Scenario(function, **options)
        return function

    return listed


def play(
    name: str,
    after_step: Sequence[Callable[[Device, int], None]] = (),
    taken_out: Place | None = None,
    on_race: OnRace = OnRace.NOTE,
) -> Device:
    """Run a scenario, maybe without a part of the runtime, or until the first race.

    Garbage is collected where the scenario says so, and nowhere else: when a model is freed must
    not depend on what ran before.

    Returns:
        The device, with what it has noted.
    """
    found = SCENARIOS[name]
    with ExitStack() as stack:
        stack.enter_context(_collecting_no_garbage())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Which transport a device gets is decided by its name. This one is to get NCCL's.
        stack.enter_context(
            mock.patch.object(select, "c10d_transport", lambda group, device: NcclTransport(group))
        )
        stack.enter_context(carried_by(_Hosts(found.per_host)))
        mesh = stack.enter_context(world(found.shape, found.rank))
        device = stack.enter_context(modeled(Device(found.pageable, on_race)))
        if taken_out is not None:
            stack.enter_context(mutation.without(taken_out))
        hooks = [functools.partial(hook, device) for hook in after_step]
        try:
            found.run(Run(device, mesh, hooks))
        except Exception:
            if not device.races:
                raise
            # It may have become another error on its way here.
    return device


class _Hosts(Carrier):
    """What carries as always, between ranks that know where the others are."""

    def __init__(self, per_host: int) -> None:
        self._per_host = per_host

    def announce(self, peers: Peers, wire: str) -> None:
        """Do nothing."""

    def announced(self, peers: Peers) -> list[Announced]:
        """Put as many ranks in a row on each host; 0: all on one."""
        return [
            Announced(str(self._per_host and rank // self._per_host), "") for rank in peers.members
        ]


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    gc.disable()
    gc.freeze()  # what exists is not looked at again, so collecting takes no time
    try:
        yield
    finally:
        _collect_garbage()
        gc.enable()


def free_models() -> None:
    """Free models that nobody holds. They are in cycles with their state and their hooks."""
    # Autograd's thread may still hold the last node that it ran. It lets go of it for another.
    torch.ones(1, device=NAME, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    _collect_garbage()


def _collect_garbage() -> None:
    while gc.collect():  # what is freed may free more
        pass


# -- models -------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH, inner: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner or width)
        self.down = nn.Linear(inner or width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        out: torch.Tensor = x + self.down(self.up(normed).relu())
        return out


class Net(nn.Module):
    """A stack of blocks, and a head.

    Args:
        depth: the number of blocks.
        inner: the inner width of the blocks.
        call: calls a block.
    """

    def __init__(
        self,
        depth: int = 2,
        inner: int | None = None,
        call: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner=inner) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        out: torch.Tensor = self.head(x)
        return out


def make(run: Run, **options: Any) -> Any:
    """Make a net on the device."""
    with torch.device(NAME):
        return Net(**options)


def shard(run: Run, net: Any = None, **options: Any) -> Any:
    """Shard a net by blocks."""
    net = make(run) if net is None else net
    for block in net.blocks:
        fully_shard(block, mesh=run.mesh, **options)
    fully_shard(net, mesh=run.mesh, **options)
    return net


def units(net: Any) -> list[Any]:
    """The modules that were sharded."""
    return [*net.blocks, net]


def batch() -> torch.Tensor:
    """A batch on the device."""
    return torch.randn(8, WIDTH, device=NAME)


def loss_of(net: nn.Module) -> torch.Tensor:
    """The loss of a forward."""
    out: torch.Tensor = net(batch())
    return out.float().square().mean()


def run_backward(net: nn.Module) -> None:
    """Run a forward and a backward."""
    loss_of(net).backward()  # type: ignore[no-untyped-call]


def backward_with_gradients(net: nn.Module) -> None:
    """Run a forward and a backward, and check that every parameter has a gradient."""
    run_backward(net)
    assert all(parameter.grad is not None for parameter in net.parameters())


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=0.1)


def steps_of(run: Run, count: int = 3) -> Iterator[int]:
    """Count training steps, each of which ends with the hooks of the run."""
    for step in range(count):
        yield step
        for hook in run.after_step:
            hook(step)


def train(
    run: Run,
    net: Any,
    *,
    steps: int = 3,
    optimizer: Callable[..., Any] | None = None,
    backward: Callable[[Any], None] | None = None,
) -> Any:
    """Train for some steps."""
    opt = (optimizer or sgd)(net.parameters())
    for _ in steps_of(run, steps):
        (backward or run_backward)(net)
        opt.step()
        opt.zero_grad()
    return opt


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)
PINNED = CPUOffloadPolicy(pin_memory=True)
UNPINNED = CPUOffloadPolicy(pin_memory=False)

# -- strategies ---------------------------------------------------------------------------------


def _with_norms_in_bfloat16(run: Run) -> Any:
    """Some parameters have another dtype, so everything is gathered as bytes."""
    net = make(run)
    for block in net.blocks:
        block.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device=NAME)
    return net


# -- where shards are ---------------------------------------------------------------------------


@scenario()
def offload_and_read(run: Run) -> None:
    """Shards on the host are read before any training."""
    net = shard(run, offload_policy=UNPINNED)
    for parameter in net.parameters():
        parameter.to_local().sum()
    train(run, net)


def _twice(net: Any) -> None:
    """Run two backwards, each of which is reduced and added to the gradient."""
    for _ in range(2):
        run_backward(net)


def _tied(run: Run, depth: int = 2) -> Any:
    """Two groups add to one gradient."""
    net = make(run, depth=depth)
    net.blocks[depth - 1].up.weight = net.blocks[0].up.weight
    return net


@scenario()
def offload_tied_two_streams(run: Run) -> None:
    """Two groups whose forwards run on two streams add to one gradient on the host."""
    side = Stream(name="second block")

    def call(block: Any, x: torch.Tensor) -> torch.Tensor:
        if block is not net.blocks[1]:
            out: torch.Tensor = block(x)
            return out
        before = run.device.current
        side.wait_stream(before)
        with side:
            out = block(x)
        before.wait_stream(side)
        return out

    net = make(run, call=call)
    net.blocks[1].up.weight = net.blocks[0].up.weight
    train(run, shard(run, net, offload_policy=PINNED))


def _optimizer_in_backward(run: Run, net: Any) -> None:
    for parameter in net.parameters():
        opt = sgd([parameter])

        def step(_: torch.Tensor, opt: torch.optim.Optimizer = opt) -> None:
            opt.step()
            opt.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in steps_of(run):
        run_backward(net)


def _step_in_backward(run: Run, net: Any) -> None:
    optimizer = in_backward(net, adamw, max_norm=math.inf)
    for _ in steps_of(run):
        run_backward(net)
        assert optimizer.grad_norm is not None


# -- optimizers that know about shards ----------------------------------------------------------


@contextmanager
def _small_rounds() -> Iterator[None]:
    """Let Muon work on one matrix in a round, so that rounds follow each other in one step."""

    def rounds(dealt: deal.Dealt, nbytes: Callable[[deal.Unit], int], _: int) -> list[deal.Dealt]:
        return deal.rounds(dealt, nbytes, limit=1)

    with mock.patch.object(shared_work, "rounds", rounds):
        yield


def _muon(run: Run, net: Any) -> None:
    with _small_rounds():
        train(run, net, optimizer=lambda _: Muon(muon_groups(net), lr=0.1))


@scenario()
def muon_on_second_stream(run: Run) -> None:
    """The step runs on a stream of its own, and its memory is used by others afterwards."""
    net = shard(run)
    side = Stream(name="the step")

    class Aside(Muon):
        def step(self, closure: Any = None) -> Any:
            before = run.device.current
            side.wait_stream(before)
            with side:
                super().step(closure)
            before.wait_stream(side)

    with _small_rounds():
        train(run, net, optimizer=lambda _: Aside(muon_groups(net), lr=0.1))


@scenario()
def muon_in_backward(run: Run) -> None:
    """Every group steps with Muon while the reduction of the next one is under way."""
    net = shard(run)
    with _small_rounds():
        optimizer = in_backward(net, lambda _: Muon(muon_groups(net), lr=0.1))
        for _ in steps_of(run):
            run_backward(net)
            optimizer.step()


# -- states on the host ---------------------------------------------------------------------------


def _states_on_host(params: Any) -> Any:
    """AdamW, of which the states of two blocks fit into staging memory."""
    return offload(adamw(params), "host", staging=5 * 2 * WIDTH * WIDTH * 4)


@scenario()
def offload_states(run: Run) -> None:
    net = shard(run)
    with (
        mock.patch.object(scratch_file, "SMALLEST", 1024),
        mock.patch.object(optimizer, "_TOGETHER", 1),
    ):
        opt = _states_on_host(net.parameters())
        for _ in steps_of(run):
            run_backward(net)
            opt.step()
            opt.zero_grad()
            for state in opt.state_dict()["state"].values():
                state["exp_avg"].to_local().clone()


@scenario()
def offload_states_in_backward(run: Run) -> None:
    net = shard(run)
    with mock.patch.object(scratch_file, "SMALLEST", 1024):
        in_backward(net, _states_on_host)
        for _ in steps_of(run):
            run_backward(net)


# -- when things happen -------------------------------------------------------------------------


def _prefetching(net: Any) -> Any:
    for before, after in itertools.pairwise(net.blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return net


@scenario()
def unshard_ahead(run: Run) -> None:
    net = shard(run)

    def backward(net: Any) -> None:
        handles = [unit.unshard(async_op=True) for unit in units(net)]
        for handle in handles[:2]:
            handle.wait()
        run_backward(net)

    train(run, net, backward=backward)


@scenario()
def unshard_and_read(run: Run) -> None:
    """Full parameters are read outside of forward."""
    net = shard(run, make(run, inner=1024))
    train(run, net, steps=1)
    for block in net.blocks:
        block.unshard()
        for parameter in block.parameters():
            assert not isinstance(parameter, DTensor)
            parameter.detach().sum()
        block.reshard()
    train(run, net, steps=2)


@scenario()
def unshard_and_reshard(run: Run) -> None:
    """A gather that nobody needs any more is freed."""
    net = shard(run, make(run, inner=1024))
    for block in net.blocks:
        for _ in range(2):
            block.unshard(async_op=True)
            block.reshard()
    train(run, net, steps=2)


@scenario()
def accumulate(run: Run) -> None:
    def backward(net: Any) -> None:
        net.set_requires_gradient_sync(False)
        run_backward(net)
        net.set_requires_gradient_sync(True)
        run_backward(net)

    train(run, shard(run), backward=backward)
    train(run, shard(run, mp_policy=BF16), backward=backward, steps=2)


def _zero1(net: Any) -> None:
    """Full parameters and gradients stay until the last microbatch."""
    for last in (False, True):
        net.set_requires_gradient_sync(last)
        net.set_is_last_backward(last)
        net.set_reshard_after_backward(last)
        run_backward(net)


def _first_over_shards(net: Any) -> None:
    """The first microbatch is reduced over the shard dimension only."""
    for reduces in (False, True):
        net.set_requires_all_reduce(reduces)
        run_backward(net)


@scenario()
def post_optimizer_event(run: Run) -> None:
    net = shard(run)
    side = Stream(name="optimizer")
    opt = sgd(net.parameters())
    for _ in steps_of(run):
        run_backward(net)
        side.wait_stream(run.device.current)
        with side:
            opt.step()
            opt.zero_grad(set_to_none=False)
        net.set_post_optim_event(side.record_event())


def _with_three_buffers(net: Any) -> Any:
    net.set_reduce_scatter_max_input_buffers(3)
    return net


@scenario()
def unused_params(run: Run) -> None:
    """A block runs in the first step only. Then zeros are reduced for it."""
    net = shard(run)
    for unit in units(net):
        unit.set_reduce_scatter_unused_params(True)
    train(run, net, steps=1)
    net.call = lambda block, x: x if block is net.blocks[1] else block(x)
    train(run, net)


def _forward_on_side_stream(run: Run, net: Any) -> None:
    """Autograd runs backward on the stream of forward, whichever stream calls it."""
    side = Stream(name="forward")

    def backward(net: Any) -> None:
        side.wait_stream(run.device.current)
        with side:
            loss = loss_of(net)
        run.device.current.wait_stream(side)
        loss.backward()  # type: ignore[no-untyped-call]

    train(run, net, backward=backward)


@scenario()
def step_on_side_stream(run: Run) -> None:
    """All of training on a stream that is not the default one."""
    side = Stream(name="training")
    side.wait_stream(run.device.current)
    with side:
        train(run, shard(run))


@scenario()
def evaluate_between(run: Run) -> None:
    net = shard(run)

    def backward(net: Any) -> None:
        run_backward(net)
        with torch.no_grad():
            net(batch())

    train(run, net, backward=backward)
    net.eval()
    with torch.inference_mode():
        net(batch())
    train(run, net, steps=2)


@scenario()
def summon(run: Run) -> None:
    net = shard(run)
    opt = train(run, net, steps=1)
    for unit in units(net):
        for parameter in unit.parameters():
            parameter.full_tensor()
    net.state_dict()
    opt.state_dict()
    train(run, net, steps=2)


@scenario(shape=(1,))
def one_rank_summon(run: Run) -> None:
    summon(run)
    with torch.device(NAME):
        model = shardwise.FullyShardedDataParallel(Net(), device_mesh=run.mesh)
    for _ in range(2):
        with shardwise.FullyShardedDataParallel.summon_full_params(model):
            for parameter in model.parameters():
                parameter.detach().sum()


def _clipped(net: Any) -> None:
    run_backward(net)
    shardwise.clip_grad_norm_(net.parameters(), 1.0).add(1)


@scenario()
def clip_bfloat16(run: Run) -> None:
    """The norm is computed in float32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        train(run, shard(run), backward=_clipped)
    finally:
        torch.set_default_dtype(torch.float32)


@scenario()
def clip_offload(run: Run) -> None:
    """Some gradients are on the host, and some on the device."""

    def backward(net: Any) -> None:
        run_backward(net)
        for parameters in (net.parameters(), reversed(list(net.parameters()))):
            shardwise.clip_grad_norm_(parameters, 1.0)

    net = make(run)
    shard(run, net, offload_policy=PINNED, ignored_params={net.head.bias})
    train(run, net, backward=backward)


@scenario()
def all_reduce_hook(run: Run) -> None:
    net = shard(run)
    for unit in units(net):
        unit.set_all_reduce_hook(lambda grads: grads.mul_(2))
    train(run, net)


@scenario()
def all_reduce_hook_on_side_stream(run: Run) -> None:
    net = shard(run)
    side = Stream(name="hook")

    def hook(grads: torch.Tensor) -> None:
        before = run.device.current
        side.wait_stream(before)
        with side:
            grads.mul_(2)
        before.wait_stream(side)

    for unit in units(net):
        unit.set_all_reduce_hook(hook)
    train(run, net)


@scenario()
def all_reduce_hook_with_stream(run: Run) -> None:
    """The runtime runs the hook on the stream that came with it."""
    net, side = shard(run, mp_policy=BF16), Stream(name="hook")

    def hook(grads: torch.Tensor) -> None:
        assert run.device.current is side
        grads.mul_(2)

    for unit in units(net):
        unit.set_all_reduce_hook(hook, stream=side)
    train(run, net)


# -- custom collectives -------------------------------------------------------------------------


def _customize(net: Any, *, asynchronous: bool = False) -> Any:
    customize(net, returns_work=asynchronous)
    return net


# -- backwards that the program completes, and memory that is kept ---------------------------------


def _finalized(run: Run, net: Any, *, async_op: bool) -> None:
    net.set_manual_backward_finalization(True)

    def backward(net: Any) -> None:
        for sync in (False, True):
            net.set_requires_gradient_sync(sync)
            run_backward(net)
        handle = net.finalize_backward(async_op=async_op)
        if handle is not None:
            handle.wait()

    train(run, net, backward=backward)


def _keeping_storage(net: Any) -> Any:
    """The next gather writes where the last backward read."""
    net.set_keep_unsharded_storage(True)
    return net


# -- groups and memory of collectives -----------------------------------------------------------


def _separate(net: Any) -> Any:
    net.set_separate_reduce_scatter_group()
    return net


# -- wires --------------------------------------------------------------------------------------


class _Wide(nn.Module):
    """A parameter that no wire encodes, beside one that is encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.usual = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.usual + (x.double() * self.wide).to(x.dtype)


# -- kinds of parameters ------------------------------------------------------------------------


def _of(*kinds: Callable[[], nn.Module]) -> Callable[[Run], Any]:
    """Make nets of these kinds of blocks."""

    def of_kinds(run: Run) -> Any:
        net = make(run)
        with torch.device(NAME):
            net.blocks = nn.ModuleList(kind() for kind in kinds)
        return net

    return of_kinds


class _Scaled(nn.Module):
    """A block and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Block()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inside(x) * self.scale
        return out


@scenario()
def scalars(run: Run) -> None:
    """Scalars are held by every rank, and all-reduced."""
    for options in ({}, {"mp_policy": BF16}):
        train(run, shard(run, _of(_Scaled, _Scaled, _Scaled)(run), **options))


@scenario()
def scalar_in_root(run: Run) -> None:
    """The last reduction of a backward includes an all-reduce."""
    with torch.device(NAME):
        net = _Scaled()
    fully_shard(net.inside, mesh=run.mesh)
    fully_shard(net, mesh=run.mesh)
    train(run, net)


def _with_integers(run: Run) -> Any:
    """Make a net with floating-point parameters, which are converted, and others."""
    net = make(run)
    for block in net.blocks:
        numbers = torch.ones(8, dtype=torch.int32, device=NAME)
        block.numbers = nn.Parameter(numbers, requires_grad=False)
    return net


class _ReturnsWeight(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.view(1, WIDTH)


def _returning_parameters(run: Run) -> Any:
    net = _of(*[_ReturnsWeight] * 3)(run)
    net.call = lambda block, x: x + block(x)
    return net


class Sent(torch.Tensor):
    """A float32 tensor that is gathered as bfloat16."""

    _kept: ClassVar = frozenset(
        getattr(torch.ops.aten, name)
        for name in (
            *("detach", "alias", "slice", "view", "as_strided", "split"),
            *("clone", "copy_", "_to_copy"),
        )
    )

    @staticmethod
    def __new__(cls: type[Sent], inner: torch.Tensor) -> Sent:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        assert isinstance(made, Sent)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def unwrap(tree: Any) -> Any:
            return torch.utils._pytree.tree_map_only(Sent, lambda each: each.held, tree)

        out = func(*unwrap(args), **unwrap(kwargs or {}))
        if func._schema.name.endswith("_"):
            return args[0]
        if func.overloadpacket not in cls._kept:
            return out
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, out)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        return (self.held.bfloat16(),), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (data,) = gathered
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):  # type: ignore[attr-defined]
                out.copy_(data.to(dtype))
            return None
        full = data.to(dtype)
        return full, (full,)


def _of_a_subclass(run: Run) -> Any:
    net = make(run)
    for block in net.blocks:
        block.up.weight = nn.Parameter(Sent(block.up.weight.detach()))
    return net


# -- tensors from and to the outside -----------------------------------------------------------


@scenario()
def inputs_on_host(run: Run) -> None:
    """The root copies its inputs to the device, and the program reuses their memory."""
    host = torch.ones(8, WIDTH).pin_memory()

    def backward(net: Any) -> None:
        net(host).square().mean().backward()
        host.fill_(1)

    train(run, shard(run), backward=backward)


@scenario()
def asynchronous_inputs(run: Run) -> None:
    """Inputs are results of collectives that nobody has waited for."""
    net = shard(run)
    group = run.mesh.get_group()

    def backward(net: Any) -> None:
        x = funcol.all_reduce(batch(), "sum", group)
        net(x).square().mean().backward()
        middle = funcol.all_reduce(batch(), "sum", group)
        net.blocks[0](funcol.all_reduce(batch().requires_grad_() + middle, "sum", group))

    train(run, net, backward=backward)
    net.call = lambda block, x: block(funcol.all_reduce(x, "sum", group))
    with torch.no_grad():
        net(batch())


@scenario()
def gradient_hooks(run: Run) -> None:
    """A hook on a sharded gradient returns the result of a collective."""
    net = shard(run)
    group = run.mesh.get_group()

    def hook(grad: torch.Tensor) -> torch.Tensor:
        assert isinstance(grad, DTensor)
        reduced = funcol.all_reduce(grad.to_local(), "sum", group)
        return DTensor.from_local(reduced, grad.device_mesh, grad.placements, run_check=False)

    net.head.weight.register_hook(hook)
    train(run, net)


def _write_to_weight(module: Any, args: object) -> None:
    with torch.no_grad():
        module.up.weight.clamp_(-1, 1)


@scenario(shape=(4,), per_host=2)
def wires_over_hosts_written(run: Run) -> None:
    """What was written is encoded while a stream encodes parameters of the next block."""
    net = shard(run, wire=shardwise.Wire(gather="int8"), transport="c10d")
    for block, following in itertools.pairwise(net.blocks):
        block.set_modules_to_forward_prefetch([following])
    _train_written(run, net)


def _train_written(run: Run, net: Any) -> None:
    """Modules write to their full parameters, and the runtime copies that to the shards."""
    for block in net.blocks:
        block.register_forward_pre_hook(_write_to_weight)
    train(run, net)


@scenario()
def keep_unsharded(run: Run) -> None:
    net = shard(run)
    train(run, net, steps=1)
    with torch.no_grad(), net.keep_unsharded():
        for block in net.blocks:
            for parameter in block.parameters():
                assert not isinstance(parameter, DTensor)
                parameter.detach().sum()
        for _ in range(2):
            net(batch())
    train(run, net, steps=2)


@scenario()
def summon_offloaded(run: Run) -> None:
    """Full parameters and gradients are made on the host, and written back."""
    with torch.device(NAME):
        model = shardwise.FullyShardedDataParallel(
            Net(),
            device_mesh=run.mesh,
            auto_wrap_policy=shardwise.wrap.ModuleWrapPolicy([Block]),
            cpu_offload=CPUOffload(offload_params=True),
        )
    train(run, model, steps=1)
    for offloads in (False, True):
        run_backward(model)
        with shardwise.FullyShardedDataParallel.summon_full_params(
            model, offload_to_cpu=offloads, with_grads=True
        ):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
                parameter.detach().mul_(2)
        model.zero_grad()
        with shardwise.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
    train(run, model, steps=1)


@scenario()
def channels_last(run: Run) -> None:
    """Shards get another memory format, and the runtime makes them contiguous."""
    net = make(run)
    with torch.device(NAME):
        net.blocks[0].unused = nn.Conv2d(4, 8, 3)
    shard(run, net)
    for _ in range(2):
        net.to(memory_format=torch.channels_last)
        train(run, net, steps=2)


@scenario(shape=(2, 2))
def tensor_parallel(run: Run) -> None:
    """Parameters are ``DTensor`` s, and activations are reduced by functional collectives."""
    net = make(run)
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, run.mesh["replicate"], plan, src_data_rank=None)
    for module in (*net.blocks, net):
        fully_shard(module, mesh=run.mesh["shard"])
    train(run, net)
    for parameter in net.parameters():
        parameter.full_tensor()


# -- activation checkpointing -------------------------------------------------------------------


def _recomputed(run: Run) -> Any:
    return make(run, call=lambda block, x: checkpoint(block, x, use_reentrant=False))


def _not_gathered_in_backward(net: Any) -> Any:
    """Forward gathers again when it is computed again."""
    for unit in units(net):
        unit.set_unshard_in_backward(False)
    return net


@scenario()
def activation_checkpointing_reentrant(run: Run) -> None:
    net = make(run, call=lambda block, x: checkpoint(block, x, use_reentrant=True))
    net = shard(run, net)

    def backward(net: Any) -> None:
        net(batch().requires_grad_()).square().mean().backward()

    train(run, net, backward=backward)


# -- failures -----------------------------------------------------------------------------------


class _FaultError(Exception):
    """What a scenario raises."""


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except _FaultError:
        return
    raise AssertionError("nothing was raised")


@scenario()
def forward_raises(run: Run) -> None:
    def call(block: Any, x: torch.Tensor) -> torch.Tensor:
        if fails and block is net.blocks[1]:
            raise _FaultError
        out: torch.Tensor = block(x)
        return out

    net = make(run, depth=3, call=call)
    shard(run, net)
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
    fails = False
    train(run, net, steps=1)
    fails = True
    with _failing():
        loss_of(net)
    fails = False
    train(run, net, steps=2)


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise _FaultError


def _backward_raises(run: Run, net: Any) -> None:
    def call(block: Any, x: torch.Tensor) -> torch.Tensor:
        if fails and block is net.blocks[1]:
            x = _Raise.apply(x)  # type: ignore[no-untyped-call]
        out: torch.Tensor = block(x)
        return out

    net.call = call
    fails = False
    train(run, net, steps=1)
    fails = True
    with _failing():
        run_backward(net)
    fails = False
    train(run, net, steps=2)


def _large_without_head(run: Run) -> Any:
    """The next forward begins with the gather that was given up."""
    net = make(run, inner=1024)
    net.head = nn.Identity()
    return net


# -- around a training --------------------------------------------------------------------------


@scenario()
def made_again(run: Run) -> None:
    """Models are freed while their last reductions are new, and others are made in their memory."""
    for _ in range(3):
        net = shard(run)
        run_backward(net)
        del net
        free_models()


@scenario()
def copied(run: Run) -> None:
    """Models are copied, and the copies freed."""
    net = shard(run)
    train(run, net, steps=1)
    for _ in range(2):
        train(run, copy.deepcopy(net), steps=1)
        free_models()


@scenario()
def materialize(run: Run) -> None:
    """Models are made on the meta device and materialized."""
    for _ in range(2):
        _materialize(run)
        free_models()


def _materialize(run: Run) -> None:
    with torch.device("meta"):
        net: Any = Net()
    net.scale = nn.Parameter(torch.ones(3, device="meta"))
    net.register_buffer("offset", torch.ones(3, device="meta"))
    for block in net.blocks:
        fully_shard(block, mesh=run.mesh)
    fully_shard(net, mesh=run.mesh, ignored_params={net.scale})
    shardwise.materialize(net, device=NAME, init=_fill)
    run_backward(net)


def _fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.detach().fill_(1)


@scenario()
def wrapper(run: Run) -> None:
    """Training by ``FullyShardedDataParallel``."""
    net = make(run)
    model = shardwise.FullyShardedDataParallel(
        net,
        device_mesh=run.mesh,
        forward_prefetch=True,
        auto_wrap_policy=shardwise.wrap.ModuleWrapPolicy([Block]),
        use_orig_params=True,
    )
    train(run, model)
    with shardwise.FullyShardedDataParallel.summon_full_params(model):
        pass
    model.clip_grad_norm_(1.0)
    train(run, model, steps=2)


@scenario(shape=(2, 2))
def diloco(run: Run) -> None:
    _diloco(run, Streaming())


@scenario(shape=(2, 2))
def diloco_streaming(run: Run) -> None:
    _diloco(run, Streaming(fragments=2, overlap=1))


@contextmanager
def _agreeing() -> Iterator[None]:
    """Let the other replicas, which do not exist, report what this one does."""
    with (
        mock.patch.object(members, "digest", return_value=0),
        mock.patch.object(Peers, "gather_objects", lambda peers, mine, doing: [mine] * peers.size),
    ):
        yield


def _diloco(run: Run, streaming: Streaming) -> None:
    net = make(run)
    for module in (*net.blocks, net):
        fully_shard(module, mesh=run.mesh["shard"])
    inner = adamw(net.parameters())
    with _agreeing():
        optimizer = DiLoCo(
            net,
            inner,
            every=2,
            group=run.mesh["replicate"].get_group(),
            wire=WireFormat.INT8,
            streaming=streaming,
            error_feedback=True,
        )
    for _ in steps_of(run, 6):
        run_backward(net)
        optimizer.step()
        optimizer.zero_grad()


# -- checkpoints --------------------------------------------------------------------------------


@contextmanager
def _read_when(ready: threading.Event, run: Run) -> Iterator[None]:
    """Let a save only read what it would write, in its thread, once ``ready`` is set.

    One rank writes no checkpoint, and fake tensors have no bytes.
    """

    def read(self: Any) -> None:
        ready.wait()
        tensors = [dtensor.plain(each).detach() for each in self._state().tensors.values()]
        with run.device.host_thread("host, saving", since):
            run.device.access(run.device.host, "the writer", tensors, [])

    since = run.device.host.clock
    start = threading.Thread.start

    def start_here(thread: threading.Thread) -> None:
        nonlocal since
        since = run.device.host.clock.copy()
        start(thread)

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(saving, "group_for", lambda group: None))
        stack.enter_context(patch(agreement, "group_for", lambda group: None))
        stack.enter_context(patch(state, "check_tensor", lambda tensor, name: tensor))
        stack.enter_context(patch(saving.Saving, "write", read))
        stack.enter_context(patch(threading.Thread, "start", start_here))
        yield


def _async_save(run: Run, net: Any) -> None:
    opt = train(run, net, steps=1)
    ready = threading.Event()
    with _read_when(ready, run):
        handle = saving.async_save("/nowhere", net, opt, {"mask": torch.ones(4)})
        run_backward(net)
        opt.step()
        ready.set()
        handle.result()
    train(run, net, steps=1)


def _async_save_pageable(run: Run, net: Any) -> None:
    """Save on a device that pins no memory, and copies to pageable memory without waiting."""
    with mock.patch.object(devices, "pins", return_value=False):
        _async_save(run, net)


# -- trainings that differ in options alone -------------------------------------------------------


def _options(
    name: str,
    *through: Callable[[Any], Any],
    net: Callable[[Run], Any] = make,
    how: Callable[[Run, Any], object] = train,
    backward: Callable[[Any], None] | None = None,
    shape: tuple[int, ...] = (2,),
    rank: int = 0,
    per_host: int = 0,
    pageable: Pageable = Pageable.BLOCKS,
    inner: int | None = None,
    **options: Any,
) -> None:
    """List a training of a net that is sharded with ``options``, and changed by ``through``."""
    made = net if inner is None else functools.partial(make, inner=inner)
    trained = how if backward is None else functools.partial(train, backward=backward)

    def run(run: Run) -> None:
        net = shard(run, made(run), **options)
        for change in through:
            net = change(net)
        trained(run, net)

    SCENARIOS[name] = Scenario(run, shape, rank, per_host, pageable)


def _by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 else None


_options("zero3", how=functools.partial(train, optimizer=adamw, backward=backward_with_gradients))
_options("zero2", reshard_after_forward=False)
_options("one_rank", shape=(1,))
_options("one_rank_mixed", shape=(1,), mp_policy=BF16)
_options("no_shard", shape=(2, 1), reshard_after_forward=False)
_options("hybrid", backward=backward_with_gradients, shape=(2, 2))
_options("hybrid_zero2", shape=(2, 2), reshard_after_forward=False)
_options("hybrid_mixed", shape=(2, 2), mp_policy=BF16)
_options("mixed", mp_policy=BF16)
_options("half", mp_policy=FP16)
_options("half_reduced", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float16))
_options("integer_reshard", shape=(4,), reshard_after_forward=2)
_options("plain_collectives", transport="collectives")
_options("offload_pinned", how=functools.partial(train, optimizer=adamw), offload_policy=PINNED)
_options("offload_unpinned", how=functools.partial(train, optimizer=adamw), offload_policy=UNPINNED)
_options("offload_mixed", offload_policy=PINNED, mp_policy=BF16)
_options("offload_hybrid", backward=backward_with_gradients, shape=(2, 2), offload_policy=PINNED)
_options("offload_one_rank", shape=(1,), offload_policy=PINNED)
_options("optimizer_in_backward_offloaded", how=_optimizer_in_backward, offload_policy=PINNED)
_options("optimizer_in_backward", how=_optimizer_in_backward)
_options("step_in_backward", how=_step_in_backward)
# Groups step on the host, as soon as their gradients have arrived there.
_options("step_in_backward_offloaded", how=_step_in_backward, offload_policy=PINNED)
_options("step_in_backward_hybrid", how=_step_in_backward, shape=(2, 2))
# Pieces of one round travel while another one is computed.
_options("muon", how=_muon)
# Replicas share the work too.
_options("muon_hybrid", how=_muon, shape=(2, 2))
_options("muon_alone", how=_muon, shape=(1,))
_options("prefetch", _prefetching)
_options("prefetch_mixed", _prefetching, mp_policy=BF16)
_options("custom", _customize)
_options("custom_mixed", _customize, mp_policy=BF16)
_options("custom_hybrid", _customize, shape=(2, 2))
_options("custom_prefetch", _customize, _prefetching)
_options("custom_offload", _customize, offload_policy=PINNED)
# Reductions have a stream of their own, beside that of gathers.
_options("separate_group", _separate)
_options("separate_group_hybrid", _separate, shape=(2, 2), mp_policy=BF16)
_options("separate_group_offload", _separate, offload_policy=PINNED)
# Some parameters are cut along their second dimension.
_options("staged", shard_placement_fn=_by_columns)
_options(
    "staged_integer_reshard", shape=(4,), reshard_after_forward=2, shard_placement_fn=_by_columns
)
_options("uneven", shape=(4,), inner=63)
_options("uneven_last_rank", shape=(4,), rank=3, inner=63, mp_policy=BF16)
# Parameters large enough for a collective of their own.
_options("large", inner=1024)
_options("large_hybrid", shape=(2, 2), inner=1024)
_options("large_mixed", inner=1024, mp_policy=BF16)
_options("large_uneven", inner=1023)
_options("large_offload", inner=1024, offload_policy=PINNED)
_options("plain_collectives_mixed", net=_with_norms_in_bfloat16, transport="collectives")
_options("custom_two_dtypes", _customize, net=_with_norms_in_bfloat16)
# The custom collective runs on a stream of the backend and returns a work.
_options("custom_asynchronous", functools.partial(_customize, asynchronous=True))
_options("offload_accumulate", backward=_twice, offload_policy=PINNED)
_options("offload_tied", net=_tied, offload_policy=PINNED)
_options("tied", net=functools.partial(_tied, depth=3))
_options("zero1", backward=_zero1, reshard_after_forward=False)
_options("hybrid_accumulate", backward=_first_over_shards, shape=(2, 2))
_options("many_input_buffers", _with_three_buffers)
_options("forward_on_side_stream", how=_forward_on_side_stream)
_options("forward_on_side_stream_hybrid", how=_forward_on_side_stream, shape=(2, 2))
_options("forward_on_side_stream_offloaded", how=_forward_on_side_stream, offload_policy=PINNED)
_options("clip", backward=_clipped)
_options("finalized", how=functools.partial(_finalized, async_op=False))
_FINALIZED = functools.partial(_finalized, async_op=True)
_options("finalized_asynchronously", how=_FINALIZED, shape=(2, 2), mp_policy=BF16)
_options("finalized_offload", how=_FINALIZED, offload_policy=PINNED)
_options("kept_storage", _prefetching, _keeping_storage)
# Several groups are in reduction at once.
_options("separate_group_in_flight", _prefetching, _separate, _with_three_buffers)
_INT8 = shardwise.Wire(gather="int8", reduce="int8", error_feedback=True)
_SMALL = functools.partial(make, depth=1)
# Both dimensions encode, and keep what they lost.
_options(
    "wires",
    net=_SMALL,
    backward=backward_with_gradients,
    shape=(2, 2),
    wire=_INT8,
    transport="c10d",
)
# One dimension of two hosts: in each of them first, or last, and in both for a scalar.
_options(
    "wires_over_hosts",
    net=_of(_Scaled, Block),
    backward=backward_with_gradients,
    shape=(4,),
    per_host=2,
    wire=_INT8,
    transport="c10d",
)
# A parameter that is not cut is all-reduced while others are scattered, one as it is.
_FP8 = shardwise.Wire(gather="fp8", reduce="fp8")
_options("wires_of_scalars", net=_of(_Scaled, _Wide), wire=_FP8, transport="c10d")
_RANDOM = shardwise.Wire(gather="bf16", reduce="int8", rounding="stochastic")
_options(
    "wires_offload",
    net=_SMALL,
    shape=(2, 2),
    wire=_RANDOM,
    transport="c10d",
    offload_policy=PINNED,
)
# Backward computes with the scalars of its forward.
_options(
    "integer_reshard_of_scalars", net=_of(_Scaled, _Scaled), shape=(4,), reshard_after_forward=2
)
_options("integers", net=_with_integers, mp_policy=BF16)
_options("integers_plain_collectives", net=_with_integers, mp_policy=BF16, transport="collectives")
_options("integers_custom", _customize, net=_with_integers, mp_policy=BF16)
_options("returns_parameter", net=_returning_parameters)
_ONE_BY_ONE = functools.partial(train, optimizer=functools.partial(sgd, foreach=False))
_options("subclass", net=_of_a_subclass, how=_ONE_BY_ONE)
_options("subclass_offload", net=_of_a_subclass, how=_ONE_BY_ONE, offload_policy=UNPINNED)
_options("written_in_forward", how=_train_written)
_options("written_in_forward_mixed", how=_train_written, mp_policy=BF16)
_options("written_in_forward_offloaded", how=_train_written, offload_policy=PINNED)
_options(
    "wires_written_offloaded",
    how=_train_written,
    offload_policy=PINNED,
    wire=shardwise.Wire(gather="int8"),
    transport="c10d",
)
_options("activation_checkpointing", net=_recomputed)
_options("activation_checkpointing_gathers", _not_gathered_in_backward, net=_recomputed)
# A gather and a reduction are under way, and nobody waits for them.
_options("backward_raises", how=_backward_raises)
# The gather that nobody waits for writes to the full parameters themselves.
_options("backward_raises_large", net=_large_without_head, how=_backward_raises)
_options("backward_raises_offloaded", how=_backward_raises, offload_policy=PINNED)
_options("backward_raises_staged", how=_backward_raises, shard_placement_fn=_by_columns)
_options("async_save", how=_async_save)
_options("async_save_pageable", how=_async_save_pageable, pageable=Pageable.RETURNS)
_options("async_save_offloaded", how=_async_save, offload_policy=PINNED)


# -- activations on the host ---------------------------------------------------------------------


def _with_activations_on_host(
    run: Run, *, recomputed: bool, policy: CPUOffloadPolicy = PINNED, depth: int = 3
) -> Any:
    activations._stores.clear()  # those of an earlier run have streams of its device
    net = make(run, depth=depth)
    for block in net.blocks:
        offload_activations(checkpoint_module(block) if recomputed else block, policy, smallest=1)
    return shard(run, net)


@scenario()
def inputs_on_the_host(run: Run) -> None:
    """Blocks are recomputed, and their inputs go to the host and come back."""
    train(run, _with_activations_on_host(run, recomputed=True))


@scenario()
def activations_on_the_host(run: Run) -> None:
    """All activations go to the host and come back, in two backwards through one graph too."""
    net = _with_activations_on_host(run, recomputed=False)

    def backward(net: Any) -> None:
        loss = loss_of(net)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]

    train(run, net, backward=backward)


@scenario()
def activations_of_a_dropped_graph(run: Run) -> None:
    """Graphs are dropped while copies to the host run, and while others come back."""
    net = _with_activations_on_host(run, recomputed=False)
    loss_of(net)
    batch().square()  # in memory that is free again
    _backward_raises(run, net)
