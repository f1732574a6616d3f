"""``relayout``: another mesh or strategy for a model in the middle of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Shard

from shardwise._torch import autograd, dtensor
from shardwise.base.arguments import check_arguments
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.moving import Training, check_between_steps, move
from shardwise.frontends import device_mesh
from shardwise.frontends.fsdp import FullyShardedDataParallel
from shardwise.frontends.settings import find_mesh
from shardwise.frontends.strategies import Strategy
from shardwise.sharding.full_params import PostForwardShards
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.placement import Place, can_shard
from shardwise.sharding.state import groups_of, states_of
from shardwise.transport.select import ChannelOptions

_DOING = "relayout"
_FREE_AFTER_FORWARD = (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)


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

    - Ranks that join have called ``fully_shard`` on the same model, on the meta device, over a mesh
      of any of them. Buffers that no state dict has, and ignored parameters, need memory there.
    - Ranks that leave hold no shards afterwards: their parameters are on the meta device, and the
      optimizer has no states. They may join again.
    - With tensor parallelism, pass the data parallel part of a mesh that has the same tensor
      parallel ranks, or the whole mesh on ranks that leave. Another degree changes the modules,
      too: build another model, and move the state into it with
      :func:`shardwise.checkpoint.transfer`.

    If it raises, the training is as it was, after Ctrl-C or without memory, too: rows that have
    moved go back. Only if a rank is lost, or fails again meanwhile, what uses the model raises an
    error: build it again, and load a checkpoint.

    Args:
        model: the model that ``fully_shard`` was applied to, all of it over one mesh.
        optimizer: an optimizer of its parameters: torch's, one of :mod:`shardwise.optim`, or one
            around those (``offload``, ``in_backward``). One that has states and is not passed is
            refused at its next step.
        mesh: as for ``fully_shard``. The default is all ranks of ``group``.
        strategy: ``"full"``, ``"grad-op"``, ``"no-shard"``, ``"hybrid"`` or ``"hybrid-zero2"``, or
            torch's ``ShardingStrategy``. By default, parameters are freed after forward, or not, as
            before.
        group: all ranks that hold or will hold the model; the default process group if ``None``.

    Raises:
        CheckpointError: a rank cannot do its part; the message names it and says why. Raised on
            every rank alike.
    """
    given = locals()
    ranks = Ranks(group_for(group))
    own: Training = (model, optimizer)
    with autograd.no_grad():
        claims = ranks.agree(_DOING, lambda: _claim(given), _all_claims)
        layout = ranks.all(_DOING, lambda: _TargetLayout.of(model, mesh, strategy, group))
        move(
            own if dist.get_rank() in _holders(claims) else None,
            own if layout.places else None,
            begin=layout.apply,
            undo=layout.undo,
            doing=_DOING,
            group=group,
        )


@dataclass
class _TargetLayout:
    """The layout that a model will have.

    Attributes:
        model: the model.
        mesh: the mesh.
        strategy: the strategy; ``None`` to keep when parameters are freed.
        meshes: for each mesh that groups are sharded over, the one that takes its place; none on a
            rank that leaves.
        places: where each parameter will be.
        smaller: the meshes of groups that keep parameters sharded between forward and backward.
        before: what gives the model the layout that it has had.
    """

    model: nn.Module
    mesh: DeviceMesh
    strategy: Strategy | None
    meshes: dict[DataMesh, DataMesh] = field(default_factory=dict)
    places: dict[ShardedParam, Place] = field(default_factory=dict)
    smaller: dict[ParamGroup, DataMesh] = field(default_factory=dict)
    before: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        mesh: DeviceMesh | None,
        strategy: str | Strategy | ShardingStrategy | None,
        group: dist.ProcessGroup | None,
    ) -> _TargetLayout:
        """Make what is needed, with the other ranks of the mesh, without changing the model.

        Raises:
            ValueError: the mesh does not fit the strategy or the model.
        """
        groups = list(groups_of(model))
        named = None if strategy is None else _named(strategy)
        if mesh is None or (named is not None and mesh.get_coordinate() is not None):
            given = None if mesh is not None else group
            device = torch.device(groups[0].mesh.device.type)
            mesh = find_mesh(named or Strategy.FULL_SHARD, given, mesh, device)
        made = cls(model, mesh, named)
        if mesh.get_coordinate() is None:
            return made
        device_mesh.check(mesh, None, _DOING)
        for each in groups:
            if each.mesh not in made.meshes:
                made.meshes[each.mesh] = _like(each.mesh, mesh)
            its_mesh = made.meshes[each.mesh]
            for form in (param.form for param in each.params):
                full, dim = _full(form, mesh), form.layout.dim
                can_stay = dim is not None and can_shard(full, its_mesh, dim)
                wanted = Shard(dim) if dim is not None and can_stay else None
                made.places[form] = Place.of(full, form.fqn, its_mesh, wanted)
            if each.post_forward is not None and named is None:
                made.smaller[each] = _smaller(each, its_mesh)
        return made

    def apply(self) -> None:
        """Give all parameters their new places, without memory."""
        self.before = _restorers(self.model)
        for form, place in self.places.items():
            form.take_place(place)
        for state in states_of(self.model):
            for group in state.groups:
                group.change_mesh(self.meshes.get(group.mesh, group.mesh))
                if self.places:
                    group.post_forward = None
                if group in self.smaller:
                    group.post_forward = PostForwardShards(group.params, self.smaller[group])
            if self.strategy is not None:
                frees = self.strategy in _FREE_AFTER_FORWARD
                state.set_reshard_after_forward(frees and not state.is_root)
                state.keeps_if_root = frees
        for unit in self.model.modules():
            if isinstance(unit, FullyShardedDataParallel):
                now = self.strategy or _like_before(unit.settings.strategy, self.mesh)
                strategy = next(each for each in ShardingStrategy if Strategy.of(each) is now)
                unit.settings = replace(unit.settings, mesh=self.mesh, strategy=strategy)

    def undo(self) -> None:
        """Give all parameters the places that they have had, without memory."""
        for restore in self.before:
            restore()


def _restorers(model: nn.Module) -> list[Callable[[], None]]:
    """What gives a model the layout again that it has now, once its shards have no memory."""
    found: list[Callable[[], None]] = []
    for state in states_of(model):
        found.append(partial(setattr, state, "keeps_if_root", state.keeps_if_root))
        for group in state.groups:
            frees = group.options.reshard_after_forward
            found += [
                partial(group.change_mesh, group.mesh),
                partial(setattr, group, "post_forward", group.post_forward),
                partial(setattr, group.options, "reshard_after_forward", frees),
            ]
            for form in (param.form for param in group.params):
                found.append(partial(form.take_place, Place(form.mesh, form.layout, form.spec)))
                if form.local.is_meta:
                    found.append(form.leave)
    for unit in model.modules():
        if isinstance(unit, FullyShardedDataParallel):
            found.append(partial(setattr, unit, "settings", unit.settings))
    return found


def _like_before(before: ShardingStrategy, mesh: DeviceMesh) -> Strategy:
    """The strategy that frees parameters when another one does, over a mesh."""
    frees = Strategy.of(before) in _FREE_AFTER_FORWARD
    if mesh.ndim == 1:
        return Strategy.FULL_SHARD if frees else Strategy.SHARD_GRAD_OP
    if mesh.size(1) == 1:
        return Strategy.NO_SHARD
    return Strategy.HYBRID_SHARD if frees else Strategy.HYBRID_SHARD_ZERO2


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
    elif group.leader.own_order is not None:
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


def _full(form: ShardedParam, mesh: DeviceMesh) -> torch.Tensor:
    """A parameter as it was before ``fully_shard``, on the meta device.

    Tensor parallelism is that of the mesh which ``mesh`` was sliced from: its modules keep theirs.

    Raises:
        ValueError: that mesh has other ranks in it.
    """
    full = form.empty_full(torch.device("meta"))
    if form.origin is None or dtensor.root_mesh(form.origin.mesh) is dtensor.root_mesh(mesh):
        return full
    root, before = dtensor.root_mesh(mesh), form.origin.mesh
    names = before.mesh_dim_names or ()
    beside = root[names] if set(names) <= set(root.mesh_dim_names or ()) else None
    if beside is None or not torch.equal(beside.mesh, before.mesh):
        raise ValueError(
            f"{_DOING}: {form.fqn} on rank {dist.get_rank()}: tensor parallelism has cut it over "
            f"{before}, found {beside} beside the mesh to shard over; pass the data parallel part "
            "of a mesh with the same tensor parallel ranks, or move the state into another model "
            "with shardwise.checkpoint.transfer"
        )
    return dtensor.wrap_local(dtensor.plain(full), dtensor.on_mesh(form.origin, beside))


@dataclass(frozen=True)
class _Claim:
    """What a rank says before anything moves.

    Attributes:
        ranks: those that hold the model, as far as it knows; none if it holds nothing.
        wanted: what it was asked for: ranks, strategy, and whether there is an optimizer.
        mesh: the mesh that it was asked for, and those beside it; ``None`` on a rank that leaves.
    """

    ranks: frozenset[int]
    wanted: tuple[object, ...]
    mesh: list[object] | None


def _claim(given: Mapping[str, Any]) -> _Claim:
    """Check that the model can move, and say who holds it.

    Args:
        given: the arguments of :func:`relayout`.

    Raises:
        TypeError: one has a wrong type.
        ValueError: nothing is sharded, or there is no such strategy.
        NotImplementedError: the model is sharded in a way that can only be built anew.
        MisuseError: there are gradients, or a forward or backward is under way, or a parameter
            cannot move from or to the meta device.
    """
    check_arguments(relayout, given)
    model, optimizer, mesh, strategy = (
        given[name] for name in ("model", "optimizer", "mesh", "strategy")
    )
    named = None if strategy is None else _named(strategy)
    groups = list(groups_of(model))
    if not groups:
        raise ValueError(
            f"{_DOING}: found a {type(model).__name__} without groups, expected a module that "
            "fully_shard was applied to"
        )
    check_between_steps(model, _DOING)
    beside = None if mesh is None else dtensor.sibling_meshes(mesh)
    leaves = mesh is not None and mesh.get_coordinate() is None
    held: set[int] = set()
    for group in groups:
        _check_movable(group)
        for form in (param.form for param in group.params):
            if not form.local.is_meta:
                held.update(form.spec.mesh.mesh.flatten().tolist())
            if form.local.is_meta or leaves:
                form.check_exchange(_DOING)
    wanted = (
        None if beside is None else sorted(beside.flatten().tolist()),
        named and named.value,
        optimizer is not None,
    )
    return _Claim(frozenset(held), wanted, None if beside is None or leaves else beside.tolist())


def _all_claims(claims: list[_Claim]) -> list[_Claim]:
    """Check that all ranks were asked for the same."""
    wanted = "ranks, strategy, and whether there is an optimizer:"
    for what, found in (wanted, [c.wanted for c in claims]), ("mesh", [c.mesh for c in claims]):
        given = {rank: each for rank, each in enumerate(found) if each is not None}
        for rank, each in given.items():
            if each != (first := next(iter(given.items())))[1]:
                raise ValueError(
                    f"found {what} {first[1]} on rank {first[0]} of the group and {each} on rank "
                    f"{rank}, expected the same"
                )
    _holders(claims)
    return claims


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
            f"found the model held by ranks {[sorted(each) for each in names]}, expected "
            "one set that all of its ranks know; ranks that join shard it on the meta device"
        )
    return found[0]
