"""Whole tensors of the parts that ranks hold: many of them in one exchange.

``DTensor.full_tensor()`` is a collective per tensor, which takes longer than the training that a
test looks at. Here every rank notes what it holds and where that lies, and all notes travel at
once. Where a part must lie is torch's word, from the mesh and the placements.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten

from tests import packing


def in_full(tensor: Tensor) -> Tensor:
    """All of a ``DTensor``, by a collective; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a ``DTensor``, in the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor: a copy.

    Attributes:
        values: this rank's elements.
        offset: where the first of them lies in the whole, by dimension.
        shape: of the whole.
    """

    values: Tensor
    offset: tuple[int, ...]
    shape: torch.Size


def part_of(tensor: Tensor | None) -> Any:
    """Copy what this rank holds: a :class:`Part` of a ``DTensor``, else the tensor or ``None``."""
    if not isinstance(tensor, DTensor):
        return None if tensor is None else tensor.detach().to("cpu", copy=True)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    values = tensor.to_local().detach().to("cpu", copy=True)
    assert values.shape == shape, f"holds {tuple(values.shape)} where {shape} are its part"
    return Part(values, tuple(offset), tensor.shape)


def gather(tree: Any) -> Any:
    """Make every :class:`Part` in nested lists and dictionaries whole.

    All ranks of the world call it, and all get the whole tensors. Ranks whose trees have another
    structure, such as those of another stage of a pipeline, have no part of them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return join([tree])
    packed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(packed, packing.dumps(tree))
    structure = tree_structure(tree)
    others = [pickle.loads(each) for i, each in enumerate(packed) if i != dist.get_rank()]
    return join([tree, *(each for each in others if tree_structure(each) == structure)])


def wholes(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Gather tensors: every ``DTensor`` whole, and copies of others."""
    found: list[Any] = gather([part_of(tensor) for tensor in tensors])
    return found


def join(trees: Sequence[Any]) -> Any:
    """Put the trees of all ranks together, in any order: what is no part is the first one's."""
    leaves, structure = tree_flatten(trees[0])
    others = [tree_flatten(tree)[0] for tree in trees[1:]]
    whole = [
        _join_parts([leaf, *same]) if isinstance(leaf, Part) else leaf
        for leaf, *same in zip(leaves, *others, strict=True)
    ]
    return tree_unflatten(whole, structure)


def _join_parts(parts: Sequence[Part]) -> Tensor:
    """Put parts together; together they are the whole, and replicas agree to the last bit."""
    first = parts[0]
    whole = torch.zeros(first.shape, dtype=first.values.dtype)
    is_there = torch.zeros(first.shape, dtype=torch.bool)
    for part in parts:
        assert part.shape == first.shape, f"parts of {first.shape} and of {part.shape}"
        place = tuple(
            slice(start, start + length)
            for start, length in zip(part.offset, part.values.shape, strict=True)
        )
        replica = whole[place][is_there[place]]
        assert torch.equal(replica, part.values[is_there[place]]), "replicas differ"
        whole[place], is_there[place] = part.values, True
    assert is_there.all(), "no rank holds some of the elements"
    return whole


def parts_of_parameters(model: nn.Module) -> dict[str, Any]:
    """What this rank holds of every parameter, by name."""
    return {name: part_of(parameter) for name, parameter in model.named_parameters()}


def parts_of_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """What this rank holds of every parameter's optimizer state, by name and key."""
    return {
        name: {key: part_of(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Gather every parameter, by name."""
    parameters: dict[str, Tensor] = gather(parts_of_parameters(model))
    return parameters


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Gather the optimizer's state, by name and key."""
    state: dict[str, dict[str, Tensor]] = gather(parts_of_optimizer_state(model, optimizer))
    return state
