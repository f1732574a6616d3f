"""Any optimizer on shards: ``local`` for those that work element by element, ``whole`` for others.

Instances of the optimizer's class see plain tensors only (:mod:`shardwise.optim.cells`), usually
one for each parameter:

    local     this rank's shards; nothing is sent
    whole     whole parameters, each on one rank, to which the others send their pieces, and from
              which they get their new values (:mod:`shardwise.optim.shared_work`)

A trial tells whether that makes a difference (:mod:`shardwise.optim.trials`).
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base.arguments import check_arguments
from shardwise.base.optim_names import named_in_group, parameters_in_order
from shardwise.base.states_keeper import StatesKeeper
from shardwise.optim import trials
from shardwise.optim.around import hyperparameters, needs_closure
from shardwise.optim.cells import Cell, MakeOptimizer, ParamCall
from shardwise.optim.checked import gradient
from shardwise.optim.deal import MOVE, ROUND_BYTES, Unit, UnitPart, deal, units_of
from shardwise.optim.forms import taking_states
from shardwise.optim.pool import Pools, parts_of, ranks_of
from shardwise.optim.shared_work import SharedWork, WorkPlan, WorkPlans
from shardwise.sharding.part import full_part


class Way(enum.Enum):
    """Which tensors the instances of an optimizer see."""

    LOCAL = "local"
    WHOLE = "whole"


#: Methods of an optimizer that change parameters, beside ``step``: of schedule-free ones.
_MODES = ("train", "eval")


def local(
    optimizer_class: Callable[..., torch.optim.Optimizer], params: Iterable[Any], **settings: Any
) -> OptimizerOnShards:
    """Make an optimizer that works element by element, on this rank's shards. It sends nothing.

    A trial on small random parameters, whole and cut, checks that the cut makes no difference.
    States are sharded as parameters are.

    Args:
        optimizer_class: the class of the optimizer, or what makes one.
        params: parameters, or groups, named or not; sharded or not.
        settings: arguments of the optimizer.

    Returns:
        The optimizer.

    Raises:
        ValueError: the update depends on how parameters are cut: use :func:`whole`. Or the
            optimizer does not step from gradients alone.
    """
    check_arguments(local, locals())
    return OptimizerOnShards(Way.LOCAL, optimizer_class, params, settings)


def whole(
    optimizer_class: Callable[..., torch.optim.Optimizer], params: Iterable[Any], **settings: Any
) -> OptimizerOnShards:
    """Make any optimizer, with which one rank updates each parameter as a whole.

    The ranks of a mesh share its parameters out. Each gets the pieces of its parameters and their
    gradients, updates them, and sends the results back, in rounds that overlap. States stay whole,
    on the rank that updates the parameter, and :mod:`shardwise.checkpoint` saves them from there.

    If a trial on small random parameters finds that the update of one depends on others, as with
    norms of all gradients, one rank updates all of them together.

    Args:
        optimizer_class: the class of the optimizer, or what makes one.
        params: parameters, or groups, named or not; sharded or not.
        settings: arguments of the optimizer.

    Returns:
        The optimizer.

    Raises:
        ValueError: the optimizer does not step from gradients alone; or parameters depend on each
            other, and are on several meshes.
    """
    check_arguments(whole, locals())
    return OptimizerOnShards(Way.WHOLE, optimizer_class, params, settings)


#: Of each parameter that ranks share: its mesh, and the rank among them that updates it.
_Owners = dict[Tensor, tuple[DeviceMesh, int]]


class OptimizerOnShards(torch.optim.Optimizer):
    """An optimizer whose instances see plain tensors; :func:`local` and :func:`whole` make it.

    Args:
        way: which tensors these are.
        optimizer_class: makes the instances.
        params: parameters, or groups.
        settings: arguments of the optimizer.
    """

    def __init__(
        self,
        way: Way,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._make: MakeOptimizer = functools.partial(optimizer_class, **settings)
        name = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        self._way = way
        self._what = f"shardwise.optim.{way.value}({name})"
        self._cells: dict[Tensor, Cell] = {}
        # The parameters of each group, also while a step in parts is shown some of them.
        self._groups: list[list[Tensor]] = []
        #: Whether updates depend on other parameters; ``None``: it is not known yet.
        self._is_coupled: bool | None = None
        #: States that are cut as parameters are.
        self._cut: Collection[str] = ()
        self._pools = Pools()
        self._plans = WorkPlans()
        self._dealt: _Owners = {}
        self._dealt_for: list[Any] = []
        given = list(params)
        first = given[0] if given and isinstance(given[0], Mapping) else {}
        probe = self._make([{**hyperparameters(first), "params": [nn.Parameter(torch.ones(8, 6))]}])
        if needs_closure(probe):
            raise ValueError(
                f"{self._what}: found that its step needs a closure, expected an optimizer that "
                "steps once for each backward"
            )
        self._modes = {mode for mode in _MODES if callable(getattr(probe, mode, None))}
        super().__init__(given, probe.defaults)
        self._try()

    def _try(self) -> None:
        """Try what the optimizer needs for its groups.

        Raises:
            ValueError: it does not work this way.
        """
        is_coupled = trials.is_coupled(self._make, self.param_groups, self._what)
        if self._cells and is_coupled != self._is_coupled:
            raise ValueError(
                f"{self._what}: found that with this group the update of one parameter depends on "
                "the others, after a step with each by itself; add all groups before the first step"
            )
        self._is_coupled = is_coupled
        if self._way is Way.LOCAL:
            self._cut = trials.check_elementwise(self._make, self.param_groups, self._what)
            return
        meshes = {mesh for group in self._groups for param in group if (mesh := _mesh(param))}
        if is_coupled and len(meshes) > 1:
            raise ValueError(
                f"{self._what}: found in a trial that the update of one parameter depends on the "
                f"others, and parameters on {len(meshes)} meshes, expected one mesh, of which one "
                "rank updates all; make an optimizer for the parameters of each mesh"
            )

    def __getattr__(self, name: str) -> Any:
        """Return ``train`` and ``eval`` of optimizers that have them."""
        if name in self.__dict__.get("_modes", ()):
            return functools.partial(torch.no_grad()(self._call), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self._what}: cannot be copied; make another, and load the state into it")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. All ranks call it.

        Args:
            param_group: parameters, named or not, and settings.

        Raises:
            ValueError: the optimizer does not work this way for these parameters.
        """
        super().add_param_group(param_group)
        self._groups.append(self.param_groups[-1]["params"])
        if self._is_coupled is None:
            return
        try:
            self._try()
        except ValueError:
            del self.param_groups[-1], self._groups[-1]
            raise
        if self._is_coupled:
            self._cells.clear()  # the next one has all parameters, and their states so far

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. With ``whole``, all ranks call it.

        Args:
            closure: computes the loss and its gradients again, once.

        Returns:
            What ``closure`` returned, or ``None``.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter complex. Nothing has been changed.
            ValueError: parameters have moved, and the states have not. Nothing has been changed.
            RanksDivergedError: ranks have gradients of different parameters, or another rank
                failed before the step. Nothing was changed.
            PeerLostError: a peer is lost, or failed during the step. Some parameters may have been
                updated, and others not: go on from the last checkpoint.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            self._call("step")
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, for parameters that are sharded alike.

        Onto another mesh, load with :mod:`shardwise.checkpoint`.

        Args:
            state_dict: the state.
        """
        with taking_states(self, lambda _, param, state: dict(state)) as found:
            super().load_state_dict(state_dict)
        self.drop_states()
        kept = self.kept()
        self.state.update({p: state for p, state in found.items() if kept is None or p in kept})

    def states_keeper(self) -> StatesKeeper:
        """Describe its states to checkpoints.

        Returns:
            A keeper that knows which of them are whole, on which rank.
        """
        return StatesKeeper(kept=self.kept, drop_states=self.drop_states)

    def drop_states(self) -> None:
        """Forget the states of all parameters, and how these are sharded."""
        self._cells.clear()
        self.state.clear()
        self._dealt_for, self._plans = [], WorkPlans()

    def kept(self) -> set[Tensor] | None:
        """Find the parameters whose whole states this rank has, as they are sharded now.

        Returns:
            Those that this rank updates; ``None`` of ``local``, whose states are sharded.
        """
        if self._way is Way.LOCAL:
            return None
        owners = self._owners()
        members = {mesh: sorted(ranks_of(mesh)) for mesh, _ in owners.values()}
        others = {p for p, (mesh, own) in owners.items() if members[mesh][own] != dist.get_rank()}
        return {param for group in self._groups for param in group if param not in others}

    def _entries(self) -> list[ParamCall]:
        """Return the parameters that the optimizer is shown: all, or those of a part of a step.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter complex. Or the updates of parameters
                depend on each other, and these are not all.
            ValueError: parameters have moved.
        """
        before = self._dealt_for[1:]  # of groups that are added since, too
        if self._layout()[1 : len(before) + 1] != before:
            raise ValueError(
                f"{self._what}: found parameters that relayout has moved, expected them where they "
                "were, as the states are; pass the optimizer to relayout, or load a checkpoint "
                "into both"
            )
        shown, every = len(parameters_in_order(self)), sum(map(len, self._groups))
        if self._is_coupled and shown < every:
            raise RuntimeError(
                f"{self._what}: found a step of {shown} of {every} parameters, expected all, since "
                "their updates depend on each other; step after backward"
            )
        return [
            ParamCall(
                name,
                param,
                settings,
                dtensor.plain(param).detach(),
                None if param.grad is None else dtensor.plain(gradient(name, param)),
            )
            for number, group in enumerate(self.param_groups)
            for settings in [hyperparameters(group)]
            for name, param in named_in_group(group, number)
        ]

    def work(self, method: str, entries: Sequence[ParamCall]) -> list[Tensor]:
        """Call a method of the instances of some parameters.

        Args:
            method: its name.
            entries: the parameters; all, if they depend on each other.

        Returns:
            Their new values.
        """
        if len(entries) != 1 and not (self._is_coupled and entries):
            return [value for each in entries for value in self.work(method, [each])]
        cell = self._cells.get(entries[0].param)
        if cell is None:
            states = {each.param: self.state.get(each.param, {}) for each in entries}
            cell = Cell(self._make, entries, states)
            self._cells |= dict.fromkeys(states, cell)
        results = cell.call(method, entries)
        for each in entries:
            if state := cell.state_of(each.param):
                self.state[each.param] = {
                    key: dtensor.placed_as(each.param, value) if key in self._cut else value
                    for key, value in state.items()
                }
        return results

    def _owners(self) -> _Owners:
        """Return the mesh of each parameter that ranks share, and which of them updates it."""
        dealt_for = self._layout()
        if dealt_for != self._dealt_for:
            self._dealt_for, self._dealt, self._plans = dealt_for, self._deal(), WorkPlans()
        return self._dealt

    def _layout(self) -> list[Any]:
        """Return how parameters are dealt out and lie over ranks."""
        return [
            self._is_coupled,
            *(
                (_mesh(param), param.placements) if isinstance(param, DTensor) else None
                for group in self._groups
                for param in group
            ),
        ]

    def _deal(self) -> _Owners:
        """Deal out parameters. Groups that are added change nothing about those before."""
        found: _Owners = {}
        loads: dict[DeviceMesh, list[int]] = {}
        for group in self._groups if self._way is Way.WHOLE else ():
            units: dict[DeviceMesh, list[Unit]] = {}
            for number, param in enumerate(group):
                if (mesh := _mesh(param)) is not None:
                    found[param] = mesh, 0  # if it has no elements
                    own = units.setdefault(mesh, [])
                    own += units_of(number, param.shape, parts_of(param), param.ndim)
            for mesh, own in units.items():
                load = loads.setdefault(mesh, [0] * mesh.size())
                for owner, dealt in enumerate(deal(own, mesh.size(), _cost, load)):
                    load[owner] += sum(map(_cost, dealt))
                    found |= {group[unit.param]: (mesh, owner) for unit in dealt}
        if self._is_coupled:
            return {param: (mesh, 0) for mesh in loads for group in self._groups for param in group}
        return found

    def _call(self, method: str) -> None:
        entries: list[ParamCall] = []
        error: Exception | None = None
        try:
            entries = self._entries()
        except Exception as raised:
            error = raised
        named = [(each.name, each.param) for each in entries if each.grad is not None]
        owners, doing = self._owners(), f"{method} of {self._what}"
        shown = [param for param in parameters_in_order(self) if param in owners]
        self._pools.agree(shown, named, doing, error)
        kept = self.kept()
        shares: dict[DeviceMesh, list[ParamCall]] = {}
        alone: list[ParamCall] = []
        idle: list[ParamCall] = []  # frozen: their instances only count steps
        for each in entries:
            if each.param not in owners:
                alone.append(each)
            elif self._is_coupled or each.param.requires_grad or each.grad is not None:
                shares.setdefault(owners[each.param][0], []).append(each)
            elif kept is not None and each.param in kept:
                none = dtensor.without_memory(each.value, each.param.shape)
                idle.append(replace(each, value=none))
        pools = {self._pools.of(param) for param in shown} - {None}
        try:
            for each, result in zip(alone, self.work(method, alone), strict=True):
                if result.data_ptr() != each.value.data_ptr():
                    each.value.copy_(result)
            self.work(method, idle)
            for own in shares.values():
                _WholeWork(self._plan(own, owners), doing, self, method, own).run()
        except BaseException:
            for pool in filter(None, pools):
                pool.all_to_all.abandon()
            raise

    def _plan(self, entries: Sequence[ParamCall], owners: _Owners) -> WorkPlan:
        """Return who does what with the parameters of a mesh."""
        pool = next(filter(None, (self._pools.of(each.param) for each in entries)))

        def plan() -> WorkPlan:
            dealt: list[list[Unit]] = [[] for _ in pool.members]
            for number, (_, param, *_) in enumerate(named):
                everywhere = dict.fromkeys(range(len(pool.members)), full_part(param.shape))
                parts = everywhere if _mesh(param) is None else parts_of(param)
                dealt[owners[param][1]] += units_of(number, param.shape, parts, param.ndim)
            limit = sys.maxsize if self._is_coupled else ROUND_BYTES
            size = 2 * _dtype(entries).itemsize
            every = tuple(map(tuple, dealt))
            return WorkPlan.shared(named, every, pool, lambda unit: size * unit.numel, limit)

        named = [(each.name, each.param) for each in entries]
        key = (pool, self._is_coupled, _dtype(entries), *(id(param) for _, param in named))
        return self._plans.get(key, plan)


class _WholeWork(SharedWork):
    """A call of the instances of whole parameters.

    Args:
        plan: who does what.
        name: of the call, for reports and errors.
        optimizer: has the instances.
        method: what is called.
        entries: the parameters of the plan, with this rank's parts of them.
    """

    def __init__(
        self,
        plan: WorkPlan,
        name: str,
        optimizer: OptimizerOnShards,
        method: str,
        entries: Sequence[ParamCall],
    ) -> None:
        super().__init__(plan, name, _dtype(entries), entries[0].value.device, layers=2)
        self._call = functools.partial(optimizer.work, method)
        self._entries = entries

    def _prepare(self, unit: Unit, piece: UnitPart) -> Sequence[Tensor]:
        each = self._entries[unit.param]
        return each.value, each.value if each.grad is None else each.grad

    def _compute(self, wholes: dict[Unit, list[Tensor]]) -> dict[Unit, Tensor]:
        given = []
        for unit, (value, slope) in wholes.items():
            each = self._entries[unit.param]
            grad = None if each.grad is None else slope.to(each.grad.dtype)
            given.append(replace(each, value=value.to(each.value.dtype), grad=grad))
        return dict(zip(wholes, self._call(given), strict=True))

    def _apply(self, unit: Unit, piece: UnitPart, result: Tensor) -> None:
        self._entries[unit.param].value.copy_(result)


def _mesh(param: Tensor) -> DeviceMesh | None:
    """Return the mesh of several ranks that a parameter is on, if it is on one."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return None
    return param.device_mesh


def _cost(unit: Unit) -> int:
    """Return what a unit costs, beside moving it: memory for states, above all."""
    return MOVE * unit.numel


def _dtype(entries: Sequence[ParamCall]) -> torch.dtype:
    """Return the dtype that holds the values of all parameters and gradients."""
    tensors = (tensor for each in entries for tensor in (each.value, each.grad))
    dtypes = (tensor.dtype for tensor in tensors if tensor is not None)
    return functools.reduce(torch.promote_types, dtypes)
