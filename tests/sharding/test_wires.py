"""Sharding with wires: what ranks compute with, what their gradients become, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardwise import FullyShardedDataParallel, Wire, XlaFullyShardedDataParallel, fully_shard
from shardwise.base.errors import MisuseError
from shardwise.sharding.policy import MixedPrecisionPolicy
from shardwise.transport.encoded import EncodedTransport
from shardwise.transport.two_levels import TwoLevelTransport
from tests.corpus.gathering import in_full, wholes
from tests.corpus.models import Odd
from tests.sharding.nets import (
    Net,
    batches,
    group_of,
    hybrid_mesh,
    loss_of,
    run_backward,
    seeded,
    shard_blocks,
    sharded_modules,
    sharded_net,
)
from tests.sharding.test_communication import Gather, Scatter
from tests.sharding.test_extension import Halved
from tests.threads import on_hosts
from tests.transport.encoded import through
from tests.worlds import on_threads

INT8 = Wire(gather="int8", reduce="int8")
GRADIENTS = Wire(reduce="int8")
FEEDBACK = Wire(reduce="int8", error_feedback=True)
EVERYTHING = Wire(gather="int8", reduce="int8", error_feedback=True)
Threads = Callable[..., list[Any]]


def _assert_near(net: nn.Module, whole: nn.Module, share: float) -> None:
    """Compare gradients within a share of the largest of all ranks' gradients."""
    grads = wholes(param.grad for param in net.parameters())
    for found, (name, twin) in zip(grads, whole.named_parameters(), strict=True):
        wanted = twin.grad
        if wanted is None:
            assert found is None or not found.any(), name
            continue
        assert found is not None, name
        bound = share * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(
            found, wanted, rtol=0.0, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


def _last(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim else None


def _gradients(rank: int, world_size: int, make: Any, wire: Wire, **how: Any) -> list[Any]:
    """Two backwards that accumulate, of which the first may stay unreduced."""
    hybrid = how.pop("hybrid", False)
    mesh = {"mesh": hybrid_mesh(world_size)} if hybrid else {}
    net = shard_blocks(seeded(make), transport="c10d", wire=wire, **mesh, **how)
    whole = seeded(make)
    for step, sync in enumerate((True, False, True)):
        for module in sharded_modules(net):
            module.set_requires_gradient_sync(sync)
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
    _assert_near(net, whole, 0.03)
    return wholes(param.grad for param in net.parameters() if param.grad is not None)


WORLDS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (3, {"reshard_after_forward": False}),
    (4, {"hybrid": True}),
    (4, {"shard_placement_fn": _last}),  # with padding between values
]


@pytest.mark.parametrize(
    ("world_size", "how", "wire", "make"),
    [
        # Every world with every wire, models taking turns: so those meet all worlds and wires too.
        pytest.param(*world, wire, make, marks=pytest.mark.long if (i + j + k) % 2 else ())
        for i, world in enumerate(WORLDS)
        for j, wire in enumerate((GRADIENTS, FEEDBACK, Wire(reduce="bf16")))
        for k, make in enumerate((Net, Odd))
    ],
)
def test_gradients_are_near_those_of_one_process(
    threads: Threads, make: Any, wire: Wire, world_size: int, how: dict[str, Any]
) -> None:
    first, *others = threads(_gradients, world_size, make, wire, **how)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "the same bits"


@pytest.mark.parametrize(
    ("make", "wire", "how"),
    [
        (Net, FEEDBACK, {}),
        (Odd, FEEDBACK, {}),
        (Odd, Wire(reduce="bf16"), {"reshard_after_forward": False}),
        (Odd, GRADIENTS, {"shard_placement_fn": _last}),
    ],
    ids=["net", "odd", "kept", "padded"],
)
def test_over_hosts_of_two_ranks_each_as_well(
    threads: Threads, make: Any, wire: Wire, how: dict[str, Any]
) -> None:
    with on_hosts("aabb"):
        first, *others = threads(_gradients, 4, make, wire, **how)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "the same bits"


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> None:
    for step in range(2):
        loss_of(net, batches(world_size, step)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _levels(rank: int, world_size: int, hosts: str) -> list[torch.Tensor]:
    """Train with parameters that are encoded, too."""
    net = sharded_net(transport="c10d", wire=EVERYTHING, of_blocks={"reshard_after_forward": 2})
    assert isinstance(group_of(net).mesh.shard, TwoLevelTransport) == (hosts == "aabb")
    _train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank, world_size)
    return wholes(net.parameters())


def test_two_levels_train_as_one_does(threads: Threads) -> None:
    found = []
    for hosts in ("aaaa", "aabb"):
        with on_hosts(hosts):
            found.append(threads(_levels, 4, hosts)[0])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.02)


def _replicas(rank: int, world_size: int, wire: Any) -> list[torch.Tensor]:
    """Train, and return this rank's shards, which its replica's twin has too."""
    mesh = hybrid_mesh(world_size)
    net = sharded_net(mesh=mesh, transport="c10d", wire=wire)
    _train(net, torch.optim.AdamW(net.parameters(), lr=0.01), rank, world_size)
    return [param.to_local().detach().clone() for param in net.parameters()]


@pytest.mark.parametrize(
    "wire",
    [
        {"replicate": FEEDBACK},
        {"replicate": Wire(reduce="int8", rounding="stochastic"), "shard": INT8},
        Wire(gather="fp8", reduce="fp8", error_feedback=True),
    ],
    ids=["replicate", "both", "one"],
)
def test_replicas_stay_equal_to_the_bit(threads: Threads, wire: Any) -> None:
    found = threads(_replicas, 4, wire)
    for rank in (0, 1):
        pairs = zip(found[rank], found[rank + 2], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    # What is not cut is the same on all ranks: the gain comes first.
    assert len({float(shards[0]) for shards in found if shards[0].numel() == 1}) == 1


@on_threads(2)
def test_forward_and_backward_compute_with_the_same_decoded_parameters(
    rank: int, world_size: int
) -> None:
    net = sharded_net(transport="c10d", wire=Wire(gather="int8"))
    masters = {name: in_full(param).detach().clone() for name, param in net.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    block: Any = net.blocks[0]

    def look(module: nn.Module, args: Any) -> None:
        seen["forward"] = block.up.weight.detach().clone()

    def look_again(grad: torch.Tensor) -> None:
        seen["backward"] = block.up.weight.detach().clone()

    block.up.register_forward_pre_hook(look)
    hidden = block.up.register_forward_hook(
        lambda m, a, out: out.register_hook(look_again) and None
    )
    loss_of(net, batches(world_size)[rank]).backward()
    hidden.remove()
    shards = torch.chunk(masters["blocks.0.up.weight"], world_size)
    expected = torch.cat([through(shard.flatten(), "int8") for shard in shards]).view(7, 6)
    assert torch.equal(seen["forward"], expected)
    assert torch.equal(seen["backward"], expected)
    for name, param in net.named_parameters():
        assert torch.equal(in_full(param).detach(), masters[name]), "shards stay exact"


class Clamping(nn.Module):
    """Writes to one element of its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 42).view(7, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[0, 1] = 0.123
        return x @ self.weight.t()


@on_threads(3)
def test_what_a_module_writes_to_its_parameter_changes_nothing_else(
    rank: int, world_size: int
) -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        net = fully_shard(Clamping(), transport="c10d", wire=Wire(gather="int8"), mp_policy=policy)
        expected = Clamping().weight.detach().clone()
        loss_of(net, batches(world_size)[rank]).backward()
        expected[0, 1] = torch.tensor(0.123).to(policy.param_dtype or torch.float32)
        assert torch.equal(in_full(net.weight).detach(), expected)


@on_threads(2)
def test_with_bf16_parameters(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    nets = [
        sharded_net(transport="c10d", mp_policy=policy, **more)
        for more in ({}, {"wire": Wire(gather="bf16")}, {"wire": INT8})
    ]
    x = batches(world_size)[rank]
    plain, same, encoded = (net(x) for net in nets)
    assert torch.equal(plain, same), "bf16 parameters do not change on a bf16 wire"
    assert not torch.equal(plain, encoded)
    torch.testing.assert_close(plain, encoded, rtol=0.1, atol=0.1)
    encoded.square().mean().backward()
    assert all(param.grad is not None for param in nets[2].parameters())


@on_threads(2)
def test_a_copy_of_a_model_has_errors_of_its_own(rank: int, world_size: int) -> None:
    net = sharded_net(transport="c10d", wire=FEEDBACK)
    loss_of(net, batches(world_size)[rank]).backward()
    twin, whole = copy.deepcopy(net), seeded(Net)
    twin.zero_grad()
    run_backward(twin, whole, batches(world_size, 1), rank)
    _assert_near(twin, whole, 0.03)


def _spoiled(rank: int, world_size: int) -> tuple[int, bool]:
    net: Any = sharded_net(transport="c10d", wire=FEEDBACK)
    before = net.wire_overflows()
    x = batches(world_size)[rank]
    if rank == 0:
        x[0, 0] = float("nan")
    loss_of(net, x).backward()
    spoiled = not all(in_full(p.grad).isfinite().all() for p in net.parameters())
    counted = net.wire_overflows()
    net.zero_grad()
    loss_of(net, batches(world_size)[1]).backward()
    assert all(in_full(p.grad).isfinite().all() for p in net.parameters()), "nothing is kept of it"
    assert before == 0
    return counted, spoiled


def test_gradients_that_are_not_finite_stay_so_and_are_counted(threads: Threads) -> None:
    (first, spoiled), (_, also) = threads(_spoiled, 2)
    assert first > 0
    assert spoiled
    assert also


@on_threads(4)
def test_a_mapping_names_dimensions(rank: int, world_size: int) -> None:
    mesh = hybrid_mesh(world_size)
    net = fully_shard(seeded(Net), mesh=mesh, transport="c10d", wire={"replicate": GRADIENTS})
    chosen = group_of(net).mesh
    assert isinstance(chosen.replicate, EncodedTransport)
    assert not isinstance(chosen.shard, EncodedTransport)
    net.set_separate_reduce_scatter_group()
    net = fully_shard(seeded(Net), mesh=mesh, transport="c10d", wire={"shard": GRADIENTS})
    net.set_separate_reduce_scatter_group()
    chosen = group_of(net).mesh
    assert isinstance(chosen.scatter, EncodedTransport)
    assert chosen.scatter is not chosen.shard
    loss_of(net, batches(world_size)[rank]).backward()


@on_threads(4)
def test_shards_over_fewer_ranks_are_not_encoded_again(rank: int, world_size: int) -> None:
    net = sharded_net(transport="c10d", wire=INT8, of_blocks={"reshard_after_forward": 2})
    whole = seeded(Net)
    smaller = group_of(net.blocks[0]).post_forward
    assert smaller is not None
    assert not isinstance(smaller.transport, EncodedTransport), "it was decoded before"
    run_backward(net, whole, batches(world_size), rank)
    _assert_near(net, whole, 0.1)


# -- what is refused -------------------------------------------------------------------------------


@on_threads(2)
def test_what_a_wire_cannot_encode_is_refused_by_name(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    with pytest.raises(
        ValueError, match=r"'hosts' \(fully_shard\(Net\) on rank \d\), expected one of 'dp'"
    ):
        fully_shard(Net(), mesh=mesh, wire={"hosts": INT8})
    with pytest.raises(TypeError, match="wire: found 'int8', expected a Wire or a dict or None"):
        fully_shard(Net(), wire="int8")  # type: ignore[call-overload]
    net: Any = fully_shard(Net(), transport="c10d", wire=INT8)
    with pytest.raises(MisuseError, match=r"gather='int8'.*Wire\(gather='fp32', ...\)"):
        net.set_custom_all_gather(Gather(returns_work=True))
    with pytest.raises(MisuseError, match=r"reduce='int8'.*Wire\(reduce='fp32', ...\)"):
        net.set_custom_reduce_scatter(Scatter(returns_work=False))
    holder = nn.Linear(4, 4, bias=False)
    holder.weight = nn.Parameter(Halved(holder.weight.detach()))
    with pytest.raises(NotImplementedError, match=r"weight on rank .*Halved.*fsdp_pre_all_gather"):
        fully_shard(holder, transport="c10d", wire=INT8)


@on_threads(2)
def test_custom_collectives_go_with_wires_for_the_other_direction(
    rank: int, world_size: int
) -> None:
    """A custom gather goes with encoded gradients, and the other way round."""
    for wire, method, comm in (
        (GRADIENTS, "set_custom_all_gather", Gather(returns_work=True)),
        (Wire(gather="bf16"), "set_custom_reduce_scatter", Scatter(returns_work=False)),
    ):
        net, whole = sharded_net(transport="c10d", wire=wire), seeded(Net)
        for module in sharded_modules(net):
            getattr(module, method)(comm)
        run_backward(net, whole, batches(world_size), rank)
        _assert_near(net, whole, 0.03)


# -- the other front doors, and other dtypes -------------------------------------------------------


@on_threads(2)
def test_fsdp1_and_xla_have_wires_too(rank: int, world_size: int) -> None:
    for make in (FullyShardedDataParallel, XlaFullyShardedDataParallel):
        net: Any = make(seeded(Net), transport="c10d", wire=GRADIENTS)
        assert isinstance(group_of(net.module).mesh.scatter, EncodedTransport)
        whole = seeded(Net)
        run_backward(net, whole, batches(world_size), rank)
        _assert_near(net.module, whole, 0.03)


class Other(nn.Module):
    """Parameters of dtypes that are sent as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(5, 6, dtype=torch.float64))
        self.turning = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
        self.counts = nn.Parameter(torch.arange(30).view(5, 6), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.wide + self.turning.real + self.counts + self.weight
        return x.double() @ weight.t()


@on_threads(2)
def test_other_dtypes_are_sent_as_they_are(rank: int, world_size: int) -> None:
    net: Any = fully_shard(seeded(Other), transport="c10d", wire=GRADIENTS)
    whole = seeded(Other)
    run_backward(net, whole, batches(world_size), rank)
    for name in ("wide", "turning"):
        found, wanted = (getattr(each, name).grad for each in (net, whole))
        torch.testing.assert_close(in_full(found), wanted)
    scale = float(whole.weight.grad.abs().max())
    torch.testing.assert_close(
        in_full(net.weight.grad), whole.weight.grad, rtol=0.0, atol=scale / 50
    )
