"""What sharding promises, written down once more: which values a module computes with, and when.

The program runs unsharded, but the modules of a group compute with copies of their parameters,
made when the group would be gathered, as ``docs/architecture.md`` says it. Nothing is cut up or
sent, and nothing of the library is used. So wherever a program writes at an odd moment, this says
what the write reaches, also where torch's FSDP2 raises.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.fuzz.models import FuzzBlock, unwrap, wrap

#: Where a parameter is registered.
_Place = tuple[nn.Module, str]


class Between(enum.Enum):
    """What is between a forward of a group and its backward."""

    FREED = "backward gathers again"
    KEPT = "backward computes with what forward gathered"
    NOTHING = "backward is that of the unsharded program"
    ALIASED = "the same, and what was gathered is the parameter itself"


@dataclass
class Clock:
    """Whether a run of a program is in a backward; the same for all models of the run.

    Attributes:
        is_running: whether a backward is.
        syncs: whether backwards reduce gradients.
        began: the models that it has reached.
        models: all of them, copies too.
        uncounted: parameters that were written to in a way that autograd does not count for a
            ``DTensor``. Ours does not see it either, and goes on with what is kept, as torch does.
        missed: whether a backward computed with values from before a write in it, or with those
            that a later forward gathered, or a forward with those that were prefetched and then
            written to uncounted: docs/torch-compatibility.md has the former under "Not detected",
            and ``FSDPModule.set_modules_to_forward_prefetch`` the latter.
    """

    is_running: bool = False
    syncs: bool = True
    began: list[Gathers] = field(default_factory=list)
    models: list[Gathers] = field(default_factory=list)
    uncounted: set[torch.Tensor] = field(default_factory=set)
    missed: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        return self

    def begin(self) -> None:
        """A backward begins."""
        self.is_running = True

    def free_all(self) -> None:
        """It has raised: nothing that was gathered stays."""
        for gathers in self.began:
            gathers.free_all()

    def end(self) -> None:
        """It is over."""
        self.is_running = False
        for gathers in self.began:
            gathers.end_backward()
        self.began = []


@dataclass
class Held:
    """A parameter whose module computes with a copy of it."""

    owner: nn.Module
    name: str
    param: nn.Parameter
    copied: torch.Tensor
    before: torch.Tensor


class StaleError(Exception):
    """What is kept is out of date, and to be refused."""


class Phase(enum.Enum):
    """Where a group is in a backward."""

    NOT_REACHED = "not reached"
    BEGUN = "begun"
    OVER = "over"


class Group:
    """The modules that are gathered together.

    Args:
        modules: of one call of ``fully_shard``.
        dtype: that they compute in, if it is another than that of the parameters.
        between: what becomes of what was gathered until backward.

    Attributes:
        ahead: the groups that are gathered when this one's forward has begun.
        ahead_in_backward: the same for backward, in place of the one that ran before it.
        unread: parameters whose shards do not have yet what was written to the full ones that
            modules hold after their forward or backward: docs/torch-compatibility.md says when.
    """

    def __init__(
        self, modules: Sequence[nn.Module], dtype: torch.dtype | None, between: Between
    ) -> None:
        self.modules = list(modules)
        self.dtype = dtype
        self.between = between
        self.ahead: list[Group] = []
        self.ahead_in_backward: list[Group] = []
        self.gathers: Gathers
        for module in modules:
            module.fuzz_group = self  # type: ignore[assignment]
        self._clear()

    def _clear(self) -> None:
        self._is_whole = self._is_left = self._is_kept = self._is_for_forward = False
        self._forward = self._first_node = 0
        self._phase = Phase.NOT_REACHED
        self._to_run: set[nn.Module] = set()
        self._values: dict[_Place, torch.Tensor] = {}
        self._snapshot: dict[_Place, torch.Tensor] | None = None
        self._held: list[Held] = []
        self._copies: list[tuple[torch.Tensor, _Place]] = []
        self.unread: set[torch.Tensor] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        made = copy.copy(self)
        memo[id(self)] = made
        made._clear()
        for name in ("modules", "ahead", "ahead_in_backward", "gathers"):
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        return made

    # -- forward -------------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> bool:
        """The forward of one of the modules begins; say whether it is that of the group."""
        if self.gathers.clock.is_running:  # activation checkpointing computes it again
            self._gather()
            self._hold()
            return False
        begins = not self._to_run
        if begins:
            self._to_run = set(self.modules)
            self._first_node = 0
        if self._forward != self.gathers.forward:
            self._forward = self.gathers.forward
            if not self._is_for_forward:
                self.free_left()
            self._is_for_forward = False
        if self.between is not Between.ALIASED:  # where a write is one to what is gathered
            self._refuse_stale(module)
        self._is_left = False
        self._gather()
        self._hold()
        if begins:
            for other in self.ahead:
                other.gather_ahead()
        return begins

    def leave(self, module: nn.Module, output: Any) -> None:
        """The forward of one of the modules is over, or has raised."""
        if self.gathers.clock.is_running:
            if self._phase is not Phase.BEGUN or self.between is Between.ALIASED:
                self._restore()
            return
        self._to_run.discard(module)
        if output is None:
            self.give_up()
        elif not self._to_run:
            self.finish(output)

    def give_up(self) -> None:
        """The forward of one of them has raised: the next one begins with the first of them."""
        self._to_run.clear()
        self._end_forward()

    def finish(self, output: Any) -> None:
        """The forward of the last of them is over, or there will be no more of them."""
        self._to_run.clear()
        self._end_forward()
        if torch.is_grad_enabled():
            if self._values:  # without parameters there is nothing to gather ahead
                self.gathers.finished.append(self)
            self._mark(output)

    @property
    def is_unfinished(self) -> bool:
        """Whether some of the modules have run, and others not."""
        return bool(self._to_run)

    def _end_forward(self) -> None:
        self._restore()
        if self.between is Between.KEPT:
            self._leave_behind()
        else:
            self.free()

    # -- backward ------------------------------------------------------------------------------

    def mark_input(self, value: Any) -> Any:
        """Have a tensor that forward is given tell when backward has come to it."""
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            value = _EndOfBackward.apply(self, value)  # type: ignore[no-untyped-call]
            self._first_node = value.grad_fn._sequence_nr()
        return value

    def _mark(self, output: Any) -> None:
        begin = functools.partial(self._begin, self._values)
        for tensor in unwrap(output):
            if tensor is None or not tensor.requires_grad:
                continue
            # What is written to in place loses its own hook. What it is a view of may be an input.
            base = None if tensor._base is None else tensor._base.grad_fn
            if base is not None and base._sequence_nr() > self._first_node:
                base.register_prehook(lambda grads: begin(grads[0]))
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    def _begin(self, then: dict[_Place, torch.Tensor], grad: torch.Tensor) -> None:
        """The backward of a forward begins that computed with the values of ``then``."""
        if self._phase is Phase.BEGUN:
            return  # another output of it was there before, or no input told of the end
        self._phase = Phase.BEGUN
        self.gathers.begin_backward()
        self._gather()
        if self.between is not Between.ALIASED:
            self._hold()  # for what is computed again
        if self.between is Between.KEPT:
            now = self._values.items()
            self.gathers.clock.missed |= any(not torch.equal(then[at], value) for at, value in now)
        if self.between in (Between.FREED, Between.KEPT):
            for other in self.ahead_in_backward or self.gathers.expected_after(self):
                other.gather_ahead()

    def end(self) -> None:
        """The backward of the group is over."""
        self._phase = Phase.OVER
        if self.gathers.keeps_after_backward:
            self._restore()
        else:
            self.free()

    def end_backward(self) -> None:
        """The whole backward is over."""
        self._restore()
        self._phase = Phase.NOT_REACHED
        self._snapshot = None
        self.unread.clear()
        if self.gathers.keeps_after_backward and self._is_whole:
            self._leave_behind()
        else:
            self.free()

    # -- gathering -----------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather for the next forward."""
        self.free_left()
        self._gather()
        self._is_left = self._is_for_forward = True

    def reshard(self) -> None:
        """Free what was gathered; in a forward, only if that frees it anyway."""
        if not (self._to_run and self.between is Between.KEPT):
            self.free()

    def free(self) -> None:
        """Forget what was gathered."""
        self._restore()
        self._is_whole = self._is_left = self._is_for_forward = False
        self._snapshot = None
        self.unread.clear()

    def _leave_behind(self) -> None:
        """Leave what was gathered; without synchronization, the next forward uses it.

        ``FSDPModule.set_reshard_after_backward`` says so.
        """
        self._is_left = True
        self._is_kept = self.gathers.keeps_after_backward and not self.gathers.clock.syncs

    def free_left(self) -> None:
        """Forget what an earlier forward or backward has left, unless it is to be kept."""
        if self._is_left and not self._is_kept:
            self.free()

    def gather_ahead(self) -> None:
        """Take the values of now, for when its turn comes."""
        if not self._is_whole and self._snapshot is None:
            self._snapshot = self._look()

    def drop_ahead(self) -> None:
        """Forget values for a turn that did not come."""
        self._snapshot = None

    def write_kept(self, params: Sequence[torch.Tensor]) -> None:
        """Note a write to what modules hold of these parameters.

        If that was kept when their turn was over, it is what their backward computes with.
        """
        if not self._is_whole or self._held or self.between is Between.ALIASED:
            return
        for place, values in self._values.items():
            owner, name = place
            param = owner._parameters[name]
            if param is None or not any(param is each for each in params):
                continue
            values.copy_(param.detach())
            self.unread.add(param)
            for copied, its in self._copies:
                if its == place:
                    copied.copy_(values)  # autograd counts it

    def _gather(self) -> None:
        now, clock = self._look(), self.gathers.clock
        may_miss = clock.is_running or (self._snapshot is not None and not self._is_whole)
        if not self._is_whole:
            self._values = now if self._snapshot is None else self._snapshot
            self._snapshot = None
            self._is_whole = True
            for copied, place in self._copies:  # all have the same memory
                copied.data.copy_(self._values[place])
        if may_miss and self.between in (Between.FREED, Between.KEPT):
            values = self._values.items()
            clock.missed |= any(not torch.equal(now[at], then) for at, then in values)

    def _refuse_stale(self, module: nn.Module) -> None:
        """Raise where a module would compute with values that were written to since."""
        gathered = self._values if self._is_whole else self._snapshot or {}
        for (owner, name), param in self._params([module]).items():
            then = gathered.get((owner, name))
            counted = param not in self.gathers.clock.uncounted
            if counted and then is not None and not torch.equal(param, then):
                raise StaleError(f"{name} was written to since it was gathered")

    def _look(self) -> dict[_Place, torch.Tensor]:
        found = self._params(self.modules)
        return {place: param.detach().clone() for place, param in found.items()}

    def _params(self, modules: Sequence[nn.Module]) -> dict[_Place, nn.Parameter]:
        """The parameters of the modules, not what these hold of them."""
        held = {(each.owner, each.name): each.param for each in self._held}
        return {
            (owner, name): held.get((owner, name), param)
            for module in modules
            for owner in _owners(module)
            for name, param in owner._parameters.items()
            if param is not None
        }

    def _hold(self) -> None:
        """Let the modules compute with what was gathered."""
        if self._held:
            return
        copies: dict[nn.Parameter, torch.Tensor] = {}
        for place, values in self._values.items():
            owner, name = place
            param = owner._parameters[name]
            assert param is not None
            if param not in copies:
                with torch.enable_grad():  # what is computed again looks as it did in forward
                    if self.between is Between.ALIASED:
                        copied = param.view_as(param)
                    else:
                        copied = param.clone() if self.dtype is None else param.to(self.dtype)
                        copied.data.copy_(values)
                copies[param] = copied
            copied = copies[param]
            if self.between in (Between.FREED, Between.KEPT):
                self._copies.append((copied, place))
            self._held.append(Held(owner, name, param, copied, copied.detach().clone()))
            owner._parameters[name] = copied  # type: ignore[assignment]

    def _restore(self) -> None:
        """Let the modules have their parameters again, and those what was written to the copies."""
        for held in self._held:
            is_copy = self.dtype is None and self.between is not Between.ALIASED
            if is_copy and not torch.equal(held.copied.detach(), held.before):
                held.param.data.copy_(held.copied.detach())
                self._values[held.owner, held.name].copy_(held.copied.detach())
            held.owner._parameters[held.name] = held.param
        self._held = []


class _EndOfBackward(torch.autograd.Function):
    """The identity, whose backward says that the group's is over."""

    @staticmethod
    def forward(ctx: Any, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.group.end()
        return None, grad


class Gathers:
    """The groups of a model, in the order of their calls: the root's is the last.

    Attributes:
        forward: the number of the outermost forward.
        finished: the groups whose forward is over, as often as it was, and whose backward may come.
    """

    def __init__(self, groups: list[Group], clock: Clock, traits: Sequence[str]) -> None:
        self.groups = groups
        self.clock = clock
        self.keeps_after_backward = "keep_after_backward" in traits
        self.forward = 0
        self.finished: list[Group] = []
        self._finished_before = 0
        self._marked: dict[Group, int] = {}
        clock.models.append(self)
        for group in groups:
            group.gathers = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Gathers:
        made = copy.copy(self)
        memo[id(self)] = made
        made.groups = copy.deepcopy(self.groups, memo)
        made.finished, made._marked = [], {}
        self.clock.models.append(made)
        return made

    def begin_forward(self) -> None:
        """The outermost forward begins."""
        self.forward += 1
        self._finished_before = len(self.finished)

    def end_forward(self, output: Any) -> None:
        """It is over, or has raised."""
        for group in reversed(self.groups):
            if group.is_unfinished and output is not None:
                group.finish(output)
            elif group.is_unfinished:
                group.give_up()
        if output is None:
            del self.finished[self._finished_before :]
        for group in self.groups:
            group.drop_ahead()
            group.unread.clear()
            if not torch.is_grad_enabled():
                group.free_left()

    def begin_backward(self) -> None:
        """The backward that runs has reached a group."""
        if self not in self.clock.began:
            self.clock.began.append(self)

    def expected_after(self, group: Group) -> list[Group]:
        """The group whose backward follows that of ``group``, which begins."""
        end = self._marked.get(group, len(self.finished))
        places = [at for at, each in enumerate(self.finished[:end]) if each is group]
        if not places:
            return []
        self._marked[group] = places[-1]
        return self.finished[places[-1] - 1 : places[-1]] if places[-1] else []

    def end_backward(self) -> None:
        """The whole backward is over."""
        for group in self.groups:
            group.end_backward()
        self.finished = []
        self._marked = {}

    def free_all(self, *_: object) -> None:
        """State dicts are of parameters that nobody computes with."""
        for group in self.groups:
            group.free()


def compute_with_copies(
    groups: Sequence[Group], clock: Clock, traits: Sequence[str], model: nn.Module
) -> None:
    """Let the modules of ``groups`` compute with copies; ``model`` is that of the last group."""
    Gathers(list(groups), clock, traits)
    for group in groups:
        for module in group.modules:
            module.register_forward_pre_hook(_before, prepend=True, with_kwargs=True)
            module.register_forward_hook(_after, always_call=True)
    model.register_state_dict_pre_hook(_free_all)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_free_all)  # type: ignore[no-untyped-call]


# Functions of the module, for its copies have them too.


def _group_of(module: nn.Module) -> Group:
    group: Any = module.fuzz_group
    assert isinstance(group, Group)
    return group


def _free_all(module: nn.Module, *_: object) -> None:
    _group_of(module).gathers.free_all()


def _before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    group = _group_of(module)
    gathers = group.gathers
    if group is gathers.groups[-1] and not gathers.clock.is_running:
        gathers.begin_forward()
    begins = group.enter(module)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and group.dtype is not None:
            value = value.to(group.dtype)
        return group.mark_input(value) if begins else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _after(module: nn.Module, args: Any, output: Any) -> Any:
    group = _group_of(module)
    gathers = group.gathers
    output = _outlive(module, output)
    group.leave(module, output)
    if group is gathers.groups[-1] and not gathers.clock.is_running:
        gathers.end_forward(output)
    return output


def _outlive(module: nn.Module, output: Any) -> Any:
    """Put a copy in the place of a view of what is freed now: no later gather writes to it."""
    raised = output is None
    if not raised and isinstance(module, FuzzBlock) and module.spec.beside == "parameter":
        main, beside = unwrap(output)
        assert beside is not None
        if _group_of(module).between is Between.FREED:
            return wrap(module.spec.returns, main, beside.clone())
    return output


def _owners(module: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are in the same group as those of ``module`` itself."""
    children = [each for each in module.children() if not hasattr(each, "fuzz_group")]
    return [module, *(owner for child in children for owner in _owners(child))]
