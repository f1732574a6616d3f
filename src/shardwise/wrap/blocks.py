"""The policy ``"auto"``: finding the repeated blocks of a model by its shape alone.

A *block* is one of several modules of a class that stand in one list: the layers of a transformer,
the bottlenecks of a ResNet. Three things are looked at:

- Blocks of blocks: where most parameters of a repeated module are in repeated modules of its own
  (a stage of a ResNet or of a Swin transformer, an encoder beside a decoder), those are the blocks.
- Experts are no blocks. Which of them run is decided by the data, and ranks would gather different
  ones.
- Plain layers (one ``nn.Linear`` or convolution, with its norm perhaps) count as blocks only in a
  model that has no others.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

#: Share of the parts of a repeated module that its own repeated modules are, if they are blocks.
_MOSTLY = 0.5


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of ``model``, in module order, none inside another; the model itself is none."""
    return list(_blocks_in(model, composite=True) or _blocks_in(model, composite=False))


def _blocks_in(module: nn.Module, *, composite: bool) -> dict[nn.Module, bool]:
    """The blocks in ``module``, and whether they stand in a list."""
    found: dict[nn.Module, bool] = {}
    members = dict(_members(module))
    for member, in_list in members.items():
        alike = sum(type(other) is type(member) for other in members)
        inner = _blocks_in(member, composite=composite)
        # Inside a layer, what repeats without a list is its attention to this and to that.
        own = [block for block, listed in inner.items() if listed or not in_list]
        is_block = (
            alike > 1
            and _can_be_block(member, in_list=in_list, composite=composite)
            and _numel(own) < _MOSTLY * _numel(_parts(member))
        )
        found.update({member: in_list} if is_block else inner)
    return found


def _members(module: nn.Module, in_list: bool | None = None) -> Iterator[tuple[nn.Module, bool]]:
    """The modules that stand side by side in ``module``, and whether they do so in a list.

    What lies in bare lists (which have no forward of their own) stands beside the list.
    """
    if in_list is None:
        in_list = isinstance(module, nn.Sequential) or is_bare(module)
    for name, child in module.named_children():
        if "expert" in name.lower():
            continue
        if is_bare(child):
            yield from _members(child, True)
        else:
            yield child, in_list


def _can_be_block(module: nn.Module, *, in_list: bool, composite: bool) -> bool:
    if type(module) is nn.Sequential and not in_list:
        return False  # the name of a part of the model, like layer1 and layer2 of a ResNet
    if composite:
        return _is_composite(module)
    return in_list and not _is_composite(module) and _numel([module]) > 0


def _parts(module: nn.Module) -> list[nn.Module]:
    """Its children that are more than a plain layer: embeddings of a decoder do not count."""
    return [child for child in module.children() if _is_composite(child)] or [module]


def _is_composite(module: nn.Module) -> bool:
    """Whether it is more than one layer, with its norm and its activation perhaps."""
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def is_bare(module: nn.Module) -> bool:
    """Whether it only holds modules: its class has no forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and (
        type(module).forward is nn.Module.forward
    )


def _numel(modules: list[nn.Module]) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters)
