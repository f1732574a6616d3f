"""The groups of an optimizer: settings by patterns of names, and which parameters Muon is for."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.arguments import check_arguments
from shardwise.base.optim_names import names_of_parameters

_PARAMS = "params"
_PARAM_NAMES = "param_names"
#: Settings that any optimizer needs to be numbers of 0 or more.
_NUMBERS = ("lr", "weight_decay")
#: Settings of groups that are no argument of an optimizer.
_OF_GROUPS = ("algorithm", "use_muon")

#: Names of the last layer in models that do not say which one it is.
_HEADS = re.compile(r"(^|\.)(lm_head|head|heads|output|classifier|score|unembed\w*)(\.|$)")
#: Names of parameters and modules whose rows are looked up, or added to what was looked up.
_EMBEDDINGS = re.compile(r"(^|\.)\w*(embed|token|position|wte|wpe)\w*(\.|$)")
#: Modules whose weights are no linear maps between hidden layers.
_OTHERS = (
    nn.Embedding,
    nn.EmbeddingBag,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def param_groups(
    model: nn.Module,
    rules: Mapping[str, Mapping[str, Any]],
    *,
    groups: Iterable[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Make the parameter groups of an optimizer, with settings by patterns of names.

    ::

        param_groups(model, {"*norm*": {"weight_decay": 0.0}, "embed*": {"lr": 1e-4}})

    Names are those of ``model.state_dict()``, without the prefixes of wrappers for compilation and
    activation checkpointing. A parameter that is tied has all its names. In a pattern, ``*`` stands
    for any characters, dots too, ``?`` for one, and ``[ab]`` for one of several. A whole name has
    to match, and case counts.

    Several patterns may match a parameter, as long as they do not contradict each other.

    Args:
        model: the model; after it was sharded, which replaces parameters.
        rules: settings by patterns, such as ``lr``, ``weight_decay`` or ``betas``: any argument of
            an optimizer of ``torch.optim`` or ``shardwise.optim``.
        groups: the groups that are divided further, such as those of
            :func:`shardwise.optim.muon_groups`; ``None``: one of all trained parameters.

    Returns:
        Groups of named parameters: of each group what no pattern matches, then one for each set of
        settings. Groups without parameters are left out.

    Raises:
        ValueError: a pattern matches no trained parameter; two patterns contradict each other; a
            setting does not exist, or has an impossible value; or a group has a parameter that the
            model does not have.
    """
    check_arguments(param_groups, locals())
    _check_rules(rules)
    names = names_of_parameters(model)
    if groups is None:
        groups = [{_PARAMS: [param for param in names if param.requires_grad]}]
    base = [{**group, _PARAMS: _parameters(group, names)} for group in groups]
    for group in base:
        group.pop(_PARAM_NAMES, None)  # of groups that an optimizer had
    matched = _matched(model, rules, names, base)
    found: list[dict[str, Any]] = []
    for group in base:
        parts: list[tuple[dict[str, Any], list[tuple[str, Tensor]]]] = [({}, [])]
        for param in group[_PARAMS]:
            own = {k: v for pattern in matched.get(param, ()) for k, v in rules[pattern].items()}
            named = next((named for settings, named in parts if settings == own), None)
            if named is None:
                parts.append((own, named := []))
            named.append((names[param][0], param))
        found += [{**group, **own, _PARAMS: named} for own, named in parts if named]
    return found


def _parameters(
    group: Mapping[str, Any], names: Mapping[Tensor, Sequence[str]]
) -> Sequence[Tensor]:
    """Return the parameters of a group, which may be named or a single one."""
    given = group[_PARAMS]
    given = [given] if isinstance(given, Tensor) else given
    params = [each[1] if isinstance(each, tuple) else each for each in given]
    for param in params:
        if param not in names:
            raise ValueError(
                f"param_groups: found a parameter of shape {list(param.shape)} in groups, which "
                "the model does not have; make the groups from the same model, after sharding it"
            )
    return params


def _matched(
    model: nn.Module,
    rules: Mapping[str, Mapping[str, Any]],
    names: Mapping[Tensor, Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[Tensor, tuple[str, ...]]:
    """Return the patterns that match each parameter of groups, in the order of the rules.

    Raises:
        ValueError: a pattern matches none; or two contradict each other.
    """
    mine = {param for group in groups for param in group[_PARAMS]}
    found: dict[Tensor, tuple[str, ...]] = {}
    for pattern in rules:
        params = [p for p, own in names.items() if any(fnmatchcase(n, pattern) for n in own)]
        trained = [param for param in params if param in mine]
        if not trained:
            raise ValueError(_matches_none(model, pattern, names, params))
        for param in trained:
            for other in found.get(param, ()):
                _check_agree(names[param][0], rules, other, pattern)
            found[param] = (*found.get(param, ()), pattern)
    return found


def _matches_none(
    model: nn.Module,
    pattern: str,
    names: Mapping[Tensor, Sequence[str]],
    others: Sequence[Tensor],
) -> str:
    """Return what to tell about a pattern that matches nothing that is trained."""
    kind = type(model).__name__
    if others:
        return (
            f"param_groups: pattern {pattern!r}: found that it matches only parameters that are "
            f"not trained, such as {names[others[0]][0]}, expected at least one that requires a "
            "gradient and is in the groups given"
        )
    every = [name for own in names.values() for name in own]
    near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.4) or every[:3]
    return (
        f"param_groups: pattern {pattern!r}: found no parameter of {kind} that it matches, "
        f"expected at least one of {len(every)}, such as {', '.join(near)}; a pattern has to match "
        "the whole name, so begin it with * to match names inside of other modules"
    )


def _check_agree(name: str, rules: Mapping[str, Mapping[str, Any]], one: str, other: str) -> None:
    for setting in rules[one].keys() & rules[other].keys():
        first, second = rules[one][setting], rules[other][setting]
        if first != second:
            raise ValueError(
                f"param_groups: {name}: found that both {one!r} and {other!r} match it, with "
                f"{setting} {first} and {second}, expected one value; make one of the patterns "
                "narrower"
            )


def _check_rules(rules: Mapping[str, Mapping[str, Any]]) -> None:
    for pattern, settings in rules.items():
        where = f"param_groups: pattern {pattern!r}"
        if not settings:
            raise ValueError(f"{where}: found no settings, expected at least one, such as lr")
        for name, value in settings.items():
            if name not in (known := _known_settings()):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise ValueError(
                    f"{where}: found the setting {name!r}, expected an argument of an optimizer of "
                    f"torch.optim or shardwise.optim, such as lr or weight_decay{hint} Settings of "
                    "other optimizers can be added to the groups that are returned"
                )
            if name in _NUMBERS and not _is_possible(value):
                raise ValueError(f"{where}: {name}: found {value!r}, expected a number, 0 or more")


def _is_possible(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and _is_possible(value.item())
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf  # type: ignore[operator]


@functools.cache
def _known_settings() -> frozenset[str]:
    """Return the arguments of all optimizers of torch and of ours."""
    from shardwise.optim.adafactor import Adafactor  # only settings need them all
    from shardwise.optim.adamw8bit import AdamW8bit
    from shardwise.optim.lion import Lion
    from shardwise.optim.muon import Muon

    theirs: list[Any] = [each for each in vars(torch.optim).values() if inspect.isclass(each)]
    optimizers = [each for each in theirs if issubclass(each, torch.optim.Optimizer)]
    optimizers += [Adafactor, AdamW8bit, Lion, Muon]
    found = {name for each in optimizers for name in inspect.signature(each).parameters}
    return frozenset(found - {_PARAMS, "defaults"}) | frozenset(_OF_GROUPS)


def muon_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    is_hidden: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[dict[str, Any]]:
    """Split the trained parameters of a model into groups for :class:`shardwise.optim.Muon`.

    Muon gets the matrices of hidden layers, and stacks of them; AdamW embeddings, the last layer,
    convolutions, and all vectors, those without weight decay. A parameter that is tied to an
    embedding is one.

    Args:
        model: the model, sharded or not.
        muon: settings of the group for Muon, such as ``{"lr": 0.02}``.
        adamw: settings of the groups for AdamW, such as ``{"lr": 3e-4, "betas": (0.9, 0.95)}``.
        is_hidden: decides for a parameter of two or more dimensions, by its name, in place of the
            rule above.

    Returns:
        At most three parameter groups, with the names of the parameters: those for Muon, for AdamW
        with weight decay, and for AdamW without. Groups without parameters are left out.

    Raises:
        ValueError: no parameter is trained.
    """
    check_arguments(muon_groups, locals())
    others = set(_not_hidden(model))
    hidden: list[tuple[str, nn.Parameter]] = []
    decayed: list[tuple[str, nn.Parameter]] = []
    vectors: list[tuple[str, nn.Parameter]] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if param.ndim < 2:
            vectors.append((name, param))
        elif param not in others if is_hidden is None else is_hidden(name, param):
            hidden.append((name, param))
        else:
            decayed.append((name, param))
    groups: list[dict[str, Any]] = [
        {"params": hidden, "algorithm": "muon", **(muon or {})},
        {"params": decayed, "algorithm": "adamw", **(adamw or {})},
        {"params": vectors, "algorithm": "adamw", **(adamw or {}), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(
            f"muon_groups: found no parameter of {type(model).__name__} that requires a gradient, "
            "expected at least one; unfreeze what is to be trained first"
        )
    return groups


def _not_hidden(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters of embeddings, of the last layer, and of convolutions."""
    heads = [getattr(model, f"get_{which}_embeddings", None) for which in ("input", "output")]
    ends = [found for found in (head() for head in heads if callable(head)) if found is not None]
    for name, module in model.named_modules():
        is_end = any(module is end for end in ends)
        for own, param in module.named_parameters(recurse=False):
            full = f"{name}.{own}".lstrip(".")
            if (
                is_end
                or isinstance(module, _OTHERS)
                or _EMBEDDINGS.search(full)
                or _HEADS.search(full)
            ):
                yield param
