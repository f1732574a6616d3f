"""``relayout``: another mesh or strategy for a model in the middle of its training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Shard

from shardwise._torch import autograd
from shardwise.base.errors import MisuseError
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.moving import Training, move
from shardwise.frontends import device_mesh
from shardwise.frontends.fsdp import FullyShardedDataParallel
from shardwise.frontends.settings import find_mesh
from shardwise.frontends.strategies import Strategy
from shardwise.sharding import states
from shardwise.sharding.full_params import PostForwardShards
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.placement import Place
from shardwise.sharding.state import groups_of, states_of
from shardwise.transport.select import ChannelOptions

_DOING = "relayout"


def relayout(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | Strategy | ShardingStrategy | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Shard a model over other ranks, or in another way, in the middle of its training.

    Every rank of both layouts calls this between two steps. Parameters stay the same objects, so
    the optimizer, schedulers and hooks stay valid. Values, optimizer states included, are bit for
    bit those that a checkpoint would bring into the new layout. Tensors move one after the other,
    and a rank's old rows are freed as they leave.

    - Ranks that join have called ``fully_shard`` on the same model, on the meta device or with
      memory, over ranks that include them; their values are replaced.
    - Ranks that leave hold nothing afterwards: the model is on the meta device. They may join
      again.
    - Another degree of tensor parallelism changes the modules, too. Build another model, and move
      the state into it with :func:`shardwise.checkpoint.transfer`.

    If it raises before anything has moved, nothing has changed. If a rank fails or is lost later,
    load a checkpoint.

    Args:
        model: the model that ``fully_shard`` was applied to, all of it over one mesh.
        optimizer: an optimizer of its parameters: torch's, one of :mod:`shardwise.optim`, or one
            around those (``offload``, ``in_backward``).
        mesh: as for ``fully_shard``. The default is all ranks.
        strategy: ``"full"``, ``"grad-op"``, ``"no-shard"``, ``"hybrid"`` or ``"hybrid-zero2"``, or
            torch's ``ShardingStrategy``. By default, parameters are freed after forward, or not, as
            before.
        group: all ranks that hold or will hold the model; the default process group if ``None``.

    Raises:
        CheckpointError: a rank cannot do its part; the message names it and says why. Raised on
            every rank alike.
    """
    layout = _Layout.of(model, mesh, strategy)
    ranks = Ranks(group_for(group))
    claims = ranks.together(_DOING, lambda: _claim(model, layout.mesh), _all_claims)
    own: Training = (model, optimizer)
    move(
        own if dist.get_rank() in _holders(claims) else None,
        lambda: layout.apply(own),
        doing=_DOING,
        group=group,
    )


@dataclass
class _Layout:
    """The layout that a model will have.

    Attributes:
        mesh: the mesh.
        strategy: the strategy; ``None`` to keep when parameters are freed.
        meshes: for each mesh that groups are sharded over, the one that takes its place; none on a
            rank that leaves.
        places: where each parameter will be.
        smaller: the meshes of groups that keep parameters sharded between forward and backward.
    """

    mesh: DeviceMesh
    strategy: Strategy | None
    meshes: dict[DataMesh, DataMesh] = field(default_factory=dict)
    places: dict[ShardedParam, Place] = field(default_factory=dict)
    smaller: dict[ParamGroup, DataMesh] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        mesh: DeviceMesh | None,
        strategy: str | Strategy | ShardingStrategy | None,
    ) -> _Layout:
        """Check what the user asks for, and make what it needs, without changing the model.

        Raises:
            ValueError: there are no such ranks, or no such strategy.
            NotImplementedError: the model is sharded in a way that can only be built anew.
        """
        groups = list(groups_of(model))
        if not groups:
            raise ValueError(
                f"{_DOING}: found a {type(model).__name__} without groups, expected a module that "
                "fully_shard was applied to"
            )
        named = None if strategy is None else _named(strategy)
        if mesh is None or (named is not None and mesh.get_coordinate() is not None):
            device = groups[0].mesh.device
            mesh = find_mesh(named or Strategy.FULL_SHARD, None, mesh, torch.device(device.type))
        made = cls(mesh, named)
        if mesh.get_coordinate() is None:
            return made
        device_mesh.check(mesh, None, _DOING)
        for group in groups:
            _check_movable(group)
            if group.mesh not in made.meshes:
                made.meshes[group.mesh] = _like(group.mesh, mesh)
            its_mesh = made.meshes[group.mesh]
            for form in (param.form for param in group.params):
                meta = form.empty_full(torch.device("meta"))
                wanted = None if form.layout.dim is None else Shard(form.layout.dim)
                made.places[form] = Place.of(meta, form.fqn, its_mesh, wanted)
            if group.post_forward is not None and named is None:
                made.smaller[group] = _smaller(group, its_mesh)
        return made

    def apply(self, training: Training) -> Training | None:
        """Give all parameters their new places, without memory; ``None`` on a rank that leaves."""
        model, _ = training
        for form, place in self.places.items():
            form.take_place(place)
        outermost = next(states_of(model))
        for state in states_of(model):
            for group in state.groups:
                group.change_mesh(self.meshes.get(group.mesh, group.mesh))
                if self.places:
                    group.post_forward = None
                if group in self.smaller:
                    group.post_forward = PostForwardShards(group.params, self.smaller[group])
            if self.strategy is not None:
                frees = self.strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)
                state.set_reshard_after_forward(frees and state is not outermost)
        for unit in model.modules():
            if isinstance(unit, FullyShardedDataParallel):
                unit.settings = replace(unit.settings, mesh=self.mesh)
                if self.strategy is not None:
                    strategy = ShardingStrategy[self.strategy.name]
                    unit.settings = replace(unit.settings, strategy=strategy)
        return training if self.places else None


def _named(strategy: str | Strategy | ShardingStrategy) -> Strategy:
    if isinstance(strategy, ShardingStrategy):
        return Strategy.of(strategy)
    possible = [each.value for each in Strategy if each not in (Strategy.ZERO1, Strategy.DILOCO)]
    value = strategy.value if isinstance(strategy, Strategy) else strategy
    if value not in possible:
        raise ValueError(f"{_DOING}: found strategy {value!r}, expected one of {possible}")
    return Strategy(value)


def _check_movable(group: ParamGroup) -> None:
    """Check that a group can be sharded over another mesh in place.

    Raises:
        NotImplementedError: it cannot.
    """
    mesh = group.mesh
    found = ""
    if mesh.outer is not None:
        found = "dp_mesh_dims"
    elif group.agree is not None:
        found = 'order="own"'
    elif mesh.options != ChannelOptions(mesh.requested, mesh.options.wire):
        found = "a custom all-gather or reduce-scatter"
    if found:
        raise NotImplementedError(
            f"{_DOING}: group {group.label.name!r} on rank {dist.get_rank()} has {found}, which "
            "belongs to its mesh; shard another model, and move the state into it with "
            "shardwise.checkpoint.transfer"
        )


def _like(before: DataMesh, mesh: DeviceMesh) -> DataMesh:
    """The mesh with transports of the same kind as before."""
    made = DataMesh.of(mesh, before.requested, what=_DOING, wires=before.wires)
    separate = before.scatter_group is not None
    return made.with_scatter_group(made.separate_group()) if separate else made


def _smaller(group: ParamGroup, mesh: DataMesh) -> DataMesh:
    """The mesh over which a group keeps parameters sharded between forward and backward."""
    assert group.post_forward is not None
    size = group.post_forward.transport.world_size
    if mesh.shard.world_size % size:
        raise ValueError(
            f"{_DOING}: group {group.label.name!r} on rank {dist.get_rank()} keeps parameters over "
            f"{size} ranks after forward (reshard_after_forward={size}), expected a factor of the "
            f"{mesh.shard.world_size} ranks of {mesh.mesh}; pass a strategy, or another mesh"
        )
    return mesh.of_groups_of(size)


@dataclass(frozen=True)
class _Claim:
    """What a rank says before anything moves.

    Attributes:
        ranks: those that hold the model, as far as it knows; none if it holds nothing.
        wanted: the mesh that it was asked for.
    """

    ranks: frozenset[int]
    wanted: list[Any]


def _claim(model: nn.Module, mesh: DeviceMesh) -> _Claim:
    """Check that the model is between two steps, and say who holds it.

    Raises:
        MisuseError: there are gradients, or a forward or backward is under way.
    """
    held: set[int] = set()
    for group in groups_of(model):
        grads = [param.fqn for param in group.params if param.sharded.grad is not None]
        if grads or group.has_waiting_grads or group.phase is not states.IDLE:
            raise MisuseError(
                f"{_DOING}: group {group.label.name!r} has gradients, or runs its forward or "
                f"backward ({', '.join(grads[:3]) or group.phase.value}), expected a model between "
                "two steps; step, and call optimizer.zero_grad()"
            )
        group.reshard()
        for form in (param.form for param in group.params):
            param = form.parameter
            if not form.local.is_meta:
                held.update(form.spec.mesh.mesh.flatten().tolist())
            moves = form.local.is_meta or mesh.get_coordinate() is None
            if moves and (autograd.has_post_accumulate_hooks(param) or autograd.grad_hooks(param)):
                raise MisuseError(
                    f"{_DOING}: {form.fqn} has hooks, which it loses when it moves from or to the "
                    "meta device; expected none on a rank that joins or leaves"
                )
    return _Claim(frozenset(held), mesh.mesh.tolist())


def _all_claims(claims: list[_Claim]) -> list[list[_Claim]]:
    """Check that all ranks were asked for the same mesh."""
    for rank, each in enumerate(claims):
        if each.wanted != claims[0].wanted:
            raise ValueError(
                f"found mesh {claims[0].wanted} on the first rank and {each.wanted} on rank {rank} "
                "of the group, expected the same"
            )
    return [claims] * len(claims)


def _holders(claims: list[_Claim]) -> frozenset[int]:
    """The ranks that hold the model: the set of ranks that all of its members name.

    A rank that joins may hold values, too, but over a mesh of which others know nothing.

    Raises:
        ValueError: there is none, or there are two, so two models may be trained here.
    """
    names: dict[frozenset[int], int] = {}
    for claim in claims:
        names[claim.ranks] = names.get(claim.ranks, 0) + 1
    found = [ranks for ranks, number in names.items() if ranks and number == len(ranks)]
    if len(found) != 1:
        raise ValueError(
            f"{_DOING}: found the model held by ranks {[sorted(each) for each in names]}, expected "
            "one set that all of its ranks know; ranks that join shard the model over the new mesh "
            "or on the meta device"
        )
    return found[0]
