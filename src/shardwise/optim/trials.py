"""What an optimizer needs, found out by a few steps on small random parameters.

cut         each half of a parameter in an instance of its own, against the whole parameter
coupled     each parameter in an instance of its own, against all parameters in one
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import dtensor
from shardwise.optim.around import hyperparameters
from shardwise.optim.cells import MakeOptimizer

_STEPS = 3
_SMALL = (8, 6, 5, 3, 3)
#: Shapes by the number of dimensions. Optimizers with states of 8 bits need 4096 elements, and cut
#: no block of 256 here.
_LARGE = {1: (9100,), 2: (130, 70), 3: (26, 5, 70), 4: (26, 5, 10, 7), 5: (26, 5, 2, 5, 7)}
#: The share of elements that have to be equal; where they lie, others may be rounded differently.
_ENOUGH = 0.99


def check_elementwise(
    make: MakeOptimizer, groups: Iterable[Mapping[str, Any]], what: str
) -> frozenset[str]:
    """Check that an optimizer works element by element.

    Args:
        make: makes the optimizer.
        groups: its parameter groups.
        what: it and who asks, for errors.

    Returns:
        The names of the states that have an element for each one of the parameter.

    Raises:
        ValueError: something depends on how a parameter is cut.
    """
    found: set[str] = set()
    for settings, param in _kinds(groups):
        # A state that counts steps has the shape of a scalar, too. Those of a vector tell.
        shape = _LARGE[max(param.ndim, 1)]
        tensors = _random(param, shape, 0)
        (whole,) = _outcomes(make, [(settings, tensors)], what)
        cut = [key for key, v in whole["state"].items() if getattr(v, "shape", None) == shape]
        found.update(cut)
        for dim in {0, param.ndim - 1} if param.ndim else ():
            half = shape[dim] // 2
            for first, size in ((0, half), (half, shape[dim] - half), (0, 0)):
                part = [each.narrow(dim, first, size) for each in tensors]
                (outcome,) = _outcomes(make, [(settings, part)], what)
                state = {key: whole["state"][key].narrow(dim, first, size) for key in cut}
                wanted = {
                    "update": whole["update"].narrow(dim, first, size),
                    "state": {**whole["state"], **state},
                    "group": whole["group"],
                }
                for name, value in wanted.items():
                    if size and not _same(outcome[name], value):
                        raise ValueError(
                            f"{what}: found in a trial that its {name} depends on how a parameter "
                            f"is cut: one of shape {shape} and {param.dtype}, at {half} of "
                            f"dimension {dim}; expected an optimizer that works element by "
                            "element. Use shardwise.optim.whole: one rank has a parameter whole"
                        )
    return frozenset(found)


def is_coupled(make: MakeOptimizer, groups: Iterable[Mapping[str, Any]], what: str) -> bool:
    """Whether what an optimizer does with a parameter depends on the others that it has.

    Args:
        make: makes the optimizer.
        groups: its parameter groups.
        what: it and who asks, for errors.

    Raises:
        ValueError: it cannot step.
    """
    kinds = [kind for kind in _kinds(groups) for _ in range(2)]
    inputs = [
        (settings, _random(param, _SMALL[: param.ndim], number))
        for number, (settings, param) in enumerate(kinds)
    ]
    together = _outcomes(make, inputs, what)
    return not _same(together, [_outcomes(make, [each], what)[0] for each in inputs])


def _kinds(groups: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Tensor]]:
    """Return settings of groups, each with a parameter of each kind. Learning rates are alike."""
    found: dict[object, tuple[Mapping[str, Any], Tensor]] = {}
    for group in groups:
        settings = hyperparameters(group)
        rest = repr({key: value for key, value in settings.items() if "lr" not in key})
        for param in map(dtensor.plain, group["params"]):
            found.setdefault((rest, param.ndim, param.dtype, param.device), (settings, param))
    return list(found.values())


def _random(param: Tensor, shape: Sequence[int], number: int) -> list[Tensor]:
    """Return a parameter and its gradients, of very different sizes, so that norms matter."""
    generator = torch.Generator().manual_seed(number)
    made = []
    for _ in range(1 + _STEPS):
        values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        sizes = 8 * torch.rand(tuple(shape), generator=generator, dtype=torch.float64) - 6
        values = values * 10 ** (sizes - 2 * (number % 2))
        if shape:
            values[: shape[0] // 2] *= 10
        made.append(values.to("cpu" if param.is_meta else param.device, param.dtype))
    return made


def _outcomes(
    make: MakeOptimizer, inputs: Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]], what: str
) -> list[dict[str, Any]]:
    """Return what each parameter, its state and its group are after a few steps of one instance."""
    params = [nn.Parameter(tensors[0].clone()) for _, tensors in inputs]
    groups: dict[int, dict[str, Any]] = {}
    for (settings, _), param in zip(inputs, params, strict=True):
        groups.setdefault(id(settings), {**settings, "params": []})["params"].append(param)
    try:
        devices = {param.device for param in params if param.device.type != "cpu"}
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(0)
            inner = make(list(groups.values()))
            getattr(inner, "train", lambda: None)()
            for step in range(_STEPS):
                for (_, tensors), param in zip(inputs, params, strict=True):
                    param.grad = tensors[1 + step].clone()
                inner.step()
    except Exception as error:
        shapes = [tuple(param.shape) for param in params]
        raise ValueError(
            f"{what}: a trial with plain tensors of shapes {shapes} that have gradients, and "
            f"without a closure, raised {type(error).__name__}: {error}. Expected an optimizer of "
            "parameters or groups that steps once for each backward, from gradients alone"
        ) from error
    group_of = {param: group for group in inner.param_groups for param in group["params"]}
    return [
        {
            "update": param.detach(),
            "state": inner.state.get(param, {}),
            "group": hyperparameters(group_of[param]),
        }
        for param in params
    ]


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same, but for the rounding of a few elements."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and _alike(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return isinstance(other, float) and (one == other or math.isclose(one, other))
    return type(one) is type(other) and bool(one == other)


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    eps = torch.finfo(one.dtype).eps
    one, other = one.double(), other.double()
    near = torch.isclose(one, other, rtol=8 * eps, atol=0, equal_nan=True).double().mean()
    return near.nan_to_num(1).item() >= _ENOUGH and torch.allclose(
        one, other, rtol=1e4 * eps, atol=1e-12, equal_nan=True
    )
