"""Moving a training state between ranks, from one layout into another, without a disk.

what every rank holds -> whether it fits the target -> some tensors at a time: who needs which
rows -> rows go from where they are to where they belong -> these tensors' old shards are dropped

If a rank fails, what has arrived goes the same way back, from its new shards into old ones.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch import autograd
from shardwise._torch.module import customizes_loading, customizes_saving
from shardwise.base import interrupts
from shardwise.base.arguments import check_arguments
from shardwise.base.boxes import Box, is_tiling
from shardwise.base.errors import CheckpointError, MisuseError, lost_peer_behind
from shardwise.base.libc import trim_heap
from shardwise.base.portions import portions
from shardwise.base.states_keeper import drop_states, inside_of, keeper_of
from shardwise.checkpoint.disk.entries import (
    Origin,
    StatePath,
    StoredPiece,
    TensorEntry,
    Value,
    dtype_name,
    torch_dtype,
)
from shardwise.checkpoint.disk.safetensors import digest_of
from shardwise.checkpoint.disk.values import unflatten
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.alike import RankState, check_alike
from shardwise.checkpoint.ranks.arrival import Arrival
from shardwise.checkpoint.ranks.loading import install, own_part
from shardwise.checkpoint.ranks.optimizer import parameter_names
from shardwise.checkpoint.ranks.optimizer_loading import check_groups, destinations
from shardwise.checkpoint.ranks.saving import mixed, wait_for_save
from shardwise.checkpoint.ranks.state import (
    in_place,
    model_state,
    own_tensors,
    state_of,
    ties,
)
from shardwise.sharding import states
from shardwise.sharding.allocate import allocate
from shardwise.sharding.param import forms_of
from shardwise.sharding.state import groups_of, states_of

if TYPE_CHECKING:
    from shardwise.checkpoint.ranks.rows import RoutedRows

#: Bytes that travel at once, between all ranks.
_AT_ONCE = 16 * 1024 * 1024
_BATCHES = 8  # that travel between two agreements, for which new shards are made

#: A model and an optimizer of its parameters, if it has one.
Training = tuple[nn.Module, torch.optim.Optimizer | None]


class HeldState:
    """What a rank holds of a state, wherever that is used: at first, nothing.

    Its parts of tensors were found when they were added: where this rank is in a mesh may not be
    known later.

    Attributes:
        model: the one that it is the state of; ``None`` for none that lives.
        origins: where its tensors are in the state, by name.
        values: everything but tensors.
    """

    model: nn.Module | None = None

    def __init__(self) -> None:
        self._parts: dict[str, dict[Box, Tensor]] = {}
        self._entries: dict[str, TensorEntry] = {}
        self.origins: dict[str, Origin] = {}
        self.values: list[Value] = []

    @property
    def held_beside(self) -> RankState | None:
        """What is in ``extra``, for comparing it between ranks; ``None``: it is alike."""
        return None

    def take_apart(self, names: Iterable[str]) -> None:
        """Take tensors apart whose shards are of a tensor subclass on other ranks."""

    def let_go(self) -> None:
        """Have what is trained drop its memory, which stays here."""

    def leave(self) -> None:
        """Leave nothing in what is trained, and forget it."""

    def entries(self, rank: int) -> list[TensorEntry]:
        """Its tensors, each with the parts that are here; the file of a part is ``rank``."""
        return [
            replace(
                entry,
                pieces=tuple(
                    StoredPiece(str(rank), 0, box, ()) for box in self._parts[name] if box.numel
                ),
            )
            for name, entry in self._entries.items()
        ]

    def part(self, name: str, box: Box) -> Tensor:
        """The elements of a part."""
        return self._parts[name][box]

    def hold(self, entry: TensorEntry, box: Box, part: Tensor) -> None:
        """Hold a part of a tensor."""
        self._entries.setdefault(entry.fqn, entry)
        self._parts.setdefault(entry.fqn, {})[box] = part

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return list(self._entries)

    def take(self, other: HeldState, names: Iterable[str]) -> None:
        """Take some tensors over from another one.

        Raises:
            CheckpointError: one has not the dtype that it had when it left.
        """
        for name in names:
            if name not in other._entries:
                continue
            entry, parts = other._entries[name], other._parts[name]
            for part in parts.values():
                if part.dtype != torch_dtype(entry.dtype):
                    raise CheckpointError(
                        f"{name}: found {part.dtype}, expected {torch_dtype(entry.dtype)}, as "
                        "before: it has been rounded"
                    )
            self._entries[name], self._parts[name] = entry, parts
            other.drop([name])

    def drop(self, names: Iterable[str]) -> None:
        """Drop tensors that have left."""
        for name in names:
            self._entries.pop(name, None)
            self._parts.pop(name, None)


class Departure(HeldState):
    """What a rank holds of a training that goes on elsewhere: on other ranks, perhaps later.

    It has the memory of the model and the optimizer, which may be dropped after :meth:`let_go`. The
    process group in which they were sharded may end.

    Args:
        source: what the rank trained, between two steps.
        extra: anything else to move; see :func:`~shardwise.checkpoint.save`.
        doing: what the ranks do, for error messages.
        rank: this rank, among those that take part; ``None``: among all.

    Raises:
        MisuseError: the model is not between two steps, or the optimizer's state dict lacks states.
    """

    def __init__(
        self,
        source: Training,
        extra: Mapping[str, Any] | None = None,
        doing: str = "transfer",
        rank: int | None = None,
    ) -> None:
        super().__init__()
        check_between_steps(source[0], doing)
        self._training: Training | None = source
        self.model = source[0]
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        self._state = state_of(*source, extra, rank=rank)
        self.origins, self.values = self._state.origins, self._state.values
        self._check_states(source[1], doing)
        self._add_tensors()

    def _check_states(self, optimizer: torch.optim.Optimizer | None, doing: str) -> None:
        """Check that optimizers inside of the optimizer have no states that would be dropped."""
        paths = [at.path for at in self.origins.values() if at.path[:2] == ("optimizer", "state")]
        moved = {str(key) for path in paths for key in path[3:4]}
        for each in [*inside_of(optimizer)][1:]:
            states = (item for state in each.state.values() for item in state.items())
            if lacking := sorted({str(k) for k, v in states if isinstance(v, Tensor)} - moved):
                raise MisuseError(
                    f"{doing}: found {', '.join(lacking)} in the {type(each).__name__} "
                    f"inside of a {type(optimizer).__name__}, whose state_dict() lacks it, "
                    "so it would be lost; expected a state_dict() with all states by parameter"
                )

    def _add_tensors(self) -> None:
        for name, tensor in self._state.tensors.items():
            if name not in self._entries:
                box, local = own_part(tensor)
                if tuple(local.shape) != box.sizes:
                    raise ValueError(
                        f"{name}: found a shard of shape {list(local.shape)} on this rank, "
                        f"expected {list(box.sizes)}"
                    )
                origin, shape = self.origins[name], tuple(tensor.shape)
                entry = TensorEntry(
                    origin.path, shape, dtype_name(tensor.dtype), origin.placements, origin.mesh, ()
                )
                self.hold(entry, box, local)

    @property
    def held_beside(self) -> RankState:
        """What is in ``extra``, for comparing it between ranks."""
        digests: dict[tuple[StatePath, tuple[int, ...]], str] = {
            (entry.path, ()): digest_of(part)
            for name, entry in self._entries.items()
            if entry.section == "extra"
            for part in self._parts[name].values()  # one: they are not cut
        }
        values = [each for each in self.values if each.path[0] == "extra"]
        return RankState([path for path, _ in digests], values, digests)

    def take_apart(self, names: Iterable[str]) -> None:
        """Take tensors apart whose shards are of a tensor subclass on other ranks."""
        self._state.take_apart(names)  # which may add to the values, too
        for name in self._entries.keys() & names:
            del self._entries[name], self._parts[name]
        self._add_tensors()

    def add(self, entry: TensorEntry, box: Box) -> Tensor:
        """Make room for a part that another rank has, and return it."""
        self.origins.setdefault(entry.fqn, Origin(entry.path, entry.placements, entry.mesh))
        made = torch.empty(box.sizes, dtype=torch_dtype(entry.dtype))
        self.hold(entry, box, made)
        return made

    def drop(self, names: Iterable[str]) -> None:
        """Drop tensors that have left."""
        names = list(names)
        super().drop(names)
        for name in names:
            self._state.tensors.pop(name, None)

    def let_go(self) -> None:
        """Have the model and the optimizer drop their memory, which stays here."""
        if self._training is not None:
            _let_go(*self._training)

    def leave(self) -> None:
        """Leave nothing in the model and the optimizer, and forget them."""
        if self._training is not None:
            model, optimizer = self._training
            for form in forms_of(model.parameters()):
                form.leave()
            drop_states(optimizer)
        self.model = self._training = None


def _let_go(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Have a model and an optimizer drop their memory, which the caller has."""
    for group in groups_of(model):
        group.drop_fulls()
    for form in forms_of(model.parameters()):
        form.let_go()
    if not keeper_of(optimizer).nbytes_kept:  # in a store, with places there
        drop_states(optimizer)


def transfer(
    source: Training | HeldState | None,
    target: Training | None,
    extra: Mapping[str, Any] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Move a training state from one model and optimizer into another. Every rank calls this.

    The two may be sharded in any way, over any of the ranks; the values that arrive are those that
    a checkpoint would bring. Beside its new shards and the rows of its old ones that have not left
    yet, a rank holds some tensors on their way: at most 64 MiB, or one tensor.

    What is moved is gone: parameters of ``source`` that ``fully_shard`` has sharded are on the meta
    device afterwards, and its optimizer has no state. If ranks do not agree on what to move, all
    raise and nothing has changed. If a rank fails later, rows go back to where they came from, and
    ``source`` is as it was. If a rank is lost, fails again meanwhile, or has rounded values to
    another dtype of ``target``, so is ``source``. ``target`` is lost in any case: what uses it
    raises an error, so build it again.

    Args:
        source: what this rank trained, between two steps; ``None`` on ranks that did not.
        target: what this rank will train, sharded, with memory or on the meta device. ``None`` on
            ranks that will not.
        extra: anything else to move; see :func:`~shardwise.checkpoint.save`.
        group: the ranks of both; the default process group if ``None``.

    Returns:
        ``extra``, on ranks with a ``target``.

    Raises:
        CheckpointError: the two are of different models or optimizers, no rank has a target, an
            argument has a wrong type, or a rank failed; the message names it. Raised on every rank
            alike.
    """

    def lose_target() -> None:
        if target is not None:
            _lose(target[0], "transfer")

    with autograd.no_grad():
        return move(source, target, extra, undo=lose_target, doing="transfer", group=group)


def _nothing() -> None:
    """Nothing is to be done."""


def move(
    source: Training | HeldState | None,
    target: Training | None,
    extra: Mapping[str, Any] | None = None,
    *,
    begin: Callable[[], None] = _nothing,
    undo: Callable[[], None] = _nothing,
    doing: str,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Move a training state; see :func:`transfer`.

    Args:
        source: as there.
        target: as there.
        extra: as there.
        begin: called once all ranks have agreed on what to move, and when the sharded parameters of
            the source have given up their memory.
        undo: called before rows go back, when those of the target have given up theirs.
        doing: what the ranks do, for error messages.
        group: as there.
    """
    given = locals()
    wait_for_save()
    ranks = Ranks(group_for(group))

    training = None if isinstance(source, HeldState) else source

    def depart() -> HeldState:
        if isinstance(source, HeldState):
            return source
        return HeldState() if source is None else Departure(source, extra, doing, ranks.rank)

    def kinds() -> tuple[bool, bool]:
        """Whether this rank is a target, and whether it has a model to which rows can go back."""
        check_arguments(move, given)
        return target is not None, not isinstance(source, HeldState)

    def check_kinds(given: list[tuple[bool, bool]]) -> bool:
        if not any(is_target for is_target, _ in given):
            raise ValueError(
                "target: found None on all ranks, expected a model on one or more: what is moved "
                "is gone from the source"
            )
        return all(can_return for _, can_return in given)

    can_return = ranks.agree(doing, kinds, check_kinds)
    leaving = ranks.all(doing, depart)
    entries, values = _agree(ranks, doing, leaving)

    def check(training: Training | None) -> frozenset[str]:
        return frozenset() if training is None else _check_target(*training, entries, values, doing)

    def check_both() -> tuple[frozenset[str], frozenset[str]]:
        arriving = check(target)
        if not can_return:
            return arriving, frozenset()
        return arriving, arriving if training is target else check(training)

    arriving, returning = ranks.all(doing, check_both)

    def prepare() -> None:
        if target is not None:
            allocate(target[0], [name for name, _ in target[0].named_buffers()])

    ranks.all(doing, prepare)  # the last that may fail before anything is given up
    going = _Move(ranks, doing, entries, values, leaving)
    with interrupts.noted() as check_interrupted:
        try:
            found = going.run(target, arriving, begin, check_interrupted)
        except BaseException as error:
            is_agreed = isinstance(error, CheckpointError) and lost_peer_behind(error) is None
            try:
                if not (is_agreed and can_return):
                    raise
                _forget_frames(error)
                going.go_back(training, returning, target, undo)
            except BaseException:
                for model in (target and target[0], leaving.model):
                    if model:
                        _lose(model, doing)
                leaving.leave()
                raise
            raise
    if target is None or leaving.model is not target[0]:
        leaving.leave()
    return found


def _forget_frames(error: BaseException | None) -> None:
    """Forget what the functions that raised an error had, such as shards that were to arrive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


class _Move:
    """A training state that goes from its parts to where it belongs, and back if a rank fails.

    Args:
        ranks: all that have parts or need some.
        doing: what they do, for error messages.
        entries: the tensors.
        values: everything else.
        held: the parts that are here.
    """

    def __init__(
        self,
        ranks: Ranks,
        doing: str,
        entries: list[TensorEntry],
        values: list[Value],
        held: HeldState,
    ) -> None:
        self._ranks, self._doing = ranks, doing
        self._entries, self._values = entries, values
        self._held = held
        self._done: set[str] = set()  # names of tensors that are where they belong
        self._arrivals: _Arrivals | None = None

    def run(
        self,
        target: Training | None,
        arriving: frozenset[str],
        begin: Callable[[], None] = _nothing,
        check: Callable[[], None] = _nothing,
    ) -> dict[str, Any]:
        """Bring everything to where it belongs, and return ``extra``.

        Args:
            target: what gets it on this rank.
            arriving: the names of what arrives where it belongs.
            begin: called before any rank makes room, once what is held here has been let go.
            check: raises if this rank is to give up.
        """

        def start() -> _Arrivals | None:
            self._held.let_go()
            begin()
            return target and _Arrivals(target, self._entries, arriving, self._doing)

        arrivals = self._arrivals = self._ranks.all(self._doing, start)
        open_part = (lambda entry: None) if arrivals is None else arrivals.open
        exchange = _Migration(self._ranks, self._doing, self._held, open_part, check)
        for some in _some_at_a_time(self._entries):
            exchange.run(some)
            names = [entry.fqn for entry in some]
            self._done.update(names)
            self._held.drop(names)
            trim_heap()  # else freed shards stay with the process, and new ones come on top

        def end() -> dict[str, Any]:
            return {} if arrivals is None else arrivals.install(self._values)

        return self._ranks.all(self._doing, end)

    def go_back(
        self,
        source: Training | None,
        returning: frozenset[str],
        target: Training | None,
        undo: Callable[[], None],
    ) -> None:
        """Bring everything back to where it was, once all ranks know that one has failed.

        Args:
            source: what this rank had.
            returning: the names of what returns to where it belongs.
            target: what would have got it.
            undo: called before any rank makes room.
        """
        back = HeldState()

        def turn() -> list[TensorEntry]:
            if self._arrivals is not None:
                back.take(self._arrivals.parts, self._done)
            back.take(self._held, self._held.names)
            self._arrivals = None
            if target is not None:
                _let_go(*target)
                if source is None:
                    drop_states(target[1])
            undo()
            return back.entries(self._ranks.rank)

        def answer(parts: list[list[TensorEntry]]) -> list[TensorEntry]:
            merged = merge(entry for each in parts for entry in each)
            return [each for each in merged if each.section != "extra"]

        entries = self._ranks.agree(self._doing, turn, answer)
        _Move(self._ranks, self._doing, entries, self._values, back).run(source, returning)


def _lose(model: nn.Module, doing: str) -> None:
    """Note that the values of a model are lost, so that whatever uses it says so."""
    for group in groups_of(model):
        with contextlib.suppress(Exception):  # there is another error to raise
            group.drop_fulls()
    for form in forms_of(model.parameters()):
        form.lose(doing)


def hand_over(mine: Departure, leaving: Set[int]) -> None:
    """Have the ranks that stay take over what only those that leave hold. Every rank calls this.

    Rows stay cut as they are: it is the next :func:`transfer` that deals them out.

    Args:
        mine: what this rank holds.
        leaving: the numbers of the ranks that leave, fewer than all.

    Raises:
        CheckpointError: a rank failed, or is lost.
    """
    doing = "hand over"
    ranks = Ranks(group_for(None))
    entries, mine.values = _agree(ranks, doing, mine)
    stay = [rank for rank in range(ranks.size) if rank not in leaving]
    givers = sorted(leaving)
    for first in range(0, len(givers), len(stay)):
        giver_of = dict(zip(stay, givers[first:], strict=False))
        giver = giver_of.get(ranks.rank)

        def take(entry: TensorEntry, giver: int | None = giver) -> tuple[Box, Tensor] | None:
            """Make room for the part that no rank which stays has, and no other giver gives."""
            for box, holders in holders_of(entry).items():
                if giver == min(holders) and leaving >= set(holders):
                    return box, mine.add(entry, box)
            return None

        exchange = _Migration(ranks, doing, mine, take)
        for some in _some_at_a_time(entries):
            exchange.run(some)


def check_between_steps(model: nn.Module, doing: str) -> None:
    """Check that a model is between two steps, and free its full parameters.

    Raises:
        MisuseError: there are gradients, or a forward or backward is under way, or full parameters
            are summoned.
    """
    if any(state.phase is not states.IDLE for state in states_of(model)):
        raise MisuseError(
            f"{doing}: the model on rank {dist.get_rank()} runs its forward or backward, expected "
            "it between two steps"
        )
    for form in forms_of(model.parameters()):
        form.check_not_lost()
    for group in groups_of(model):
        found = [f"the gradient of {p.fqn}" for p in group.params if p.sharded.grad is not None]
        if group.has_waiting_grads or group.phase is not states.IDLE:
            found.append("gradients that are not reduced")
        if group.state is states.SUMMONED:
            found.append("summoned parameters")
        if found:
            raise MisuseError(
                f"{doing}: group {group.label.name!r} on rank {dist.get_rank()} has {found[0]}, "
                "expected a model between two steps; step, and call optimizer.zero_grad()"
            )
        group.reshard()


def _agree(ranks: Ranks, doing: str, mine: HeldState) -> tuple[list[TensorEntry], list[Value]]:
    """Let all ranks know what they hold together.

    Returns:
        The tensors, where the file of a piece is the number of the rank that has it; and everything
        else.

    Raises:
        CheckpointError: parts of a tensor are missing, or ranks hold different tensors.
    """
    apart = ranks.agree(doing, lambda: mine.origins, find_mixed)

    def part() -> tuple[list[TensorEntry], list[Value], RankState | None]:
        mine.take_apart(apart)
        return mine.entries(ranks.rank), mine.values, mine.held_beside

    def answer(
        parts: list[tuple[list[TensorEntry], list[Value], RankState | None]],
    ) -> tuple[list[TensorEntry], list[Value]]:
        held = {name: each[2] for name, each in zip(ranks.names, parts, strict=True) if each[2]}
        check_alike([*held.values()], [*held])
        values: dict[StatePath, Value] = {}
        for value in (each for _, of_rank, _ in parts for each in of_rank):
            values.setdefault(value.path, value)
        merged = merge(each for of_rank, _, _ in parts for each in of_rank)
        return merged, list(values.values())

    return ranks.agree(doing, part, answer)


def find_mixed(parts: list[dict[str, Origin]]) -> frozenset[str]:
    """The tensors that only some ranks have taken apart."""
    every = [item for each in parts for item in each.items()]
    return mixed((name for name, _ in every), (origin for _, origin in every))


def merge(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """One entry for each tensor, with the pieces of all ranks.

    Raises:
        CheckpointError: they do not fit together.
    """
    found: dict[str, TensorEntry] = {}
    for entry in entries:
        known = found.setdefault(entry.fqn, entry)
        if known is not entry:
            if known.info != entry.info:
                raise CheckpointError(
                    f"{entry.fqn}: found {entry.info} on one rank and {known.info} on another"
                )
            found[entry.fqn] = replace(known, pieces=(*known.pieces, *entry.pieces))
    for entry in found.values():
        boxes = list(holders_of(entry))
        if not is_tiling(boxes, entry.shape):
            raise CheckpointError(
                f"{entry.fqn}: found parts {boxes[:4]} of shape {list(entry.shape)}, expected all "
                "of it once; every rank that holds a part has to take part"
            )
    return list(found.values())


def holders_of(entry: TensorEntry) -> dict[Box, list[int]]:
    """The ranks that hold each part of a tensor."""
    found: dict[Box, list[int]] = {}
    for piece in entry.pieces:
        found.setdefault(piece.box, []).append(int(piece.file))
    return found


def _some_at_a_time(entries: list[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Cut the tensors into lists that travel one after the other, the same on all ranks."""
    share = max(_AT_ONCE, sum(entry.nbytes for entry in entries) // 32)
    return portions(entries, lambda entry: entry.nbytes, min(_BATCHES * _AT_ONCE, share))


def _check_target(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    entries: Iterable[TensorEntry],
    values: Iterable[Value],
    doing: str,
) -> frozenset[str]:
    """Check that what moves is of the target's model and optimizer, before anything moves.

    Returns:
        The names of what arrives where it belongs. The rest goes through the model's hooks.

    Raises:
        CheckpointError: it is not.
        ValueError: a tensor is on the meta device that gets neither memory nor values.
    """
    own = own_tensors(model)
    names = parameter_names(model, own)
    sharded = {form.parameter for form in forms_of(names)}
    lost = [name for param, name in names.items() if param.is_meta and param not in sharded]
    lost += [name for name, each in model.named_buffers() if each.is_meta and name not in own]
    if lost:
        raise ValueError(
            f"{doing}: found {', '.join(lost[:3])} on the meta device, expected memory: only "
            "parameters that fully_shard has sharded and persistent buffers get it here"
        )
    found = [
        (entry.path, torch.empty(entry.shape, device="meta"))
        for entry in entries
        if entry.section == "model"
    ]
    found += [(each.path, each.value) for each in values if each.path[0] == "model"]
    Arrival(model, doing, strict=True).expect(unflatten(found, doing).get("model", {}))
    if optimizer is not None:
        check_groups(optimizer, names, values)
    modules = list(model.modules())
    if not customizes_saving(modules) and not customizes_loading(modules):
        return frozenset(own)
    return frozenset(in_place(model_state(model, ignore_frozen_params=False), model))


class _Arrivals:
    """Where the state arrives on this rank.

    Args:
        target: the model and the optimizer.
        entries: what will arrive.
        in_place: the names of what arrives where it belongs.
        doing: what the ranks do, for error messages.

    Attributes:
        parts: what this rank has of what has arrived.
    """

    def __init__(
        self,
        target: Training,
        entries: Iterable[TensorEntry],
        in_place: frozenset[str],
        doing: str,
    ) -> None:
        self.model, self._optimizer = target
        self._in_place, self._doing = in_place, doing
        self._own = own_tensors(self.model)
        names = parameter_names(self.model, self._own)
        self._params = {name: param for param, name in names.items()}
        for tied in ties(self.model).values():
            first = next((self._params[each] for each in tied if each in self._params), None)
            if first is not None:
                self._params |= dict.fromkeys(tied, first)
        optimizer = self._optimizer
        self._state = None if optimizer is None else destinations(optimizer, names, entries)
        self._arrived: list[tuple[TensorEntry, Tensor]] = []
        self.parts = HeldState()

    def open(self, entry: TensorEntry) -> tuple[Box, Tensor] | None:
        """Return this rank's part of a tensor, with memory; ``None`` if it needs nothing."""
        if entry.section == "model" and entry.path[1] in self._in_place:
            found: Tensor | None = self._with_memory(str(entry.path[1]))
        elif entry.section == "optimizer":
            found = None if self._state is None else self._state(entry)
        else:
            found = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        if found is None:
            return None
        self._arrived.append((entry, found))
        box, part = own_part(found)
        self.parts.hold(entry, box, part)
        return box, part

    def _with_memory(self, name: str) -> Tensor:
        param = self._params.get(name)
        if param is None:
            return self._own[name]
        for form in forms_of([param]):
            if not form.has_memory:
                form.fill_place()
        return param

    def install(self, values: Iterable[Value]) -> dict[str, Any]:
        """Give the model and the optimizer what has arrived, and return ``extra``."""
        tree = unflatten(
            [
                *((value.path, value.value) for value in values),
                *((entry.path, tensor) for entry, tensor in self._arrived),
            ],
            self._doing,
        )
        arrived = tree.get("model", {})
        modules = list(self.model.modules())
        if arrived.keys() - self._in_place or customizes_loading(modules):
            for form in forms_of(self.model.parameters()):
                if not form.has_memory:
                    form.fill_place()
            arrival = Arrival(self.model, self._doing, strict=True)
            arrival.expect(arrived)
            arrival.load()
        saved = [entry for entry, _ in self._arrived if entry.section == "model"]
        return install(tree, self.model, self._optimizer, saved)


class _Migration:
    """Tensors that travel, some at a time.

    A rank that cannot read or write its rows goes on until the next time that all ranks agree: the
    others wait for its messages.
    """

    def __init__(
        self,
        ranks: Ranks,
        doing: str,
        held: HeldState,
        open_part: Callable[[TensorEntry], tuple[Box, Tensor] | None],
        check: Callable[[], None] = _nothing,
    ) -> None:
        from shardwise.checkpoint.ranks.rows import RowExchange  # of no use before

        self._ranks = ranks
        self._doing = doing
        self._check_more = check
        self._open_part = open_part
        self._opened: dict[str, tuple[Box, Tensor]] = {}
        self._exchange = RowExchange(
            ranks,
            doing,
            lambda rows: held.part(rows.name, rows.held),
            lambda rows: self._opened[rows.name][1],
            room=2 * _AT_ONCE,
        )

    def run(self, entries: list[TensorEntry]) -> None:
        """Bring the tensors to where they belong, on all ranks or on none.

        Raises:
            CheckpointError: a rank failed.
        """

        def needs() -> dict[str, Box]:
            self._opened = {}
            for entry in entries:
                if (part := self._open_part(entry)) is not None:
                    self._opened[entry.fqn] = part
            return {name: box for name, (box, _) in self._opened.items()}

        wanted = self._ranks.agree(self._doing, needs, list)
        every = list(self._rows(entries, wanted))
        self._exchange.send([rows for rows in every if not rows.travels])
        travelling = (rows for rows in every if rows.travels)
        for some in portions(travelling, lambda rows: rows.nbytes, _AT_ONCE):
            self._exchange.send(some)
        self._ranks.all(self._doing, self.check)

    def check(self) -> None:
        """Raise what has failed on this rank."""
        self._exchange.check()
        self._check_more()

    def _rows(
        self, entries: list[TensorEntry], wanted: list[dict[str, Box]]
    ) -> Iterator[RoutedRows]:
        """What goes from rank to rank, in the same order on all of them.

        A rank that has what it needs takes it from itself, another from one of those that have it.
        """
        from shardwise.checkpoint.ranks.rows import RoutedRows

        for entry in entries:
            holders, most = holders_of(entry), max(_AT_ONCE // entry.itemsize, 1)
            for target, needs in enumerate(wanted):
                if (needed := needs.get(entry.fqn)) is None:
                    continue
                for held, ranks in holders.items():
                    common = held.intersection(needed)
                    source = target if target in ranks else ranks[target % len(ranks)]
                    for box in () if common is None else common.cut(most):
                        dtype = torch_dtype(entry.dtype)
                        yield RoutedRows(entry.fqn, dtype, box, source, target, held, needed)
