"""Running a program: every action once, for all runtimes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.gathering import in_full, own_part
from tests.fuzz import program as p
from tests.fuzz.models import BATCH, FuzzModel, build, device, unwrap
from tests.fuzz.runtimes import Runtime, UndefinedError, Unsharded
from tests.fuzz.trace import Trace

_LR = 0.1


class Boom(Exception):  # noqa: N818 - it is no error of anyone's
    """What a program raises on purpose, and catches."""


class Execution:
    """One run of a program on this rank."""

    def __init__(self, program: p.Program, runtime: Runtime) -> None:
        self.program = program
        self.runtime = runtime
        self.rank = dist.get_rank()
        self.trace = Trace()
        self._at = ""
        self._forwards = 0
        self._losses: list[torch.Tensor] = []
        self._moments: dict[tuple[str, int], list[Any]] = {}
        self._how = "train"
        self._catches = False
        # Then gradients are nobody's yet: each way of sharding delivers them at another time.
        self._in_backward = False
        self._kept: list[tuple[str, dict[str, torch.Tensor]]] = []
        self._outputs: list[tuple[str, torch.Tensor]] = []
        self._model = 0

    def run(self) -> Trace:
        """Run it all, and look at what is there in the end."""
        try:
            self._set_up()
            for index, step in enumerate(self.program.steps):
                self._at = f"step {index} {type(step).__name__}"
                self._do(step)
            self._at = "end"
            self._look()
        except UndefinedError:
            self.trace.undefined = True
        except Exception as error:
            self.trace.raised = f"{self._at}: {type(error).__name__}: {error}"
        return self.trace

    # -- before and after ----------------------------------------------------------------------

    def _set_up(self) -> None:
        self._at = "set up"
        model = build(self.program)
        self._began = {name: value.abs().max().item() for name, value in model.state_dict().items()}
        first = "hooks_first" in self.program.traits
        if first:
            self._add_hooks(model)
        self.runtime.shard(model, self.program)
        if not first:
            self._add_hooks(model)
        self.models = [model]
        self.handles = [dict(model.named_parameters())]
        self.optimizer = self._make_optimizer()

    def _add_hooks(self, model: FuzzModel) -> None:
        model.moment = _unbound(self._moment)
        for index, block in enumerate(model.blocks):
            block.moment = _bound(self._moment, index)
            block.register_forward_pre_hook(_as_hook(self._moment, "pre", index))
            block.register_forward_hook(_as_hook(self._moment, "post", index))

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        params = list(self.handles[0].values())
        kind, _, how = self.program.optimizer.partition("-")
        options: dict[str, Any] = {how: True} if how else {}
        if kind == "in_backward":
            for param in params:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(self._step_in_backward)
            return None
        if kind == "adamw":  # a large eps: noise in gradients of zero stays noise
            return torch.optim.AdamW(params, lr=_LR, eps=1e-1, **options)
        momentum = 0.9 if kind == "momentum" else 0.0
        return torch.optim.SGD(params, lr=_LR, momentum=momentum, **options)

    def _step_in_backward(self, param: nn.Parameter) -> None:
        if self.runtime.average_now(param):
            with torch.no_grad():  # several steps with parts of a gradient are not one with all
                param.add_(torch.tanh(param.grad), alpha=-_LR)
            param.grad = None

    def _look(self) -> None:
        for index, model in enumerate(self.models):
            for name, value in model.state_dict().items():
                # What steps have brought near to zero has the rounding of where it began.
                self.trace.note(f"end: model {index} {name}", value, self._began.get(name, 0.0))
            for name, param in model.named_parameters():
                self.trace.note(f"end: gradient {index} {name}", param.grad)
        if self.optimizer is not None:
            for at, state in enumerate(self.optimizer.state_dict()["state"].values()):
                for name, value in state.items():
                    self.trace.note(f"end: optimizer {at} {name}", torch.as_tensor(value))
        for label, kept in self._kept:
            for name, value in kept.items():
                self.trace.note(f"end: {label} {name}", value)
        for label, output in self._outputs:
            self.trace.note(f"end: {label}", output)

    # -- steps ---------------------------------------------------------------------------------

    def _do(self, step: Any) -> None:
        """Do a step or an action."""
        self._ACTIONS[type(step)](self, step)

    def _forward(self, step: p.Forward) -> None:
        self._model = step.model % len(self.models)
        self._how = step.how
        self._moments = {}
        for at in step.at:
            key = (at.when, at.block % max(len(self.program.blocks), 1))
            self._moments.setdefault(key, []).append(at.do)
        x = self._data()
        self._catches = True
        try:
            with torch.set_grad_enabled(step.how != "no_grad"):
                main, _ = unwrap(self.models[self._model](x))
        except Boom:
            self.trace.note(f"{self._at} caught", None)
            return
        finally:
            self._moments = {}
            self._model = 0
            self._catches = False
        self.trace.note(f"{self._at} output", main)
        self._outputs.append((f"{self._at} output", main.detach()))
        if step.how == "train" and main.requires_grad:
            weights = torch.linspace(-1.0, 2.0, main.numel(), dtype=torch.float64).to(main.device)
            loss = (main.double() * weights.view_as(main)).square().mean()
            self._losses.append(loss)

    def _data(self) -> torch.Tensor:
        self._forwards += 1
        generator = torch.Generator().manual_seed(100 * self._forwards + self.rank)
        data = torch.randn(BATCH, self.program.width, generator=generator)
        return data.to(device(), getattr(torch, self.program.dtype))

    def _backward(self, step: p.Backward) -> None:
        if not self._losses:
            return
        chosen = {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}[step.which]
        loss = torch.stack(self._losses[chosen]).sum()
        if step.graph != "retain":
            del self._losses[chosen]
        # What was loaded by assigning inside of a forward, the program holds no handles of.
        models = [
            [*handles.values(), *model.parameters()]
            for handles, model in zip(self.handles, self.models, strict=True)
        ]
        self._catches = self._in_backward = True
        try:
            self.runtime.backward(loss, models, step.graph)
        except Boom:
            self.trace.note(f"{self._at} caught", None)
            self._losses.clear()
            for model in self.models:
                self.runtime.after_failed_backward(model)
            for param in (param for each in models for param in each):
                param.grad = None
            return
        finally:
            self._catches = self._in_backward = False
        for name, param in self.handles[0].items():
            self.trace.note(f"{self._at} gradient {name}", param.grad)

    def _step(self, step: p.Step) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def _zero_grad(self, step: p.ZeroGrad) -> None:
        for param in self._params():
            if step.to == "none":
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def _clip(self, step: p.Clip) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self._params(), 0.5)
        self.trace.note(f"{self._at} norm", in_full(norm))

    def _sync(self, step: p.Sync) -> None:
        for model in self.models:
            self.runtime.sync(model, step.to)

    def _copy(self, step: p.Copy) -> None:
        made = copy.deepcopy(self.models[0])
        self.models.append(made)
        self.handles.append(dict(made.named_parameters()))

    def _channels_last(self, step: p.ChannelsLast) -> None:
        self.models[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._find_handles()

    # -- actions -------------------------------------------------------------------------------

    def _moment(self, when: str, block: int, output: torch.Tensor | None) -> None:
        """Do what is to be done at a moment of the forward that runs, once."""
        actions = self._moments.pop((when, block), ())
        if not actions:
            return
        if output is None:
            self._do_all(actions)
        else:
            output.register_hook(torch.no_grad()(lambda grad: self._do_all(actions)))

    def _do_all(self, actions: list[Any]) -> None:
        for action in actions:
            self._do(action)
            if isinstance(action, p.Raise) and self.program.parts_ranks:
                return  # one rank does no more of them, so nobody shall

    def _write(self, action: p.Write) -> None:
        if action.form == "grad" and self._in_backward:
            return
        # With mixed precision, what is live is another tensor in every runtime. A rank has rows of
        # its own in shards only: a full parameter that differs between ranks has no meaning.
        is_live = action.form == "live" and not self.program.precision and action.rank is None
        if is_live:
            # A tied parameter has two forms while only one of its groups is gathered: its first
            # name is the one that an unsharded model lists.
            held = dict(self.models[self._model].named_parameters())
            found = [
                held.get(name, param)
                for name, param in self.handles[self._model].items()
                if self._is_of(name, action.block)
            ]
        else:
            found = self._params(action.block)
        form = "no_grad" if action.form == "live" and not is_live else action.form
        with torch.no_grad(), self.runtime.writing(found, form):
            if action.rank is not None:
                for param in found:
                    self._write_rows(param, action)
                return
            if action.form == "foreach" and found:
                torch._foreach_mul_(list(found), action.factor)
                return
            for param in found:
                if action.form == "assign_data":
                    self.runtime.assign_data(param, param.data * action.factor)
                else:
                    _WRITES[action.form](param, action.factor)

    def _write_rows(self, param: torch.Tensor, action: p.Write) -> None:
        assert action.rank is not None
        rows, first = self.runtime.own_rows(param, action.rank)
        numbers = torch.arange(first, first + len(rows))
        factors = (1 + (action.factor - 1) * (1 + numbers % 3)).to(rows)
        rows.mul_(factors.view(-1, *[1] * (rows.ndim - 1)))

    def _ema(self, action: p.Ema) -> None:
        sources, targets = self._params(action.source), self._params(action.target)
        self.runtime.before_read(sources)
        with torch.no_grad(), self.runtime.writing(targets, action.form):
            for source, target in zip(sources, targets, strict=False):
                if source.shape != target.shape:
                    continue
                if action.form == "assign_data":
                    self.runtime.assign_data(target, target.data * 0.5 + source.data * 0.5)
                else:
                    target.mul_(0.5).add_(source, alpha=0.5)

    def _read(self, action: p.Read) -> None:
        if action.rank is not None and action.rank % self.program.world != self.rank:
            return
        label = f"{self._at} read"
        if action.form == "state_dict":
            for name, value in self.models[self._model].state_dict().items():
                self.trace.note(f"{label} {name}", value)
            return
        self.runtime.before_read(self._params(action.block))
        for param in self._params(action.block):
            self.trace.note(label, in_full(param) if action.form == "full" else param)

    def _sleep(self, action: p.Sleep) -> None:
        if action.rank % self.program.world == self.rank:
            time.sleep(action.ms / 1000)

    def _raise(self, action: p.Raise) -> None:
        if not self._catches:
            return
        if self.program.parts_ranks:
            # What the others still do in this forward, nobody shall: the values would part.
            self._moments.clear()
            if isinstance(self.runtime, Unsharded) and self._how == "train":
                self.runtime.parted = True
        if action.rank is None or action.rank % self.program.world == self.rank:
            raise Boom

    def _keep(self, action: p.Keep) -> None:
        if action.what == "grads" and self._in_backward:
            return
        label = f"{self._at} kept {action.what}"
        if action.what == "state":
            self._kept.append((label, dict(self.models[self._model].state_dict())))
            return
        grads = {name: param.grad for name, param in self.handles[self._model].items()}
        self._kept.append((label, {k: v for k, v in grads.items() if v is not None}))

    def _load(self, action: p.Load) -> None:
        model = self.models[self._model]
        if action.source == "kept":
            found = [kept for label, kept in self._kept if label.endswith("state")]
            if not found:
                return
            state = found[0]
        else:
            state = {k: v.detach() * action.factor for k, v in model.state_dict().items()}
        before = dict(model.named_parameters(remove_duplicate=False))
        model.load_state_dict(state, assign=action.how == "assign")
        self.runtime.after_load(model, before)
        self._find_handles()

    def _swap(self, action: p.Swap) -> None:
        if self.program.optimizer == "in_backward":
            # Autograd's hooks on gradients are swapped, Python's list of them is not: a plain
            # parameter has no hook then, and a sharded one, torch's too, still has it.
            return
        # Torch refuses to swap plain parameters of a forward whose backward is to come, or to run
        # that backward, and those that were frozen since one: a shard is no part of a graph.
        is_plain = isinstance(self.runtime, Unsharded)
        if self._losses and is_plain:
            raise UndefinedError
        for param in self._params(action.block):
            if is_plain and not param.requires_grad and param._use_count() > 1:
                raise UndefinedError
            new = nn.Parameter(param.detach() * 0.5, requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, new)

    def _grads(self, action: p.Grads) -> None:
        if self._in_backward and self.program.precision:
            return  # where a plain program casts, its gradient may be on its way to the parameter
        live = dict(self.models[self._model].named_parameters())
        for name, param in self.handles[self._model].items():
            if not self._is_of(name, action.block):
                continue
            # While the backward of its group runs, a shard does not say whether a gradient came
            # before it was frozen: docs/torch-compatibility.md has hooks freeze what modules hold.
            held = live.get(name, param) if self._in_backward else param
            if not held.is_leaf:
                raise UndefinedError  # a copy, whose gradient may be on its way to the parameter
            held.requires_grad_(action.to == "on")

    def _gather(self, action: p.Gather) -> None:
        model = self.models[self._model]
        module: Any = model
        if action.block != p.ROOT and self.program.blocks:
            module = model.blocks[action.block % len(self.program.blocks)]
        self.runtime.gather(module, action.call)

    # -- parameters ----------------------------------------------------------------------------

    def _params(self, block: int | None = None) -> list[nn.Parameter]:
        """The parameters that the program holds since the model was made, or was last loaded."""
        handles = self.handles[self._model]
        return [each for name, each in handles.items() if self._is_of(name, block)]

    def _is_of(self, name: str, block: int | None) -> bool:
        if block is None:
            return True
        if block == p.ROOT or not self.program.blocks:
            return not name.startswith("blocks.")
        return name.startswith(f"blocks.{block % len(self.program.blocks)}.")

    def _find_handles(self) -> None:
        if self._catches:
            return  # inside a forward, modules hold full parameters for a while
        self.handles[self._model] = dict(self.models[self._model].named_parameters())

    _ACTIONS: ClassVar[dict[type, Callable[[Execution, Any], None]]] = {
        p.Forward: _forward,
        p.Backward: _backward,
        p.Step: _step,
        p.ZeroGrad: _zero_grad,
        p.Clip: _clip,
        p.Sync: _sync,
        p.Copy: _copy,
        p.ChannelsLast: _channels_last,
        p.Write: _write,
        p.Ema: _ema,
        p.Read: _read,
        p.Sleep: _sleep,
        p.Raise: _raise,
        p.Keep: _keep,
        p.Load: _load,
        p.Swap: _swap,
        p.Grads: _grads,
        p.Gather: _gather,
    }


# Functions, unlike methods, are not copied with a model.


def _unbound(moment: Callable[..., None]) -> Callable[..., None]:
    return lambda *args: moment(*args)


def _bound(moment: Callable[..., None], index: int) -> Callable[[str], None]:
    return lambda when: moment(when, index, None)


def _as_hook(moment: Callable[..., None], when: str, index: int) -> Callable[..., None]:
    return lambda *_: moment(when, index, None)


def _write_grad(param: torch.Tensor, factor: float) -> None:
    if param.grad is not None:
        param.grad.mul_(factor)


_WRITES: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "no_grad": lambda param, factor: param.mul_(factor),
    "live": lambda param, factor: param.mul_(factor),
    "data": lambda param, factor: param.data.mul_(factor),
    "detach": lambda param, factor: param.detach().mul_(factor),
    "local": lambda param, factor: own_part(param).mul_(factor),
    "copy": lambda param, factor: param.copy_(param * factor),
    "grad": _write_grad,
}
