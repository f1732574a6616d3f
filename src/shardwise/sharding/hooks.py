"""When things happen in forward and backward, from top to bottom.

    before forward       unshard the group, cast inputs, mark them for the end of backward, prefetch
    after forward        reshard the group, cast outputs, mark them for the beginning of backward
    forward raised       return to the state before the forward
    output's hook        the backward of the group begins: unshard, prefetch the group before it
    inputs' hook         the gradients of the group are complete: take them, reshard, reduce

Forward gets views of its inputs. When the gradient of the last one is known, those of the group are
complete. If no input needs a gradient, or one was written to in place, the end of the backward does
that work; see ``Root.end_backward`` in ``state.py``.

Several modules that were sharded together have one state. Their forward begins with the first
module that runs, and ends with the last.
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
from shardwise.base.errors import MisuseError
from shardwise.base.observe import Activity
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import FSDPState, groups_of
from shardwise.sharding.states import BACKWARD, FORWARD, IDLE, REDUCED, SHARDED, Pass
from shardwise.sharding.tree import (
    every_tensor_in,
    map_tensors,
    tensors_and_those_in_objects,
)


def pre_forward(
    state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Unshard the group for a forward of ``module``, and prepare the inputs.

    Returns:
        The args and kwargs to call ``forward()`` with.
    """
    if state.phase is BACKWARD and not autograd.in_backward():
        state.root.reset()  # the last backward raised
    if state.phase is BACKWARD and not (
        state.groups and all(group.phase is not BACKWARD for group in state.groups)
    ):
        # Activation checkpointing recomputes this forward. The hooks of backward do the rest.
        # If no backward of the groups is running, what is recomputed may have its own.
        for group in state.groups:
            group.begin(Activity.FORWARD)
            group.use_now()
        return state.precision.cast_inputs(*wait_for_inputs(args, kwargs))
    first = state.phase is not FORWARD
    state.phase = FORWARD
    if first and state.root.forward_root is None:
        args, kwargs = _enter_root(state, args, kwargs)
    args, kwargs = state.precision.cast_inputs(args, kwargs)
    for group in state.groups:
        if first:
            group.begin(Activity.FORWARD)
        group.enter_forward(module, state.root.forward_number)
    if first:
        if state.forward_prefetch:
            _prefetch_in_forward(state)
        for group in state.groups:
            if group.phase is REDUCED and not autograd.in_backward():
                group.phase = IDLE  # it was reduced by a backward inside this forward
            args, kwargs = mark_inputs(state, group, args, kwargs)
    if not (first and state.groups):  # otherwise mark_inputs has waited
        args, kwargs = wait_for_inputs(args, kwargs)
    return args, kwargs


def post_forward(state: FSDPState, output: Any) -> Any:
    """Reshard the group, and prepare the outputs.

    Returns:
        The output for the caller of ``forward()``.
    """
    for group in state.groups:
        group.end(Activity.FORWARD)
    if state.phase is BACKWARD:
        return state.precision.cast_outputs(output)
    recomputing = autograd.in_backward()
    if not recomputing:
        output = outlive_parameters(state, output)
    for group in state.groups:
        if not recomputing:
            if not _stays_unsharded(state, group):
                group.reshard_after_forward()
            if torch.is_grad_enabled():
                state.root.order.leave_forward(group)
    mark_outputs(state, output)
    state.phase = IDLE
    if state.root.forward_root is state:
        output = _leave_root(state, output)
    return state.precision.cast_outputs(output)


def hand_on(state: FSDPState, output: Any) -> Any:
    """Prepare the outputs of one of several modules, while others have yet to run.

    Returns:
        The output for the caller of the module's ``forward()``.
    """
    if not autograd.in_backward():
        output = outlive_parameters(state, output)
    if torch.is_grad_enabled():
        # This may have been the last one: a program may run the head on one chunk after the other.
        begun = tuple(group.passes.current for group in state.groups)
        for tensor in every_tensor_in(output):
            if tensor.requires_grad and _precede(begun, tensor.grad_fn):
                autograd.add_grad_hook(tensor, functools.partial(_pre_partial, state, begun))
    return state.precision.cast_outputs(output)


def outlive_parameters(state: FSDPState, output: Any) -> Any:
    """Clone outputs that are views of parameters which are freed now.

    Raises:
        MisuseError: a view is inside an object of a user's class, where it cannot be replaced.
    """
    ends = state is state.root.forward_root
    groups = state.root.groups if ends else state.groups
    freeing = [
        group.fulls.storages
        for group in groups
        if group.fulls is not None
        and group.fulls.storages
        and (
            (group in state.groups and group.frees_after_forward)
            # What groups that ran inside have left goes with the outermost forward.
            or (ends and group.ends_with_forward)
        )
    ]
    if not freeing:
        return output
    freed = frozenset[int]().union(*freeing)
    # An object may hold a parameter itself, whose memory comes back. A view's would not.
    fulls = {id(param.full) for group in groups for param in group.params}

    def is_lost(tensor: torch.Tensor) -> bool:
        return dtensor.storage_of(tensor) in freed

    def loses() -> bool:
        found, inside = tensors_and_those_in_objects(output)
        return any(map(is_lost, found + [each for each in inside if id(each) not in fulls]))

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


def _stays_unsharded(state: FSDPState, group: ParamGroup) -> bool:
    """Whether the backwards of this step leave ``group`` unsharded, so that forwards may, too.

    Those of a pipeline do. A pipeline also computes gradients of parameters apart from those of
    inputs, in a backward that triggers none of the hooks here, and so could not gather.
    """
    options = group.options
    reduces = options.requires_gradient_sync or options.reshard_after_backward
    return not (reduces or state.root.ledger.ends_step)


def _enter_root(
    state: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    state.lazy_init()
    if autograd.copies_saved_tensors() and torch.is_grad_enabled():
        # It finds tensors by address and version, and would copy one whose memory is freed.
        raise NotImplementedError(
            f"forward of {type(state.modules[0]).__name__} on rank {dist.get_rank()}: inside "
            "torch.autograd.graph.allow_mutation_on_saved_tensors(), which copies saved tensors. "
            "Those of sharded modules are freed between forward and backward; run the forward "
            "outside of it, and clone what is written to in place"
        )
    if not autograd.in_backward():  # where activation checkpointing recomputes forward
        state.root.begin_forward(state)
    event, state.root.post_optim_event = state.root.post_optim_event, None
    if state.device.type == "cpu":
        return args, kwargs
    if event is not None:
        # Not the other way around: a torch.Stream does not wait for an event of torch.cuda.
        event.wait()
    to_device = functools.partial(_to_device, state)
    return map_tensors(to_device, args), map_tensors(to_device, kwargs)


def _to_device(state: FSDPState, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == state.device else tensor.to(state.device)


def _leave_root(state: FSDPState, output: Any) -> Any:
    """End the outermost forward, also for groups of which only some modules ran."""
    root = state.root
    for other in reversed(root.states):
        if other is not state and other.modules_to_run:
            other.modules_to_run.clear()
            output = post_forward(other, output)
    root.end_forward()
    return output


def fail_forward(state: FSDPState, error: BaseException) -> None:
    """Return to the state before this forward, which raised ``error``."""
    state.modules_to_run.clear()
    for group in state.groups:
        group.end(Activity.FORWARD)
        group.passes.end()
    is_named = hasattr(error, "__notes__")  # a module inside this one has named itself
    if "DTensor" in str(error) and not is_named:  # torch's message names no module
        _explain_shards(state, error)
    if autograd.in_backward():
        # Activation checkpointing raises to stop when it has recomputed what backward needs. After
        # a real error, the next forward resets everything.
        if state.phase is FORWARD:
            state.phase = IDLE
        return
    state.phase = IDLE
    for group in state.groups:
        group.reshard_after_forward()
    if state.root.forward_root is state:
        for other in state.root.states:
            other.phase = IDLE
            other.modules_to_run.clear()
        state.root.abort_forward()


def _explain_shards(state: FSDPState, error: BaseException) -> None:
    """Say why a forward has met shards."""
    names = [group.fqn for group in state.groups]
    where = f"{(names and names[0]) or 'the root'} on rank {dist.get_rank()}"
    if any(group.state is SHARDED for group in state.groups):
        error.add_note(
            f"{where}: its parameters were resharded while its forward ran, as state_dict(), "
            "load_state_dict() and reshard() do. Call those before or after the forward"
        )
        return
    inside = dict.fromkeys(group for module in state.modules for group in groups_of(module))
    apart = [group.fqn for group in inside if group.state is SHARDED]
    if apart:
        shown = ", ".join(apart[:4]) + (", ..." if len(apart) > 4 else "")
        error.add_note(
            f"{where}: parameters of {shown} are sharded apart, and full only while the forward of "
            "those modules runs. If this forward reads one, shard them together: "
            "fully_shard([module, ...]); or call the module in place of reading its parameters"
        )


def _prefetch_in_forward(state: FSDPState) -> None:
    """Prefetch what the user asked for, and nothing else.

    A write to a group between its gather and its forward would be refused, or missed.
    """
    if not autograd.in_backward():  # activation checkpointing does not follow the order of forward
        for other in state.forward_prefetch:
            for group in other.groups:
                group.prefetch()


def mark_inputs(
    state: FSDPState, group: ParamGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace inputs by views of them, whose nodes in the graph run when backward is through.

    Autograd accumulates the gradients of parameters first, as soon as it can. So those of the group
    are complete when the last gradient of an input is known.

    Inputs that a collective is still computing are waited for; see :func:`autograd.wait_in_graph`.
    """
    if not torch.is_grad_enabled():
        return args, kwargs
    begun = group.passes.begin(group.fulls, group.steps_in_backward)
    begun.is_in_transform = transformed = autograd.in_transform()
    # The nodes keep this hook, and the pass keeps the nodes. So the hook must not keep the pass.
    end = _post_input_in_transform if transformed else _post_input
    hook = functools.partial(end, state, group, weakref.ref(begun))

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad and not (
            transformed and autograd.that_needs_grad(tensor) is not None
        ):
            return tensor
        waited = autograd.wait_in_graph(tensor)
        marked = waited.view_as(waited)  # autograd records no view of a tensor of inference mode
        in_graph = autograd.that_needs_grad(marked) if transformed else marked
        if in_graph is None or in_graph.grad_fn is None:
            return tensor
        begun.add_input(in_graph).register_prehook(hook)
        return marked

    args = map_tensors(mark, args)
    return args, map_tensors(mark, kwargs) if kwargs else kwargs


def mark_outputs(state: FSDPState, output: Any) -> None:
    """Hook the outputs: when the gradient of one is known, the backward of the groups begins.

    An in-place operation on a returned view (``out += x``) takes the view, and its hook, out of the
    graph. The base of the view stays in the graph, so it gets a hook, too. An input that the module
    wrote to is also an output, even if it is not returned.
    """
    passes = tuple([group.passes.current for group in state.groups])
    written = [tensor for group in state.groups for tensor in group.passes.end()]
    if not torch.is_grad_enabled():
        return
    for tensor in written:
        _mark_base(state, passes, tensor)
    for tensor in every_tensor_in(output):
        if not tensor.requires_grad and autograd.in_transform():
            found = autograd.that_needs_grad(tensor)
            tensor = tensor if found is None else found
        if not tensor.requires_grad:
            continue
        _mark_base(state, passes, tensor)
        # The node of an input that is returned must not keep the passes, which keep the node.
        keeps = _precede(passes, tensor.grad_fn) or autograd.in_transform()
        kept = passes if keeps else (None,) * len(passes)
        autograd.add_grad_hook(tensor, functools.partial(_pre_backward, state, kept))


def _mark_base(state: FSDPState, passes: tuple[Pass | None, ...], tensor: torch.Tensor) -> None:
    base = autograd.writable_base(tensor)
    if base is not None and base.grad_fn is not None and _precede(passes, base.grad_fn):
        base.grad_fn.register_prehook(functools.partial(_pre_base, state, passes))


def wait_for_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wait for inputs as :func:`mark_inputs` does, without marking them."""
    if not torch.is_grad_enabled():
        return args, kwargs
    new_args, new_kwargs = map_tensors(autograd.wait_in_graph, (args, kwargs))
    return new_args, new_kwargs


def _precede(passes: tuple[Pass | None, ...], node: torch.autograd.graph.Node | None) -> bool:
    """Whether ``node`` was made in the forwards of ``passes``, or later."""
    for begun in passes:  # noqa: SIM110 (asked for every output)
        if begun is not None and not begun.precedes(node):
            return False
    return True


def _pre_partial(state: FSDPState, passes: tuple[Pass | None, ...], grad: torch.Tensor) -> None:
    """Begin a backward before all modules ran. This hook keeps ``passes`` alive as the graph."""
    autograd.queue_after_backward(functools.partial(_end_partial, state))


def _end_partial(state: FSDPState) -> None:
    """Deliver gradients after a backward in which no input needed one, so that no hook saw it."""
    if state.phase is FORWARD and state.modules_to_run:
        for group in reversed(state.groups):
            group.passes.end_backward()
            post_backward(state, group)


@autograd.disable_compile
def _pre_backward(state: FSDPState, passes: tuple[Pass | None, ...], grad: torch.Tensor) -> None:
    """Begin the backward of the groups. This hook keeps ``passes`` alive as long as the graph."""
    if torch.is_grad_enabled():
        _refuse_graph_of_backward(passes)
    state.root.queue_end_of_backward()
    state.phase = BACKWARD
    for group, begun in zip(state.groups, passes, strict=True):
        if begun is not None and begun.fulls is not group.fulls:
            group.refuse_replaced()
        if begun is not None and begun.steps != group.steps_in_backward:
            group.refuse_stepped()
        if group.phase is BACKWARD:
            continue  # another output of the same forward came first
        group.phase = BACKWARD
        group.begin(Activity.BACKWARD)
        group.enter_backward()
        before = state.root.order.enter_backward(group)
        if before is not None and not state.backward_prefetch:
            _prefetch_in_backward(before)
    for other in state.backward_prefetch:
        for group in reversed(other.groups):
            _prefetch_in_backward(group)


def _pre_base(
    state: FSDPState, passes: tuple[Pass | None, ...], grads: tuple[torch.Tensor, ...]
) -> None:
    """Begin the backward if no hook on an output did, since outputs were written to in place."""
    if not any(group.phase is BACKWARD for group in state.groups):
        _pre_backward(state, passes, grads[0])


def _prefetch_in_backward(group: ParamGroup) -> None:
    if group.options.unshard_in_backward:
        group.prefetch()


def post_backward(state: FSDPState, group: ParamGroup) -> None:
    """Reshard ``group`` and start to reduce its gradients."""
    if state.phase is FORWARD and state.modules_to_run:
        # Only some of several modules ran (a head on one chunk of its input, say), so no hook on
        # an output saw this backward begin. The module that runs next begins a new pass.
        state.phase = IDLE
        state.modules_to_run.clear()
        if state.root.forward_root is state:
            state.root.forward_root = None
        state.root.queue_delivery()
    state.root.post_backward(group)


@autograd.disable_compile
def _post_input(
    state: FSDPState, group: ParamGroup, pass_of: weakref.ref[Pass], grads: tuple[torch.Tensor, ...]
) -> None:
    """End the backward of a group's pass when the gradient of its last input is known."""
    if torch.is_grad_enabled():
        raise NotImplementedError(_NO_GRAPH_OF_BACKWARD)
    begun = pass_of()  # None if no output was found
    if state.modules_to_run if begun is None else begun.run_node():
        post_backward(state, group)
    else:
        state.root.queue_end_of_backward()


def _post_input_in_transform(
    state: FSDPState, group: ParamGroup, pass_of: weakref.ref[Pass], grads: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """As :func:`_post_input`, inside ``torch.func.grad`` and other transforms."""
    with torch.no_grad():  # the transforms record every backward, since they may be nested
        _post_input(state, group, pass_of, grads)
    once: tuple[torch.Tensor, ...] = _Once.apply(*grads)  # type: ignore[no-untyped-call]
    return once


class _Once(torch.autograd.Function):
    """The identity of gradients, whose own gradient is refused.

    Autograd would find parameters freed, or add gradients to full parameters that are not reduced.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise NotImplementedError(_NO_GRAPH_OF_BACKWARD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return tangents


_NO_GRAPH_OF_BACKWARD = (
    "backward(create_graph=True), or a reverse-mode transform of the result of another: the "
    "backward of a backward is not available for sharded modules, as their parameters are freed in "
    "between. Detach the inner result, use a forward-mode transform (torch.func.hessian does), or "
    "compute it on a module that fully_shard was not applied to"
)


def _refuse_graph_of_backward(passes: tuple[Pass | None, ...]) -> None:
    """Raise if autograd records this backward: its parameters would be freed by the second one.

    If a transform ran the forward, it always does; :class:`_Once` raises if the record is used.
    """
    if any(begun is None or not begun.is_in_transform for begun in passes):
        raise NotImplementedError(_NO_GRAPH_OF_BACKWARD)


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
    return pre_forward(state, module, args, kwargs)


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
