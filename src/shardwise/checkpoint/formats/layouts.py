"""Where the model and the optimizer are in a checkpoint of ``torch.distributed.checkpoint``.

Programs save what they like under names of their own:

    model.0.weight, optimizer.state.0.weight.exp_avg            Accelerate, torchtune, ours
    net.0.weight, opt.state.0.weight.exp_avg                    Lightning Fabric: the user's names
    0.weight, optimizer.state.0.weight.exp_avg, train_state     torchtitan: the model at the top
    0.weight                                                    a state dict alone
    state.model.0.weight, state.optimizers.AdamW.state...       Composer
    app.model.0.weight, app.optim.state...                      torch's recipe, one object

An optimizer is known by its ``state`` and ``param_groups``, and the model by the names of the
parameters that the optimizer has state of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.checkpoint.disk.entries import StatePath, dotted

_OPTIMIZERS = frozenset({"optimizer", "optimizers", "optim"})
_PARTS = ("state", "param_groups")
#: What trainers save beside a model, and which is none.
_BESIDE = frozenset({"dataloader", "extra", "lr_scheduler", "rng", "scheduler", "train_state"})


def sections(paths: Sequence[StatePath], tensors: frozenset[StatePath]) -> list[StatePath]:
    """Change paths so that they begin with ``model``, ``optimizer`` or ``extra``.

    Args:
        paths: the paths of everything in the checkpoint.
        tensors: those that are tensors.

    Returns:
        A path for each. States of an optimizer that were saved under one flat name have the name of
        the parameter and that of the state as two keys; :func:`flat_groups` finds the settings.
    """
    outer = _outer(paths)
    inner = [path[1:] if path[0] == outer else path for path in paths]
    named = {path for path, old in zip(inner, paths, strict=True) if old in tensors}
    if {path[0] for path in inner} == set(_PARTS):  # an optimizer's state dict alone
        return [_optimizer_path(path) for path in inner]
    optimizers = _optimizer_keys(inner)
    within = {path[1] for path in inner if path[0] in optimizers and _is_named(path)}
    alone = optimizers if len(within) < 2 else []  # else one of each class, or each parameter
    of_them = [_optimizer_path(_below(path)) for path in inner if path[0] in optimizers]
    trained = {str(path[2]) for path in of_them if len(path) > 2}
    is_model = _model([path for path in inner if path[0] not in optimizers], named, trained)
    found = []
    for path, old in zip(inner, paths, strict=True):
        if outer is not None and old[0] != outer:
            found.append(("extra", *old))
        elif [path[0]] == alone and len(path) > 1:
            found.append(_optimizer_path(_below(path)))
        else:
            found.append(is_model(path) or _extra(path))
    return found


def _extra(path: StatePath) -> StatePath:
    return path if len(path) > 1 and path[0] == "extra" else ("extra", *path)


def _outer(paths: Sequence[StatePath]) -> str | int | None:
    """The name under which one object saved model and optimizer; ``None`` if there is none."""
    first = {path[0] for path in paths}
    if "model" in first or first & _OPTIMIZERS:
        return None
    found = {path[0] for path in paths if len(path) > 2 and path[1] == "model"}
    return found.pop() if len(found) == 1 else None


def _optimizer_keys(paths: Iterable[StatePath]) -> list[str | int]:
    """The keys that optimizers are under: those named so, or else those that look like one."""
    inside: dict[str | int, set[str]] = {}
    for path in paths:
        inside.setdefault(path[0], set()).add(str(path[1]).partition(".")[0] if path[1:] else "")
    named: list[str | int] = [key for key in inside if key in _OPTIMIZERS]
    if named:
        return named
    return [key for key, parts in inside.items() if "param_groups" in parts <= set(_PARTS)]


def _below(path: StatePath) -> StatePath:
    """The path inside an optimizer, without the name of its class if that is there."""
    return path[2:] if _is_named(path) else path[1:]


def _is_named(path: StatePath) -> bool:
    """Whether a path has a name between the key of the optimizers and the parts of one of them."""
    return len(path) > 3 and path[2] in _PARTS and path[1] not in _PARTS


def _optimizer_path(path: StatePath) -> StatePath:
    """Take apart the name of a state that was saved flat: ``state.0.weight.exp_avg``."""
    part, dot, rest = str(path[0]).partition(".") if path else ("", "", "")
    if len(path) == 1 and dot and part in _PARTS and "." in rest:
        name, _, key = rest.rpartition(".")
        return ("optimizer", part, name, key)
    return ("optimizer", *path)


def _model(
    paths: Sequence[StatePath], tensors: set[StatePath], trained: set[str]
) -> Callable[[StatePath], StatePath | None]:
    """Find the model.

    Args:
        paths: the paths that are not the optimizer's.
        tensors: those that are tensors, and others.
        trained: names of parameters that the optimizer has state of.

    Returns:
        A function from a path to that in the model; ``None`` for what is not of the model.
    """
    names: dict[Any, set[str]] = {}  # of tensors, by the key that they are under
    for path in paths:
        if path in tensors:
            key = path[0] if len(path) > 1 and not _is_extra_state(path[0]) else None
            names.setdefault(key, set()).add(dotted(path if key is None else path[1:]))
    if any(len(path) > 1 and path[0] == "model" for path in paths):
        chosen: Any = "model"
    else:
        likely = {key: len(each & trained) for key, each in names.items() if key not in _BESIDE}
        best = max(likely.values(), default=0)
        found = [key for key, count in likely.items() if count == best]
        chosen = None if None in found or len(found) != 1 else found[0]

    def inside(path: StatePath) -> StatePath | None:
        if chosen is not None:
            return ("model", *path[1:]) if path[0] == chosen and len(path) > 1 else None
        alone = path in tensors and len(path) == 1
        return ("model", *path) if alone or _is_extra_state(path[0]) else None

    return inside


def _is_extra_state(key: Any) -> bool:
    """Whether a top-level name is that of a module's extra state, which may be any tree."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def flat_groups(paths: Iterable[StatePath]) -> dict[str, dict[str, StatePath]]:
    """The settings that were saved for each parameter: their paths, by parameter and setting."""
    found: dict[str, dict[str, StatePath]] = {}
    for path in paths:
        if path[:2] == ("optimizer", "param_groups") and len(path) == 4:
            name, key = path[2:]
            if isinstance(name, str):
                found.setdefault(name, {})[str(key)] = path
    return found


def grouped(settings: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Parameter groups of settings by parameter: those with equal ones are one group."""
    groups: dict[str, dict[str, Any]] = {}
    for name, each in settings:
        group = groups.setdefault(repr(sorted(each.items())), {**each, "params": []})
        group["params"].append(name)
    yield from groups.values()
