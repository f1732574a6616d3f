"""When things happen: the hooks that run around forward and backward of a sharded module.

    forward pre-hook     unshard the group, cast inputs, mark the inputs for the end of backward
    forward hook         reshard the group, cast outputs, mark the outputs for backward
    output's hook        backward begins here: unshard the group, prefetch the one before it
    inputs' function     backward ends here: take the gradients, reshard, start to reduce
    end of backward      reduce what had no such input; complete every reduction
    forward raised       go back to where the forward began

The outermost module that runs is the root. It is found at its first forward, when all nested calls
have been made.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import _torch
from shardwise.sharding.form import COPIED
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.phase import Phase
from shardwise.sharding.precision import Precision
from shardwise.sharding.root import Root
from shardwise.sharding.tree import map_tensors, tensors_in

_STATE = "_shardwise_state"


class FSDPState:
    """What one ``fully_shard`` call added to its module(s).

    Attributes:
        modules: the modules that were sharded together.
        groups: their parameter groups: one, or none if they had no parameters left.
        device: where they compute.
        phase: where in a step they are.
        root: what they share with the other states of the tree.
        modules_to_run: those of several modules whose forward has still to run in this pass.
        forward_prefetch: states to unshard when this one's forward begins.
        backward_prefetch: states to unshard when this one's backward begins; empty means the
            one that ran before it.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[ParamGroup],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        *,
        keep_if_root: bool,
    ) -> None:
        self.modules = modules
        self.groups = groups
        self.device = device
        self.phase = Phase.IDLE
        self.root: Root[FSDPState] = Root()
        self.modules_to_run: set[nn.Module] = set()
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self._precision = Precision(mp_policy)
        self._keep_if_root = keep_if_root
        self._is_root: bool | None = None
        # The exception that was being handled when the forward began, to know a new one by.
        self._handled: BaseException | None = None
        for module in modules:
            module.__dict__[_STATE] = self
            _torch.answer_torch(module, self)
            module.register_forward_pre_hook(self._forward_pre_hook, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._forward_hook, always_call=True)

    def __deepcopy__(self, memo: dict[Any, Any]) -> FSDPState:
        """Copy for copied modules, to be given a root anew."""
        made = copy.copy(self)
        memo[id(self)] = made
        copied: frozenset[nn.Module] = memo[COPIED]
        made.modules = tuple(copy.deepcopy(m, memo) for m in self.modules if m in copied)
        made.groups = copy.deepcopy(self.groups, memo)
        made.phase = Phase.IDLE
        made.root = copy.deepcopy(self.root, memo)
        made.modules_to_run = set()
        for name in ("forward_prefetch", "backward_prefetch"):
            wanted = [s for s in getattr(self, name) if copied.issuperset(s.modules)]
            setattr(made, name, [copy.deepcopy(state, memo) for state in wanted])
        made._is_root = None
        made._handled = None
        return made

    @property
    def is_root(self) -> bool | None:
        """Whether this is the outermost state; ``None`` before the first forward."""
        return self._is_root

    def settle_reshard_after_forward(self, value: bool) -> None:
        """Set it for all groups, also if this is or becomes the root."""
        self._keep_if_root = False
        for group in self.groups:
            group.options.reshard_after_forward = value

    # -- the first forward ---------------------------------------------------------------------

    def lazy_init(self) -> None:
        """Make this state the root of its tree, unless that is settled.

        Raises:
            RuntimeError: a nested state has already run as a root of its own, or several modules
                sharded together would be the root.
        """
        if self._is_root is not None:
            return
        if len(self.modules) > 1:
            names = ", ".join(type(module).__name__ for module in self.modules)
            raise RuntimeError(
                f"fully_shard([{names}]) cannot be the root: expected one module that contains all "
                "others. Apply fully_shard to the whole model last, and run its forward"
            )
        top = self.modules[0]
        for name, module in top.named_modules():
            state = state_of(module)
            if state is None or state in self.root.states:
                continue
            if state is not self and state._is_root is not None:
                raise RuntimeError(
                    f"{name} has already run forward as a root of its own, before the module that "
                    "contains it. Run the forward of the outermost fully_shard module first"
                )
            self.root.states.append(state)
        self._name_everything(top)
        for state in self.root.states:
            state._is_root = state is self
            state.root = self.root
            for group in state.groups:
                group.refresh()
                group.post_backward = functools.partial(state.root.post_backward, group)
        if self._keep_if_root:
            # Its parameters are needed again as soon as backward begins.
            for group in self.groups:
                group.options.reshard_after_forward = False

    def _name_everything(self, top: nn.Module) -> None:
        names = {module: name for name, module in top.named_modules()}
        for state in self.root.states:
            fqn = ", ".join(names[module] for module in state.modules if module in names)
            for group in state.groups:
                group.fqn = fqn
                for param in group.params:
                    owner = param.form.owners[0]
                    prefix = names.get(owner.module)
                    if prefix is not None:
                        param.form.fqn = f"{prefix}.{owner.name}" if prefix else owner.name

    # -- forward -------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard, and prepare the inputs."""
        if self.phase is Phase.BACKWARD and not _torch.in_backward():
            self.root.reset()  # the last backward raised
        if self.phase is Phase.BACKWARD:
            # Activation checkpointing computes forward again; backward's hooks do the rest.
            for group in self.groups:
                group.unshard(for_backward=True)
                group.wait_for_unshard()
            return self._precision.cast_inputs(*_wait_for_inputs(args, kwargs))
        first = self.phase is not Phase.FORWARD
        self.phase = Phase.FORWARD
        if first:
            args, kwargs = self._enter_root(args, kwargs)
        args, kwargs = self._precision.cast_inputs(args, kwargs)
        for group in self.groups:
            group.unshard()
            group.wait_for_unshard()
        if first:
            self._prefetch_in_forward()
            for group in self.groups:
                if group.phase is Phase.REDUCED and not _torch.in_backward():
                    group.phase = Phase.IDLE  # by a backward of its own; see post_backward()
                args, kwargs = self._mark_inputs(group, args, kwargs)
        if not (first and self.groups):  # otherwise marking them has waited
            args, kwargs = _wait_for_inputs(args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module | None, output: Any) -> Any:
        """Reshard, and prepare the outputs."""
        if self.phase is Phase.BACKWARD:
            return self._precision.cast_outputs(output)
        recomputing = _torch.in_backward()
        for group in self.groups:
            if not recomputing:
                if not self._leaves_whole(group):
                    group.reshard_after_forward()
                if torch.is_grad_enabled():
                    self.root.order.leave_forward(group)
        self._mark_outputs(output)
        self.phase = Phase.IDLE
        if self.root.forward_root is self:
            output = self._leave_root(output)
        return self._precision.cast_outputs(output)

    def _leaves_whole(self, group: ParamGroup) -> bool:
        """Whether backwards of this step leave ``group`` whole, so that forwards may as well.

        A pipeline's do. It also computes gradients of parameters apart from those of inputs, in a
        backward that passes none of the hooks here, and so could not gather.
        """
        accumulates = not (self.root.is_last_backward or group.options.requires_gradient_sync)
        return accumulates and not group.options.reshard_after_backward

    def _enter_root(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.lazy_init()
        if self.root.forward_root is not None:
            return args, kwargs
        if not _torch.in_backward():  # there, activation checkpointing computes forward again
            self.root.begin_forward(self)
        event, self.root.post_optim_event = self.root.post_optim_event, None
        if self.device.type == "cpu":
            return args, kwargs
        if event is not None:
            torch.accelerator.current_stream().wait_event(event)
        to_device = self._to_device
        return map_tensors(to_device, args), map_tensors(to_device, kwargs)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device)

    def _leave_root(self, output: Any) -> Any:
        """End the outermost forward; end it also for groups of which only some modules ran."""
        root = self.root
        for state in reversed(root.states):
            if state is not self and state.modules_to_run:
                state.modules_to_run.clear()
                output = state.post_forward(None, output)
        root.end_forward()
        return output

    def fail_forward(self) -> None:
        """Go back to where this forward began: it raised."""
        self.modules_to_run.clear()
        if _torch.in_backward():
            # Activation checkpointing raises as soon as it has computed again what backward needs,
            # and so does an error, after which the next forward resets everything.
            if self.phase is Phase.FORWARD:
                self.phase = Phase.IDLE
            return
        self.phase = Phase.IDLE
        for group in self.groups:
            group.reshard_after_forward()
        if self.root.forward_root is self:
            for state in self.root.states:
                state.phase = Phase.IDLE
                state.modules_to_run.clear()
            self.root.abort_forward()

    def _prefetch_in_forward(self) -> None:
        if _torch.in_backward():
            return  # activation checkpointing: the order of forward is not followed here
        for group in self.groups:
            following = self.root.order.enter_forward(group)
            if following is not None and not self.forward_prefetch:
                following.unshard()
        for state in self.forward_prefetch:
            for group in state.groups:
                group.unshard()

    def _mark_inputs(
        self, group: ParamGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass inputs through a function whose backward tells that the group's is over.

        What a collective is still making is waited for on the way, see :func:`_torch.arrived`.
        """
        if not torch.is_grad_enabled():
            return args, kwargs
        inputs = [
            _torch.arrived(tensor) for tensor in tensors_in((args, kwargs)) if tensor.requires_grad
        ]
        if not inputs:
            return args, kwargs
        marked = iter(_EndOfBackward.apply(self, group, *inputs))  # type: ignore[no-untyped-call]
        new_args, new_kwargs = map_tensors(
            lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
        )
        return new_args, new_kwargs

    def _mark_outputs(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                if _torch.may_write_through(tensor):
                    self._warn_of_view()
                tensor.register_hook(self._pre_backward)  # type: ignore[no-untyped-call]

    def _warn_of_view(self) -> None:
        names = ", ".join(type(module).__name__ for module in self.modules)
        warnings.warn(
            f"{names} returned a view. An in-place operation on it (out += x) would drop the hook "
            "by which backward gathers the parameters; use out = out + x, or return out.clone()",
            UserWarning,
            stacklevel=2,
        )

    # -- backward ------------------------------------------------------------------------------

    @_torch.outside_graphs
    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        _refuse_graph_of_backward()
        self.phase = Phase.BACKWARD
        self.root.queue_end_of_backward()
        for group in self.groups:
            if group.phase is Phase.BACKWARD:
                continue  # another output of the same forward has been here
            group.phase = Phase.BACKWARD
            if group.options.unshard_in_backward:
                group.unshard(for_backward=True)
                group.wait_for_unshard()
            before = self.root.order.enter_backward(group)
            if before is not None and not self.backward_prefetch:
                self._prefetch_in_backward(before)
        for state in self.backward_prefetch:
            for group in reversed(state.groups):
                self._prefetch_in_backward(group)
        return grad

    def _prefetch_in_backward(self, group: ParamGroup) -> None:
        if group.options.unshard_in_backward:
            group.unshard(for_backward=True)

    def post_backward(self, group: ParamGroup) -> None:
        """Reshard ``group`` and start to reduce its gradients."""
        if self.phase is Phase.FORWARD and self.modules_to_run:
            # Of several modules only some ran (a head on one chunk of its input, say), so no hook
            # on an output saw this backward begin. Whoever runs next begins a pass of its own.
            self.phase = Phase.IDLE
            self.modules_to_run.clear()
            if self.root.forward_root is self:
                self.root.forward_root = None
            self.root.queue_delivery()
        self.root.post_backward(group)

    def run_as_forward(
        self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call ``method(*args, **kwargs)`` between the hooks of a forward."""
        args, kwargs = self._forward_pre_hook(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._handled = None
            self.fail_forward()
            raise
        return self._forward_hook(module, args, output)

    # -- what torch's own code asks for --------------------------------------------------------

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return self.groups

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return self.groups[0] if self.groups else None

    @property
    def _state_ctx(self) -> Root[FSDPState]:
        return self.root

    def _root_post_backward_final_callback(self) -> None:
        self.root.end_backward()

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._forward_pre_hook(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._forward_hook(module, args, output)

    # -- hooks ---------------------------------------------------------------------------------

    @_torch.outside_graphs
    def _forward_pre_hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._handled = sys.exc_info()[1]
        if len(self.modules) > 1 and not self.modules_to_run:
            self.modules_to_run.update(self.modules)
        return self.pre_forward(module, args, kwargs)

    @_torch.outside_graphs
    def _forward_hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        raised = sys.exc_info()[1]
        handled, self._handled = self._handled, None
        if raised is not None and raised is not handled:
            self.fail_forward()
            return None
        if len(self.modules) > 1:
            if module not in self.modules_to_run:
                return self._precision.cast_outputs(output)
            self.modules_to_run.remove(module)
            if self.modules_to_run:
                # The group is still needed by the others.
                return self._precision.cast_outputs(output)
        return self.post_forward(module, output)


class _EndOfBackward(torch.autograd.Function):
    """The identity; its backward runs when the gradients of a group's inputs are known.

    Autograd runs the accumulation of parameter gradients as soon as it is ready, before anything
    else, so by then the group's parameter gradients are there.
    """

    @staticmethod
    def forward(
        ctx: Any, state: FSDPState, group: ParamGroup, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.end = (state, group)
        return inputs

    @staticmethod
    @_torch.outside_graphs
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_graph_of_backward()
        state, group = ctx.end
        state.post_backward(group)
        return (None, None, *grads)


def _wait_for_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as marking them leaves them, for a forward that marks none."""
    if not torch.is_grad_enabled():
        return args, kwargs
    new_args, new_kwargs = map_tensors(_torch.arrived, (args, kwargs))
    return new_args, new_kwargs


def _refuse_graph_of_backward() -> None:
    """Raise where backward itself is being recorded: its parameters will be freed by then."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "backward(create_graph=True): the backward of a backward is not available for sharded "
            "modules, as their parameters are freed in between. Compute what needs it on a module "
            "that fully_shard was not applied to"
        )


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that ``fully_shard`` put on ``module``, if it did."""
    return module.__dict__.get(_STATE)
