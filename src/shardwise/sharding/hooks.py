"""When things happen in forward.

before it        unshard the group, cast inputs, mark them for the end of backward, prefetch
after it         reshard the group, cast outputs, mark them for the beginning of backward
where it raised  go back to where it began

When things happen in backward, and what forward leaves behind for that.

    inputs' function     forward's inputs pass through it. Its backward runs when the gradients of
                         the group are there: take them, reshard, start to reduce
    output's hook        backward of the group begins: unshard, prefetch the one before it

What no input tells of is done at the end of the whole backward; see ``root.py``.

The hooks of a sharded module: what calls ``forward.py``, and by it ``backward.py``.

Several modules that were sharded together have one state: their forward begins with the first one
that runs, and ends with the last.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch import autograd, dtensor, fsdp
from shardwise.errors import MisuseError
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import FSDPState
from shardwise.sharding.states import GroupState, Pass, Phase
from shardwise.sharding.tree import (
    every_tensor_in,
    map_tensors,
    tensors_and_those_in_objects,
    tensors_in,
)


def pre_forward(
    state: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Unshard, and prepare the inputs.

    Returns:
        What ``forward()`` is to be called with.
    """
    if state.phase is Phase.BACKWARD and not autograd.in_backward():
        state.root.reset()  # the last backward raised
    if state.phase is Phase.BACKWARD:
        # Activation checkpointing computes forward again; backward's hooks do the rest.
        for group in state.groups:
            group.unshard()
            group.wait_for_unshard()
        return state.precision.cast_inputs(*wait_for_inputs(args, kwargs))
    first = state.phase is not Phase.FORWARD
    state.phase = Phase.FORWARD
    if first:
        args, kwargs = _enter_root(state, args, kwargs)
    args, kwargs = state.precision.cast_inputs(args, kwargs)
    for group in state.groups:
        group.enter_forward(state.root.forward_number)
    if first:
        _prefetch_in_forward(state)
        for group in state.groups:
            if group.phase is Phase.REDUCED and not autograd.in_backward():
                group.phase = Phase.IDLE  # by a backward of its own; see backward.py
            args, kwargs = mark_inputs(state, group, args, kwargs)
    if not (first and state.groups):  # otherwise marking them has waited
        args, kwargs = wait_for_inputs(args, kwargs)
    return args, kwargs


def post_forward(state: FSDPState, output: Any) -> Any:
    """Reshard, and prepare the outputs.

    Returns:
        What the caller of ``forward()`` is to get.
    """
    if state.phase is Phase.BACKWARD:
        return state.precision.cast_outputs(output)
    recomputing = autograd.in_backward()
    if not recomputing:
        output = outlive_parameters(state, output)
    for group in state.groups:
        if not recomputing:
            if not _leaves_whole(state, group):
                group.reshard_after_forward()
            if torch.is_grad_enabled():
                state.root.order.leave_forward(group)
    mark_outputs(state, output)
    state.phase = Phase.IDLE
    if state.root.forward_root is state:
        output = _leave_root(state, output)
    return state.precision.cast_outputs(output)


def hand_on(state: FSDPState, output: Any) -> Any:
    """Prepare the outputs of one of several modules, of which others have still to run.

    Returns:
        What the caller of the module's ``forward()`` is to get.
    """
    if not autograd.in_backward():
        output = outlive_parameters(state, output)
    return state.precision.cast_outputs(output)


def outlive_parameters(state: FSDPState, output: Any) -> Any:
    """Give what is returned of parameters that are freed now (a part of one, say) its own memory.

    Raises:
        MisuseError: it is inside an object of a user's class, where it cannot be exchanged.
    """
    freed = frozenset[int]().union(
        *(group.full_storages for group in state.groups if group.frees_after_forward)
    )
    if not freed:
        return output
    # Who holds a parameter itself, in an object, sees it come and go; a view of it, only go.
    fulls = {id(param.full) for group in state.groups for param in group.params}

    def is_lost(tensor: torch.Tensor) -> bool:
        return dtensor.storage_of(tensor) in freed

    def loses() -> bool:
        found, inside = tensors_and_those_in_objects(output)
        return any(map(is_lost, found)) or any(
            is_lost(tensor) for tensor in inside if id(tensor) not in fulls
        )

    if not loses():
        return output
    output = map_tensors(lambda tensor: tensor.clone() if is_lost(tensor) else tensor, output)
    if loses():
        raise MisuseError(
            f"{state.groups[0].fqn or 'the root'} on rank {dist.get_rank()}: "
            f"{type(state.modules[0]).__name__} returns a view of its own parameter inside an "
            "object. The parameter is freed now, and the view with it; return a clone() of it, or "
            "shard the module with reshard_after_forward=False"
        )
    return output


def _leaves_whole(state: FSDPState, group: ParamGroup) -> bool:
    """Whether backwards of this step leave ``group`` whole, so that forwards may as well.

    A pipeline's do. It also computes gradients of parameters apart from those of inputs, in a
    backward that passes none of the hooks here, and so could not gather.
    """
    accumulates = not (state.root.is_last_backward or group.options.requires_gradient_sync)
    return accumulates and not group.options.reshard_after_backward


def _enter_root(
    state: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    state.lazy_init()
    if state.root.forward_root is not None:
        return args, kwargs
    if not autograd.in_backward():  # there, activation checkpointing computes forward again
        state.root.begin_forward(state)
    event, state.root.post_optim_event = state.root.post_optim_event, None
    if state.device.type == "cpu":
        return args, kwargs
    if event is not None:
        torch.accelerator.current_stream().wait_event(event)
    to_device = functools.partial(_to_device, state)
    return map_tensors(to_device, args), map_tensors(to_device, kwargs)


def _to_device(state: FSDPState, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == state.device else tensor.to(state.device)


def _leave_root(state: FSDPState, output: Any) -> Any:
    """End the outermost forward; end it also for groups of which only some modules ran."""
    root = state.root
    for other in reversed(root.states):
        if other is not state and other.modules_to_run:
            other.modules_to_run.clear()
            output = post_forward(other, output)
    root.end_forward()
    return output


def fail_forward(state: FSDPState, error: BaseException) -> None:
    """Go back to where this forward began: it raised ``error``."""
    state.modules_to_run.clear()
    for group in state.groups:
        is_named = hasattr(error, "__notes__")  # by a module within this one
        if group.state is GroupState.SHARDED and "DTensor" in str(error) and not is_named:
            # Torch's message names no module.
            error.add_note(
                f"{group.fqn or 'the root'} on rank {dist.get_rank()}: its parameters were "
                "resharded while its forward ran, as state_dict(), load_state_dict() and reshard() "
                "do. Call those before or after the forward"
            )
    if autograd.in_backward():
        # Activation checkpointing raises as soon as it has computed again what backward needs,
        # and so does an error, after which the next forward resets everything.
        if state.phase is Phase.FORWARD:
            state.phase = Phase.IDLE
        return
    state.phase = Phase.IDLE
    for group in state.groups:
        group.reshard_after_forward()
    if state.root.forward_root is state:
        for other in state.root.states:
            other.phase = Phase.IDLE
            other.modules_to_run.clear()
        state.root.abort_forward()


def _prefetch_in_forward(state: FSDPState) -> None:
    """Gather ahead what the user asked for, and nothing else.

    What is written to a group between its gather and its turn would be missed.
    """
    if autograd.in_backward():
        return  # activation checkpointing: the order of forward is not followed here
    for other in state.forward_prefetch:
        for group in other.groups:
            group.unshard()


def mark_inputs(
    state: FSDPState, group: ParamGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass inputs through a function whose backward tells that the group's is over.

    What a collective is still making is waited for on the way, see :func:`autograd.wait_in_graph`.
    """
    if not torch.is_grad_enabled():
        return args, kwargs
    begun = group.passes.begin(group.makes)
    inputs = [
        autograd.wait_in_graph(tensor)
        for tensor in tensors_in((args, kwargs))
        if tensor.requires_grad
    ]
    if not inputs:
        return args, kwargs
    marked = iter(_EndOfBackward.apply(state, group, begun, *inputs))  # type: ignore[no-untyped-call]
    new_args, new_kwargs = map_tensors(
        lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
    )
    return new_args, new_kwargs


def mark_outputs(state: FSDPState, output: Any) -> None:
    """Hook what forward returned: when its gradient is known, backward of the groups begins.

    An in-place operation on a view that is returned (``out += x``) takes the view out of the graph,
    and with it the hook. What the view is of stays in it: so that has one, too.
    """
    if not torch.is_grad_enabled():
        return
    passes = tuple(group.passes.end() for group in state.groups)
    hook = functools.partial(_pre_backward, state, passes)
    for tensor in every_tensor_in(output):
        if tensor.requires_grad:
            base = autograd.writable_base(tensor)
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(functools.partial(_pre_base, state, passes))
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def wait_for_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as marking them leaves them, for a forward that marks none."""
    if not torch.is_grad_enabled():
        return args, kwargs
    new_args, new_kwargs = map_tensors(autograd.wait_in_graph, (args, kwargs))
    return new_args, new_kwargs


@autograd.disable_compile
def _pre_backward(
    state: FSDPState, passes: tuple[Pass | None, ...], grad: torch.Tensor
) -> torch.Tensor:
    """Begin backward of the groups. The graph holds ``passes`` by this hook."""
    _refuse_graph_of_backward()
    state.root.queue_end_of_backward()
    state.phase = Phase.BACKWARD
    for group, begun in zip(state.groups, passes, strict=True):
        if begun is not None and begun.makes != group.makes:
            group.refuse_replaced()
        if group.phase is Phase.BACKWARD:
            continue  # another output of the same forward has been here
        group.phase = Phase.BACKWARD
        group.enter_backward()
        before = state.root.order.enter_backward(group)
        if before is not None and not state.backward_prefetch:
            _prefetch_in_backward(before)
    for other in state.backward_prefetch:
        for group in reversed(other.groups):
            _prefetch_in_backward(group)
    return grad


def _pre_base(
    state: FSDPState, passes: tuple[Pass | None, ...], grads: tuple[torch.Tensor, ...]
) -> None:
    """Begin backward where no hook on an output has: what they were on was written to in place."""
    if not any(group.phase is Phase.BACKWARD for group in state.groups):
        _pre_backward(state, passes, grads[0])


def _prefetch_in_backward(group: ParamGroup) -> None:
    if group.options.unshard_in_backward:
        group.unshard()


def post_backward(state: FSDPState, group: ParamGroup) -> None:
    """Reshard ``group`` and start to reduce its gradients."""
    if state.phase is Phase.FORWARD and state.modules_to_run:
        # Of several modules only some ran (a head on one chunk of its input, say), so no hook
        # on an output saw this backward begin. Whoever runs next begins a pass of its own.
        state.phase = Phase.IDLE
        state.modules_to_run.clear()
        if state.root.forward_root is state:
            state.root.forward_root = None
        state.root.queue_delivery()
    state.root.post_backward(group)


class _EndOfBackward(torch.autograd.Function):
    """The identity; its backward runs when the gradients of a group's inputs are known.

    Autograd runs the accumulation of parameter gradients as soon as it is ready, before anything
    else, so by then the group's parameter gradients are there.
    """

    @staticmethod
    def forward(
        ctx: Any, state: FSDPState, group: ParamGroup, begun: Pass, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        begun.node = weakref.ref(ctx)
        ctx.end = (state, group, begun)
        return inputs

    @staticmethod
    @autograd.disable_compile
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_graph_of_backward()
        state, group, begun = ctx.end
        begun.end_backward()
        post_backward(state, group)
        return (None, None, None, *grads)


def _refuse_graph_of_backward() -> None:
    """Raise where backward itself is being recorded: its parameters will be freed by then."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "backward(create_graph=True): the backward of a backward is not available for sharded "
            "modules, as their parameters are freed in between. Compute what needs it on a module "
            "that fully_shard was not applied to"
        )


def install(state: FSDPState) -> None:
    """Register the hooks of ``state`` on its modules."""
    before = functools.partial(_before_forward, state)
    after = functools.partial(_after_forward, state)
    state.before_forward, state.after_forward = before, after
    for module in state.modules:
        fsdp.set_fsdp_state(module, state)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)


def run_as_forward(
    state: FSDPState, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call ``method(*args, **kwargs)`` between the hooks of a forward of ``module``."""
    args, kwargs = _before_forward(state, module, args, kwargs)
    try:
        output = method(*args, **kwargs)
    except BaseException as error:
        state.handled.pop()
        fail_forward(state, error)
        raise
    return _after_forward(state, module, args, output)


@autograd.disable_compile
def _before_forward(
    state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    state.handled.append(sys.exc_info()[1])
    if len(state.modules) > 1 and not state.modules_to_run:
        state.modules_to_run.update(state.modules)
    return pre_forward(state, args, kwargs)


@autograd.disable_compile
def _after_forward(state: FSDPState, module: nn.Module, args: Any, output: Any) -> Any:
    raised = sys.exc_info()[1]
    handled = state.handled.pop() if state.handled else None
    if raised is not None and raised is not handled:
        fail_forward(state, raised)
        return None
    if len(state.modules) > 1:
        its_turn = module in state.modules_to_run
        state.modules_to_run.discard(module)
        if state.modules_to_run or not its_turn:
            # The other modules still need the group. It is freed after them.
            return hand_on(state, output)
    return post_forward(state, output)
