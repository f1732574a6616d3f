"""Tensor subclasses decide what of a parameter travels, by ``fsdp_pre_all_gather`` and its pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.sharding.state import state_of
from shardwise.sharding.states import GroupState
from tests.sharding.nets import batches, check_backward, group_of, loss_of, seeded, step_all
from tests.worlds import on_processes, on_threads

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A tensor of float32 values that holds them in plain tensors, and computes with the values."""

    # What makes one of its own kind of it; all else makes plain tensors.
    _keeping: ClassVar = {
        aten.detach.default,
        aten.alias.default,
        aten.slice.Tensor,
        aten.narrow.default,
        aten.split.Tensor,
        aten.as_strided.default,
        aten.view.default,
        aten.clone.default,
        aten.empty_like.default,
        aten._to_copy.default,
    }

    @staticmethod
    def __new__(cls: type[Wrapper], inner: Sequence[torch.Tensor]) -> Wrapper:
        first = inner[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=torch.float32, device=first.device
        )

    def __init__(self, inner: Sequence[torch.Tensor]) -> None:
        self.inner = list(inner)

    @classmethod
    def of(cls, values: torch.Tensor) -> Wrapper:
        raise NotImplementedError

    def values(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in cls._keeping and "dtype" not in kwargs:
            made = [
                func(*tree_map_only(Wrapper, lambda w, i=i: w.inner[i], args), **kwargs)
                for i in range(len(args[0].inner))
            ]
            if isinstance(made[0], list | tuple):
                return [cls(parts) for parts in zip(*made, strict=True)]
            return cls(made)
        plain = tree_map_only(Wrapper, lambda w: w.values(), (args, kwargs))
        result = func(*plain[0], **plain[1])
        if func._schema.name.endswith("_"):  # in place
            for into, value in zip(args[0].inner, cls.of(plain[0][0]).inner, strict=True):
                into.copy_(value)
            return args[0]
        return result


class Halved(Wrapper):
    """Holds float32, sends bfloat16; the padding of uneven shards is its own business."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    @classmethod
    def of(cls, values: torch.Tensor) -> Halved:
        return cls([values])

    def values(self) -> torch.Tensor:
        return self.inner[0].clone()

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        Halved.seen.append((mesh, outer_size, outer_stride, module, mp_policy))
        rows = -(-outer_size[0] // mesh.size())
        sent = F.pad(self.inner[0].bfloat16(), (0, 0, 0, rows - self.shape[0]))
        return (sent,), "metadata"

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        assert metadata == "metadata"
        (sent,) = gathered
        assert sent.dtype == torch.bfloat16
        if param_dtype == torch.bfloat16:
            return (sent, (sent,)) if out is None else None
        if out is not None:
            out.copy_(sent[: out.shape[0]])
            return None
        whole = sent.to(param_dtype)
        return whole, (sent, whole)


class HighLow(Wrapper):
    """A float32 as the sum of two bfloat16s. Both travel."""

    @classmethod
    def of(cls, values: torch.Tensor) -> HighLow:
        high = values.bfloat16()
        return cls([high, (values - high).bfloat16()])

    def values(self) -> torch.Tensor:
        return self.inner[0].float() + self.inner[1].float()

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        return tuple(self.inner), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        high, low = gathered
        whole = (high.float() + low.float()).to(param_dtype)
        if out is not None:
            out.copy_(whole)
            return None
        return whole, (whole,)


class Half(nn.Module):
    """Parameters of both kinds; the weights of the subclass have ``rows`` rows."""

    def __init__(self, kind: type[Wrapper] | None, rows: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, rows)
        self.second = nn.Linear(rows, 6)
        with torch.no_grad():
            # Values that both kinds hold exactly.
            self.first.weight.copy_(self.first.weight.bfloat16())
        if kind is not None:
            self.first.weight = nn.Parameter(kind.of(self.first.weight.detach().clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class _Rounded(torch.autograd.Function):
    """What arrives of a parameter: bfloat16, or two of them, without a trace in the gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, kind: type[Wrapper]) -> torch.Tensor:
        if kind is HighLow:
            return HighLow.of(values).values()
        return values.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Twin(Half):
    """Unsharded, with plain parameters, computing with the same values."""

    def __init__(self, kind: type[Wrapper], rows: int) -> None:
        super().__init__(None, rows)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _Rounded.apply(self.first.weight, self.kind)
        return self.second(F.linear(x, weight, self.first.bias).relu())


@pytest.mark.parametrize(
    ("kind", "rows"), [(Halved, 4), (Halved, 5), (HighLow, 4)], ids=["one", "uneven", "two"]
)
@pytest.mark.parametrize("world_size", [1, 2])
@on_processes()
def test_trains_as_its_unsharded_twin(
    rank: int, world_size: int, kind: type[Wrapper], rows: int
) -> None:
    for free in (True, False):  # one rank trains the other two of four pairs
        _train(rank, world_size, kind, rows, free, adam=free == (world_size > 1))


def _train(
    rank: int, world_size: int, kind: type[Wrapper], rows: int, free: bool, adam: bool
) -> None:
    whole = seeded(lambda: Twin(kind, rows))
    net = fully_shard(seeded(lambda: Half(kind, rows)), reshard_after_forward=free)
    param = net.first.weight
    assert isinstance(param, DTensor)
    assert type(param.to_local()) is kind
    Halved.seen.clear()
    make = torch.optim.Adam if adam else torch.optim.SGD
    optimizers = [make(m.parameters(), lr=0.01, foreach=False) for m in (net, whole)]
    for step in range(2):
        x = batches(world_size, step)
        check_backward(net, whole, x, rank)
        step_all(optimizers)
        if kind is HighLow:  # its steps round as well
            with torch.no_grad():
                whole.first.weight.copy_(HighLow.of(whole.first.weight).values())
    assert type(net.first.weight.to_local()) is kind
    if kind is Halved:
        mesh, *rest = Halved.seen[0]
        assert mesh.size() == world_size
        assert rest == [(rows, 6), (6, 1), net.first, MixedPrecisionPolicy()]
        assert len(Halved.seen) == (4 if free else 2), "asked once for every gather"


@pytest.mark.parametrize("kind", [Halved, HighLow])
@on_threads(2)
def test_mixed_precision_computes_in_param_dtype(
    rank: int, world_size: int, kind: type[Wrapper]
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = fully_shard(seeded(lambda: Half(kind, 4)), mp_policy=policy, reshard_after_forward=True)
    twin = fully_shard(seeded(lambda: Half(None, 4)), mp_policy=policy, reshard_after_forward=True)
    seen: list[torch.dtype] = []
    net.first.register_forward_hook(lambda m, *_: seen.append(m.weight.dtype))
    for step in range(2):
        x = batches(world_size, step)[rank]
        loss_of(net, x).backward()
        loss_of(twin, x).backward()
        assert seen == [torch.bfloat16] * (step + 1)
        for (name, param), other in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), other.grad.full_tensor()), name
            assert param.grad.dtype == torch.float32, name


@pytest.mark.parametrize("kind", [Halved, HighLow])
@on_threads(2)
def test_inputs_get_gradients_through_a_weight_that_is_made_again(
    rank: int, world_size: int, kind: type[Wrapper]
) -> None:
    whole = seeded(lambda: Twin(kind, 4))
    net = fully_shard(seeded(lambda: Half(kind, 4)), reshard_after_forward=True)
    x, same = (batches(world_size)[rank].requires_grad_() for _ in range(2))
    loss_of(net, x).backward()
    loss_of(whole, same).backward()
    assert torch.equal(x.grad, same.grad)

    loss = loss_of(net, x)
    with torch.no_grad():
        net.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_threads(2)
def test_nothing_whole_is_left_after_a_step(rank: int, world_size: int) -> None:
    net = fully_shard(seeded(lambda: Half(HighLow, 4)), transport="c10d")
    (group,) = state_of(net).groups
    for _ in range(2):
        loss_of(net, batches(world_size)[rank]).backward()
        assert group.state is GroupState.SHARDED
        for param in group.params:
            assert param.full.untyped_storage().size() == 0, param.fqn


@on_threads(2)
def test_the_full_form_is_made_anew_after_loading(rank: int, world_size: int) -> None:
    net, other = (fully_shard(seeded(lambda s=s: Half(Halved, 5), s)) for s in (0, 1))
    x = batches(world_size)[rank]
    loss_of(net, x).backward()
    net.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(net(x), other(x))
    net.reshard()
    net.set_separate_reduce_scatter_group()
    net.zero_grad()
    for each in (net, other):
        loss_of(each, x).backward()
    for param, twin in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), twin.grad.full_tensor())


class Fragile(Halved):
    """Cannot make anything of what arrives, for a time."""

    broken = False

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        if Fragile.broken:
            raise ArithmeticError("not a weight")
        return super().fsdp_post_all_gather(*args, **kwargs)


@pytest.mark.parametrize("first", [True, False], ids=["first gather", "later gather"])
@on_processes(2)
def test_an_error_in_a_subclass_leaves_a_model_that_trains_on(
    rank: int, world_size: int, first: bool
) -> None:
    whole = seeded(lambda: Twin(Halved, 4))
    net = fully_shard(seeded(lambda: Half(Fragile, 4)))
    x = batches(world_size)
    if not first:
        loss_of(net, x[rank]).backward()
        net.zero_grad()
    Fragile.broken = True
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="not a weight"):
            net(x[rank])
        assert isinstance(net.first.weight, DTensor)
        assert group_of(net).state is GroupState.SHARDED
    Fragile.broken = False
    check_backward(net, whole, x, rank)


class Unaddressed(Halved):
    """Makes full tensors of a subclass without a memory address."""

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        made = super().fsdp_post_all_gather(*args, **kwargs)
        return made and (made[0].as_subclass(Secretive), made[1])


class Secretive(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.data_ptr:
            raise NotImplementedError("a tensor without an address")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("world_size", [1, 2])
@on_processes()
def test_a_full_tensor_needs_no_address(rank: int, world_size: int) -> None:
    whole = seeded(lambda: Twin(Halved, 4))
    net = fully_shard(seeded(lambda: Half(Unaddressed, 4)))
    for step in range(2):
        x = batches(world_size, step)
        check_backward(net, whole, x, rank)


# -- what is refused ---------------------------------------------------------------------------


class Packed(Halved):
    """Sends its values in one row, whatever the shape of the shard is."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return (self.inner[0].view(1, -1),), "metadata"

    def fsdp_post_all_gather(self, gathered: Any, *_: Any, out: Any = None) -> Any:  # type: ignore[override]
        assert out is None
        return gathered[0].view(-1, 6), gathered


@on_threads(2)
def test_what_is_cut_evenly_may_be_sent_in_any_shape(rank: int, world_size: int) -> None:
    whole = seeded(lambda: Half(None, 4))
    net = fully_shard(seeded(lambda: Half(Packed, 4)))
    x = batches(world_size)[rank][:, :6]
    assert torch.equal(net(x), whole(x))


class OnlyOne(Halved):
    @property
    def fsdp_post_all_gather(self) -> Any:  # type: ignore[override]
        raise AttributeError


class Unpadded(Halved):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return (self.inner[0].bfloat16(),), "metadata"


class OtherSignature(Halved):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh, more: int) -> Any:  # type: ignore[override]
        return (), None


@on_threads(4)
def test_wrong_extensions_are_refused_by_name(rank: int, world_size: int) -> None:
    model = Half(OnlyOne, 4)
    with pytest.raises(AssertionError, match=r"first\.weight: OnlyOne has only one of .* both"):
        fully_shard(model)
    assert type(model) is Half, "nothing was changed"

    with pytest.raises(AssertionError, match=r"expected fsdp_pre_all_gather\(mesh\) or"):
        fully_shard(Half(OtherSignature, 4))(torch.ones(1, 6))

    with pytest.raises(
        NotImplementedError, match=r"first\.weight on rank \d: an integer reshard_after"
    ):
        fully_shard(Half(Halved, 4), reshard_after_forward=2)

    # Over four ranks five rows leave the last one with none, and the third with one.
    net = fully_shard(Half(Unpadded, 5))
    if net.first.weight.to_local().shape[0] < 2:
        with pytest.raises(AssertionError, match=r"expected fsdp_pre_all_gather to return tensors"):
            net.unshard()
