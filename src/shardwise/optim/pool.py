"""Ranks that share the work of an optimizer: those of the mesh that parameters are sharded over."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base.errors import RanksDivergedError
from shardwise.base.units import listed
from shardwise.sharding.part import Part, placed
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label
from shardwise.transport.peers import Peers, new_group
from shardwise.transport.select import all_to_all

#: What a rank reports in place of a number if it has failed.
_FAILED = 2**32

_Key = tuple[DeviceMesh, torch.device]


@dataclass(frozen=True)
class RankPool:
    """The ranks of a mesh, whatever its shape.

    Attributes:
        members: the ranks, as ranks of the default group, ascending.
        all_to_all: moves tensors between them.
    """

    members: tuple[int, ...]
    all_to_all: AllToAll

    @classmethod
    def over(cls, mesh: DeviceMesh, device: torch.device) -> RankPool:
        """Return the pool of a mesh. All ranks of the mesh call it.

        Args:
            mesh: a mesh that this rank is part of.
            device: the device of what is moved.

        Raises:
            PeerLostError: a rank is lost while a process group is made.
        """
        group = group_over(mesh)
        return cls(tuple(Peers(group).members), all_to_all(group, device))

    @property
    def rank(self) -> int:
        """This process's rank in the pool."""
        return self.all_to_all.rank

    def agree(self, names: Sequence[str], doing: str, error: Exception | None = None) -> None:
        """Check that all ranks are about to work on the same tensors. All ranks call it.

        Args:
            names: of the tensors, in order.
            doing: what is done with them, such as ``"the step of Muon"``.
            error: what this rank raises after this call, which others have to know.

        Raises:
            RanksDivergedError: another rank has other tensors, or has failed.
            PeerLostError: a rank is lost.
        """
        mine = _FAILED if error is not None else zlib.crc32("\n".join(names).encode())
        found = self.all_to_all.exchange_numbers(mine, Label(f"{doing}: which tensors it is for"))
        failed = [self.members[rank] for rank, number in enumerate(found) if number == _FAILED]
        if failed and error is None:
            raise RanksDivergedError(
                f"{doing} on rank {self.members[self.rank]}: rank {failed[0]} raised an error "
                "before it, which is in that rank's own output. Nothing was changed on any rank"
            )
        if failed or len(set(found)) == 1:
            return
        everybody = Peers(self.all_to_all.group).gather_objects(
            list(names), f"{doing}: a difference"
        )
        other = next(rank for rank, theirs in enumerate(everybody) if theirs != list(names))
        theirs = everybody[other]
        only = [name for name in names if name not in theirs]
        extra = [name for name in theirs if name not in names]
        me, them = self.members[self.rank], self.members[other]
        raise RanksDivergedError(
            f"{doing}: ranks have gradients of different parameters: {_some(only)} on rank {me} "
            f"only, {_some(extra)} on rank {them} only. All ranks have to work on the same ones, "
            "as backward leaves them: set and clear gradients alike. Nothing was changed on any "
            "rank"
        )


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh, whatever its shape, in its order."""
    with dtensor.real_tensors():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def parts_of(param: torch.Tensor) -> dict[int, Part]:
    """Return the part of a sharded parameter that each rank of its pool holds."""
    spec = dtensor.spec_of(param)
    ranks = ranks_of(spec.mesh)
    members = sorted(ranks)
    coordinates = itertools.product(*(range(size) for size in spec.mesh.shape))
    return {
        members.index(rank): placed(param.shape, spec.placements, spec.mesh.shape, at)
        for rank, at in zip(ranks, coordinates, strict=True)
    }


class Pools:
    """The pools that the parameters of an optimizer have, made when they are needed."""

    def __init__(self) -> None:
        self._made: dict[_Key, RankPool] = {}

    def of(self, param: torch.Tensor) -> RankPool | None:
        """Return the pool of a parameter that ranks have agreed on; ``None``: this rank is alone.

        Args:
            param: one of those that :meth:`agree` was last called with, or before.
        """
        key = _key(param)
        return None if key is None else self._made[key]

    def agree(
        self,
        params: Iterable[torch.Tensor],
        named: Sequence[tuple[str, torch.Tensor]],
        doing: str,
        error: Exception | None = None,
    ) -> None:
        """Check that all ranks are about to work on the same parameters. All ranks call it.

        The pools of all parameters are asked, whether this rank works on one of theirs or not:
        another rank may do so. And all are asked before anything is raised: their other ranks wait
        to be.

        Args:
            params: all parameters that ranks may work on, the same on every rank.
            named: those that this rank is about to work on, by name, in order.
            doing: what is done with them, such as ``"the step of Muon"``.
            error: what this rank raises, after the others know of it.

        Raises:
            RanksDivergedError: another rank has other parameters, or has failed.
            PeerLostError: a rank is lost.
            Exception: ``error``.
        """
        keys = dict.fromkeys(key for key in map(_key, params) if key is not None)
        for key in keys:
            if key not in self._made:
                self._made[key] = RankPool.over(*key)
        differs: RanksDivergedError | None = None
        for key in keys:
            names = [name for name, param in named if _key(param) == key]
            try:
                self._made[key].agree(names, doing, error)
            except RanksDivergedError as raised:
                differs = raised
        if (failure := error or differs) is not None:
            raise failure


def _key(param: torch.Tensor) -> _Key | None:
    """Return what the pool of a parameter depends on; ``None`` if this rank is alone."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return None
    return param.device_mesh, dtensor.local_of(param).device


def _some(names: Sequence[str]) -> str:
    return listed(names) or "none"


def group_over(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    members = tuple(sorted(ranks_of(mesh)))
    world = Peers()
    if len(members) == world.size:
        group = world.group
    else:
        made = world.once(_groups)
        if members not in made:
            made[members] = new_group(members)
        group = made[members]
    Peers(group).name_dimension(" x ".join(mesh.mesh_dim_names or ()))
    return group


def _groups(world: Peers) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Keep process groups over the ranks of meshes, by these ranks."""
    return {}
