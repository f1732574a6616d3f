"""Whether a model, its optimizer and a group of replicas belong together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.diloco.fragment import Fragment


def trained_parameters(model: nn.Module, inner: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer moves, by fully qualified name, in the model's order.

    Raises:
        ValueError: one is none of the model's.
    """
    held = {id(each) for group in inner.param_groups for each in group["params"]}
    found = {fqn: each for fqn, each in model.named_parameters() if id(each) in held}
    if len(found) < len(held):
        known = {id(each) for each in found.values()}
        place, missing = next(
            ((i, j), each)
            for i, group in enumerate(inner.param_groups)
            for j, each in enumerate(group["params"])
            if id(each) not in known
        )
        raise ValueError(
            f"inner optimizer: parameter {place[1]} of group {place[0]}, of shape "
            f"{list(missing.shape)}, is no parameter of the model; make the optimizer after "
            "sharding the model, and DiLoCo after the optimizer"
        )
    if not found:
        raise ValueError("inner optimizer: found no parameters, expected those of the model")
    return found


def checked_group(
    group: dist.ProcessGroup | DeviceMesh | None, fragments: list[Fragment]
) -> dist.ProcessGroup | None:
    """The process group of the replicas.

    Raises:
        ValueError: a mesh of several dimensions, or ranks that share a parameter of one replica.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: found a mesh of {group.ndim} dimensions {group.mesh_dim_names}, expected "
                'the one that replicates, such as mesh["replicate"]'
            )
        group = group.get_group()
    if group is None:
        return None
    ranks = set(dist.get_process_group_ranks(group))
    me = dist.get_rank()
    for fragment in fragments:
        for fqn, parameter in fragment.parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            shared = ranks & set(parameter.device_mesh.mesh.flatten().tolist())
            if shared - {me}:
                raise ValueError(
                    f"group: rank {me} found ranks {sorted(ranks)}, expected one rank of each "
                    f"replica; but {fqn} is sharded over ranks {sorted(shared)} of them. Shard the "
                    'model over mesh["shard"] only, and pass group=mesh["replicate"]'
                )
    return group
