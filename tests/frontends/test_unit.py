"""What a unit leaves alone, wraps first, and computes in another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from shardwise.frontends.state_dict import WrapperModule
from shardwise.frontends.unit import (
    AutoWrap,
    Ignored,
    cast_buffers,
    keep_in_full_precision,
    modules_in_full_precision,
)
from shardwise.wrap import CustomPolicy, ModuleWrapPolicy
from tests.sharding.nets import Block, Net


class Wrapper(WrapperModule):
    """A wrapper that records the arguments that it gets."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module)
        self.arguments = arguments


NOTHING = Ignored(set(), set())


def test_ignored_modules_include_what_is_inside_them() -> None:
    net = Net()
    ignored = Ignored.of(net, [net.blocks[0]], [net.gain, net.head])
    assert ignored.modules == {*net.blocks[0].modules(), net.head}
    inside = [*net.blocks[0].parameters(), *net.head.parameters(), net.gain]
    assert ignored.parameters == set(inside)


def test_what_cannot_be_ignored() -> None:
    net = Net()
    with pytest.raises(TypeError, match="expected modules or parameters, found str"):
        Ignored.of(net, ["head"], None)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="found the Net that is to be wrapped"):
        Ignored.of(net, [net], None)
    net.head = Wrapper(net.head)
    with pytest.raises(ValueError, match="FullyShardedDataParallel around a Linear"):
        Ignored.of(net, [net.head], None)


def test_chosen_modules_get_the_arguments_of_the_outer_wrapper() -> None:
    net = Net()
    AutoWrap(ModuleWrapPolicy({Block}), Wrapper, {"transport": "shm"}).apply(net, NOTHING)
    assert all(isinstance(block, Wrapper) for block in net.blocks)
    assert net.blocks[0].arguments == {"transport": "shm"}
    assert not isinstance(net.head, Wrapper)


def test_ignored_and_wrapped_modules_are_not_wrapped() -> None:
    net = Net()
    ignored, inner = net.blocks[0], Wrapper(net.blocks[1])
    net.blocks[1] = inner
    AutoWrap(ModuleWrapPolicy({Block}), Wrapper, {}).apply(net, Ignored({ignored}, set()))
    assert net.blocks[0] is ignored
    assert net.blocks[1] is inner
    assert isinstance(net.blocks[2], Wrapper)


def test_a_policy_may_give_a_module_arguments_of_its_own() -> None:
    """A process group of its own takes the place of the outer mesh."""
    net = Net()
    group = object()
    policy = CustomPolicy(lambda m: {"process_group": group} if m is net.blocks[1] else False)
    AutoWrap(policy, Wrapper, {"device_mesh": "outer", "transport": "shm"}).apply(net, NOTHING)
    assert net.blocks[1].arguments == {
        "device_mesh": None,
        "process_group": group,
        "transport": "shm",
    }


def test_classes_that_mixed_precision_ignores_become_units_in_full_precision() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    low = MixedPrecision(param_dtype=torch.bfloat16)
    assert modules_in_full_precision(net, low) == [net[1]]
    assert modules_in_full_precision(net, None) == []
    wrap = AutoWrap(ModuleWrapPolicy({Block}), Wrapper, {"mixed_precision": low}, low)
    norm = net[1]
    wrap.apply(net, NOTHING)
    assert net[1].arguments == {"mixed_precision": None}
    out = norm(torch.randn(8, 4, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16, "as its neighbors compute"
    assert norm.running_mean.dtype == torch.float32


def test_a_module_in_full_precision_casts_inputs_and_outputs() -> None:
    layer = nn.Linear(2, 2)
    keep_in_full_precision(layer)
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    assert layer(torch.ones(1, 2, dtype=torch.float16)).dtype == torch.float16
    assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [torch.float32, torch.float32]


def test_buffers_are_cast_and_their_dtypes_remembered() -> None:
    norm = nn.BatchNorm1d(3)
    before = cast_buffers([("inner.norm", norm)], torch.bfloat16)
    assert before == {
        "inner.norm.running_mean": torch.float32,
        "inner.norm.running_var": torch.float32,
    }
    assert norm.running_mean is not None
    assert norm.running_mean.dtype == torch.bfloat16
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.dtype == torch.int64, "not a floating-point buffer"
    assert cast_buffers([("norm", norm)], None) == {}


def test_names_skip_the_wrapper() -> None:
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    AutoWrap(ModuleWrapPolicy({Block}), Wrapper, {}).apply(net, NOTHING)
    outer = Wrapper(net)
    assert [name for name, _ in outer.named_parameters()] == names
    assert list(outer.state_dict()) == list(state)
    assert outer.load_state_dict(state) == ([], [])
    missing = outer.load_state_dict({"other": torch.zeros(1)}, strict=False)
    assert missing.missing_keys == list(state)
    assert missing.unexpected_keys == ["other"]
    assert outer.blocks[0].up is outer.module.get_submodule("blocks.0").module.up
    with pytest.raises(AttributeError, match="nothing"):
        outer.nothing  # noqa: B018
