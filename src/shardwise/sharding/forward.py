"""When things happen in forward.

before it        unshard the group, cast inputs, mark them for the end of backward, prefetch
after it         reshard the group, cast outputs, mark them for the beginning of backward
where it raised  go back to where it began
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import autograd, dtensor
from shardwise.errors import MisuseError
from shardwise.sharding.backward import mark_inputs, mark_outputs, wait_for_inputs
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.group_state import GroupState
from shardwise.sharding.module_state import ModuleState
from shardwise.sharding.phase import Phase
from shardwise.sharding.tree import map_tensors, tensors_and_those_in_objects


def pre_forward(
    state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        _prefetch(state)
        for group in state.groups:
            if group.phase is Phase.REDUCED and not autograd.in_backward():
                group.phase = Phase.IDLE  # by a backward of its own; see backward.py
            args, kwargs = mark_inputs(state, group, args, kwargs)
    if not (first and state.groups):  # otherwise marking them has waited
        args, kwargs = wait_for_inputs(args, kwargs)
    return args, kwargs


def post_forward(state: ModuleState, output: Any) -> Any:
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


def hand_on(state: ModuleState, output: Any) -> Any:
    """Prepare the outputs of one of several modules, of which others have still to run.

    Returns:
        What the caller of the module's ``forward()`` is to get.
    """
    if not autograd.in_backward():
        output = outlive_parameters(state, output)
    return state.precision.cast_outputs(output)


def outlive_parameters(state: ModuleState, output: Any) -> Any:
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


def _leaves_whole(state: ModuleState, group: ParamGroup) -> bool:
    """Whether backwards of this step leave ``group`` whole, so that forwards may as well.

    A pipeline's do. It also computes gradients of parameters apart from those of inputs, in a
    backward that passes none of the hooks here, and so could not gather.
    """
    accumulates = not (state.root.is_last_backward or group.options.requires_gradient_sync)
    return accumulates and not group.options.reshard_after_backward


def _enter_root(
    state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]
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


def _to_device(state: ModuleState, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == state.device else tensor.to(state.device)


def _leave_root(state: ModuleState, output: Any) -> Any:
    """End the outermost forward; end it also for groups of which only some modules ran."""
    root = state.root
    for other in reversed(root.states):
        if other is not state and other.modules_to_run:
            other.modules_to_run.clear()
            output = post_forward(other, output)
    root.end_forward()
    return output


def fail_forward(state: ModuleState, error: BaseException) -> None:
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


def _prefetch(state: ModuleState) -> None:
    """Gather ahead what the user asked for, and nothing else.

    What is written to a group between its gather and its turn would be missed.
    """
    if autograd.in_backward():
        return  # activation checkpointing: the order of forward is not followed here
    for other in state.forward_prefetch:
        for group in other.groups:
            group.unshard()
