"""A model to report on or to plan for: without memory, and with the ways it is to be sharded.

Every rank of a training can make one, so it stands apart from what reads layouts and draws them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwise._torch import fsdp
from shardwise.frontends.strategies import MeshError, WantedMesh


@dataclass(frozen=True)
class Blueprint:
    """A model without memory, and how to shard it.

    Attributes:
        name: what reports call the model.
        model: the model, on the meta device. It is not modified.
        blocks: the modules that become groups of their own; the rest of the model is one group.
        tensor_parallel: torch's parallel styles by module name, for a mesh with a ``tp`` dimension.
        heads: numbers that the size of ``tp`` has to divide, by what they count.
        placement: the ``shard_placement_fn`` of ``fully_shard``; ``None`` for its default.
        recomputed: the modules whose activations may be recomputed; ``None``: the blocks.
    """

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    tensor_parallel: Mapping[str, ParallelStyle] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    placement: Callable[[nn.Parameter], Shard | None] | None = None
    recomputed: Sequence[nn.Module] | None = None

    def check_mesh(self, mesh: WantedMesh) -> None:
        """Check that tensor parallelism divides the model.

        Raises:
            MeshError: it does not.
        """
        size = mesh.tensor_parallel
        for what, count in self.heads.items():
            if count % size:
                raise MeshError(str(mesh), f"a tp that divides the {count} {what}")
        if size > 1 and not self.tensor_parallel:
            found = f"{mesh} for {self.name}, which has no tensor parallel plan"
            raise MeshError(found, "data parallel dimensions only")

    def copied(self) -> Blueprint:
        """The same of a copy of the model, on the meta device wherever the model is itself."""
        copies: dict[int, Any] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not tensor.is_meta:
                without = tensor.detach().to("meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = (
                    nn.Parameter(without, tensor.requires_grad) if is_parameter else without
                )
        model = copy.deepcopy(self.model, copies)
        recomputed = self.recomputed
        return replace(
            self,
            model=model,
            blocks=[copies[id(each)] for each in self.blocks],
            recomputed=None if recomputed is None else [copies[id(each)] for each in recomputed],
        )


def apply_tensor_parallelism(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]
) -> None:
    """Apply the styles, and keep tied parameters tied."""
    owners: dict[nn.Parameter, list[fsdp.ParamOwner]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append(fsdp.ParamOwner(module, name))
    parallelize_module(model, mesh, dict(styles))
    for first, *others in owners.values():
        for other in others:
            other.register(first.registered)
