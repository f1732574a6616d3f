"""Results that are made again are those that torch's own fake mode returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise._torch import c10d
from shardwise._torch.autograd import version_of
from shardwise._torch.fake import ReplayMode

aten = torch.ops.aten


class _Asked(ReplayMode):
    """Counts the operations that torch's own mode is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return super().dispatch(*args, **kwargs)


def _seen(value: Any, storages: list[torch.UntypedStorage]) -> Any:
    """What tells tensors apart, and which of them share memory."""
    if isinstance(value, list | tuple):
        return [_seen(each, storages) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    if all(storage is not each for each in storages):
        storages.append(storage)
    return (
        type(value),
        value.device,
        value.dtype,
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.requires_grad,
        version_of(value),
        storage.nbytes(),
        next(at for at, each in enumerate(storages) if each is storage),
        None if value.grad_fn is None else type(value.grad_fn).__name__,
    )


def _products() -> list[Any]:
    x, w = torch.zeros(4, 8, requires_grad=True), torch.zeros(8, 6, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    with torch.no_grad():
        z = x @ w.float()
    y.sum().backward()
    return [x, w, y, z, x.grad]


def _views() -> list[Any]:
    x = torch.zeros(4, 6)
    split = x.split([2, 4], 1)
    return [x, x.t(), x[1:, ::2], x.view(2, 12), x.unsqueeze(0).expand(3, 4, 6), *split, x.detach()]


def _views_of_views() -> list[Any]:
    x = torch.zeros(24)
    return [x, x[2:].as_strided((3, 3), (4, 1)), x.view(torch.int32), x.view(4, 6).t().reshape(24)]


def _writes() -> list[Any]:
    x, y = torch.zeros(4), torch.ones(4)
    out = torch.empty(4)
    same = torch.add(x, y, out=out)
    x.add_(1)
    x.add_(y)
    x.add_(x)
    x[1:].mul_(2)
    torch._foreach_add_([x, y], 1.0)
    return [x, y, out, same is out, torch._foreach_mul([x, y], 2.0)]


def _random() -> list[Any]:
    x = torch.rand(5, 5)
    return [x, torch.randn_like(x), torch.nn.functional.dropout(x, 0.5), x.bernoulli_(0.5)]


def _numbers() -> list[Any]:
    x = torch.zeros(3, dtype=torch.int64)
    return [x + 1, x + 1.0, x + True, x * 2, x * 2.0, x / 2, torch.full((2,), 1), torch.ones(2)]


def _metadata() -> list[Any]:
    x, y = torch.zeros(2, 3), torch.zeros(6)
    x.t_()
    y.resize_(12)
    z = torch.empty(0)
    z.set_(y.untyped_storage(), 2, (4,), (1,))
    w = torch.zeros(2)
    w.data = y
    return [x, y, z, w, x + 1, y + 1, z + 1, w + 1]


def _complex() -> list[Any]:
    x = torch.zeros(3, dtype=torch.complex64)
    return [x.conj(), x.conj().resolve_conj(), x.conj().imag, x.imag, x.imag + 1, x.conj() + 1]


def _defaults() -> list[Any]:
    made = [torch.zeros(3), torch.arange(3) / 2]
    torch.set_default_dtype(torch.float64)
    try:
        made += [torch.zeros(3), torch.arange(3) / 2]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        x = torch.zeros(3)
        made += [x, x + 1]
    with torch.device("meta"):
        made += [torch.zeros(3), torch.zeros(3) + 1]
    return made


def _several() -> list[Any]:
    x = torch.zeros(4, 8, requires_grad=True)
    norm = torch.nn.functional.layer_norm(x, (8,))
    values, places = x.topk(2)
    return [norm, values, places, *torch.var_mean(x, 1), torch._foreach_norm([x.detach(), norm])]


def _freed() -> list[Any]:
    x = torch.zeros(4, 4)
    view = x.t()
    x.untyped_storage().resize_(0)
    other = x.view(16)
    x.untyped_storage().resize_(64)
    return [x, view, other, other + 1]


@pytest.mark.parametrize(
    "run",
    [
        _products,
        _views,
        _views_of_views,
        _writes,
        _random,
        _numbers,
        _metadata,
        _complex,
        _defaults,
        _several,
        _freed,
    ],
)
def test_the_second_time_is_like_torch(run: Callable[[], list[Any]]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = _seen(run(), [])
    with _Asked() as mode:
        first = _seen(run(), [])
        before, mode.asked = mode.asked, 0
        second = _seen(run(), [])
    assert first == expected
    assert second == expected
    assert mode.asked < before


def test_values_that_torch_knows_stay_known() -> None:
    with ReplayMode():
        for value in (1.0, 2.0, 2.0):
            x = torch.tensor(value)
            assert (x * 2).item() == 2 * value
            x.add_(1)
            assert x.item() == value + 1


def test_a_repeated_layer_does_not_ask_torch() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with _Asked() as mode:
        fake = mode.from_tensor
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(fake(parameter.detach())))
        for _ in range(2):
            mode.asked = 0
            layer(torch.zeros(2, 5, 16)).sum().backward()
            layer.zero_grad()
        assert mode.asked == 0


def test_results_have_memory_of_their_own_that_is_freed_with_them() -> None:
    with ReplayMode():
        x = torch.zeros(8)
        one, other = x + 1, x + 1
        assert one.untyped_storage() is not other.untyped_storage()
        assert one.untyped_storage().nbytes() == 32


def test_what_is_written_to_is_returned_wherever_it_stands() -> None:
    with ReplayMode():
        for _ in range(2):
            x, y, out = torch.zeros(3), torch.zeros(3), torch.zeros(3)
            assert torch.add(x, y, out=x) is x
            assert torch.add(x, y, out=out) is out
            assert x.add_(x) is x
            assert x.add_(y) is x


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda x: x.sum().item(), DataDependentOutputException),
        (lambda x: x.nonzero(), DynamicOutputShapeException),
        (lambda x: x[x > 0], DynamicOutputShapeException),
    ],
)
def test_what_depends_on_values_is_refused_every_time(
    read: Callable[[torch.Tensor], Any], error: type[Exception]
) -> None:
    with ReplayMode():
        x = torch.zeros(3)
        for _ in range(2):
            with pytest.raises(error):
                read(x)


def test_tensors_of_other_modes_and_with_values_are_left_to_torch() -> None:
    with FakeTensorMode():
        other = torch.zeros(3)
    real = torch.ones(3)
    with ReplayMode() as mode:
        for _ in range(2):
            assert isinstance(real + 1, FakeTensor)
            assert (real + torch.zeros(3)).fake_mode is mode  # type: ignore[attr-defined]
            assert (other + torch.zeros(3)).fake_mode is mode  # type: ignore[attr-defined]
    assert torch.equal(real, torch.ones(3))


def test_distributed_tensors_run_on_their_parts() -> None:
    with c10d.fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        with ReplayMode():
            for _ in range(2):
                rows = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)
                full = DTensor.from_local(torch.zeros(4, 3), mesh, [Replicate()], run_check=False)
                made = rows @ full
                assert isinstance(made, DTensor)
                assert made.shape == (4, 3)
                assert made.to_local().shape == (2, 3)


def test_symbolic_shapes_are_left_to_torch() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = ReplayMode()
    mode.shape_env, mode.static_shapes = ShapeEnv(), False
    for real in (torch.zeros(5, 3), torch.zeros(7, 3)):
        with mode:
            x = mode.from_tensor(real)
            assert isinstance(x.shape[0], torch.SymInt)
            assert (x + 1).shape[0] == real.shape[0]
