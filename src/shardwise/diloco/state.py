"""The outer state in the form of an optimizer's state dict, next to the inner optimizer's.

    {"state": {0: {"exp_avg": T, ..., "diloco": {"outer": T, "momentum": T}}},
     "param_groups": [...],
     "diloco": {"steps": 120, "rounds": [2], "even_at": [100], "begun": [None]}}

Tensors are sharded as their parameters are, so whatever saves and reshards the state of an
optimizer (:mod:`shardwise.checkpoint`) does the same with the outer one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import dtensor
from shardwise.base.optim_names import keys_in_order, parameters_in_order
from shardwise.diloco.average import Average
from shardwise.diloco.fragment import Fragment, Pending

KEY = "diloco"
_OUTER, _MOMENTUM, _ERROR, _MEAN = "outer", "momentum", "error", "pending"
_START = "start"


def pack(inner: torch.optim.Optimizer, fragments: Sequence[Fragment], steps: int) -> dict[str, Any]:
    """Return the state of both optimizers, with live tensors. No exchange may be in progress."""
    packed = inner.state_dict()
    state: dict[Any, Any] = {number: dict(found) for number, found in packed["state"].items()}
    numbers = {parameter: number for number, parameter in enumerate(parameters_in_order(inner))}
    for fragment in fragments:
        for name, flat in _flats(fragment).items():
            for fqn, view in fragment.views(flat).items():
                parameter = fragment.parameters[fqn]
                own = state.setdefault(numbers[parameter], {}).setdefault(KEY, {})
                own[name] = dtensor.placed_as(parameter, view)
    facts = {
        "steps": steps,
        "rounds": [fragment.rounds for fragment in fragments],
        "even_at": [fragment.even_at for fragment in fragments],
        "begun": [None if each.pending is None else each.pending.begun for each in fragments],
    }
    return {**packed, "state": state, KEY: facts}


def unpack(
    inner: torch.optim.Optimizer, fragments: Sequence[Fragment], state_dict: Mapping[str, Any]
) -> int:
    """Load into both optimizers what :func:`pack` returned, or the state of the inner one alone.

    In the latter case the outer state starts at the model's current parameters.

    Returns:
        The number of inner steps.

    Raises:
        ValueError: it belongs to other parameters, or does not fit.
    """
    rest = {key: value for key, value in state_dict.items() if key != KEY}
    saved = state_dict.get("state", {})
    rest["state"] = {
        number: {key: value for key, value in found.items() if key != KEY}
        if isinstance(found, Mapping)
        else found
        for number, found in saved.items()
    }
    # An optimizer that has not taken a step has no state for these parameters.
    rest["state"] = {number: found for number, found in rest["state"].items() if found}
    facts = state_dict.get(KEY)
    facts_of: list[tuple[int, int, int | None]] = [(0, 0, None)] * len(fragments)
    if facts is not None:
        facts_of = _per_fragment(facts, len(fragments))
    inner.load_state_dict(rest)
    numbers = dict(zip(parameters_in_order(inner), keys_in_order(rest), strict=True))
    for fragment, (rounds, even_at, begun) in zip(fragments, facts_of, strict=True):
        fragment.begin_at_inner()
        fragment.rounds, fragment.even_at, fragment.pending = rounds, even_at, None
        if begun is not None:
            fragment.pending = Pending(begun, Average.known(fragment.outer))
        if facts is not None:
            found = {each: saved.get(n, {}).get(KEY, {}) for each, n in numbers.items()}
            if fragment.pending is not None and any(_START in each for each in found.values()):
                fragment.pending.start = torch.empty_like(fragment.outer)
            _fill(fragment, found)
    return 0 if facts is None else int(facts["steps"])


def _flats(fragment: Fragment) -> dict[str, Tensor]:
    """Return what is saved of a fragment, by name."""
    flats = {_OUTER: fragment.outer, _MOMENTUM: fragment.momentum}
    if fragment.error is not None:
        flats[_ERROR] = fragment.error
    if fragment.pending is not None:
        flats[_MEAN] = fragment.pending.average.wait()
        if fragment.pending.start is not None:
            flats[_START] = fragment.pending.start
    return flats


@torch.no_grad()
def _fill(fragment: Fragment, saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    for name, flat in _flats(fragment).items():
        for fqn, view in fragment.views(flat).items():
            value = saved[fragment.parameters[fqn]].get(name)
            if value is None and name == _ERROR:
                continue  # saved without error feedback: nothing is known to be lost
            if not isinstance(value, Tensor):
                raise ValueError(f"{fqn}: the state dict has no tensor {KEY}.{name} for it")
            local = dtensor.plain(value)
            if local.shape != view.shape:
                raise ValueError(
                    f"{fqn}: {KEY}.{name} of the state dict has shape {tuple(local.shape)} on this "
                    f"rank, expected {tuple(view.shape)}, as its shard; shardwise.checkpoint.load "
                    "reshards what was saved on another mesh"
                )
            view.copy_(local)


def _per_fragment(facts: Mapping[str, Any], count: int) -> list[tuple[int, int, int | None]]:
    """Return ``rounds``, ``even_at`` and ``begun`` of each fragment."""
    found = list(zip(facts["rounds"], facts["even_at"], facts["begun"], strict=True))
    if len(found) == count:
        return found
    if any(begun is not None for _, _, begun in found):
        raise ValueError(
            f"fragments: the state dict has an exchange in progress among {len(found)} "
            f"fragments, found {count}; load it with as many, or call flush() before saving"
        )
    # With other fragments, each is as far as the one that is the least far.
    return [(min(facts["rounds"]), min(facts["even_at"]), None)] * count
