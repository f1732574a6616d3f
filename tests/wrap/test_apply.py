"""Wrapping: a function is applied to what was chosen, or by hand while a model is built."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwise.wrap import (
    CustomPolicy,
    always_wrap_policy,
    apply_to,
    apply_wrap,
    chosen_modules,
    enable_wrap,
    wrap,
)


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))


def test_inner_modules_come_first_and_the_model_never() -> None:
    model, seen = nested(), list[nn.Module]()
    chosen = {module: {} for module in model.modules()}
    assert apply_to(model, chosen, seen.append) is model
    inner = model[0]
    assert isinstance(inner, nn.Sequential)
    assert seen == [inner[0], inner[1], inner, model[1]]


def test_applying_replaces_modules_wherever_they_are() -> None:
    class Box(nn.Module):
        def __init__(self, inner: nn.Module, **arguments: Any) -> None:
            super().__init__()
            self.inner = inner
            self.arguments = arguments

    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()), nn.ReLU())
    policy = CustomPolicy(lambda m: {"color": "red"} if m is shared else False)

    assert apply_wrap(model, policy, Box) is model
    assert isinstance(model[0], Box)
    assert model[0] is model[1][0]
    assert model[0].arguments == {"color": "red"}

    seen: list[nn.Module] = []
    net = nested()
    apply_wrap(net, always_wrap_policy, seen.append)
    assert [type(module).__name__ for module in seen[:3]] == ["Linear", "ReLU", "Sequential"]
    assert isinstance(net[0], nn.Sequential), "what returns nothing leaves it where it is"


def test_wrapping_by_hand_is_for_inside_of_a_context() -> None:
    calls: list[dict[str, Any]] = []

    def wrapper(module: nn.Module, **arguments: Any) -> nn.Module:
        calls.append(arguments)
        return nn.Sequential(module)

    layer = nn.Linear(1, 1)
    assert wrap(layer) is layer
    with enable_wrap(wrapper_cls=wrapper, a=1, b=2):
        assert wrap(layer, b=3)[0] is layer
        with enable_wrap(wrapper_cls=wrapper, c=4):
            wrap(layer)
        wrap(layer)
    assert wrap(layer) is layer
    assert calls == [{"a": 1, "b": 3}, {"c": 4}, {"a": 1, "b": 2}]


def test_every_module_is_asked_once_with_what_no_group_has_yet() -> None:
    model, asked = nested(), list[tuple[str, int]]()
    names = {module: name for name, module in model.named_modules()}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if not recurse:
            asked.append((names[module], nonwrapped_numel))
        return recurse or names[module] == "0.0"

    assert list(chosen_modules(model, policy)) == [model.get_submodule("0.0")]
    assert asked == [("0.0", 2), ("0.1", 0), ("0", 0), ("1", 2), ("", 2)]


def test_a_function_that_shards_in_place_returns_the_module() -> None:
    plain, seen = nn.Linear(1, 1), list[nn.Module]()
    with enable_wrap(wrapper_cls=seen.append):
        assert wrap(plain) is plain
    assert seen == [plain]


def test_an_error_inside_ends_the_context() -> None:
    plain = nn.Linear(1, 1)
    with pytest.raises(ZeroDivisionError), enable_wrap(wrapper_cls=nn.Sequential):
        _ = 1 // 0
    assert wrap(plain) is plain
