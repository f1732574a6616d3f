"""When things happen in backward, and what forward leaves behind for that.

    inputs' function     forward's inputs pass through it. Its backward runs when the gradients of
                         the group are there: take them, reshard, start to reduce
    output's hook        backward of the group begins: unshard, prefetch the one before it

What no input tells of is done at the end of the whole backward; see ``root.py``.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from shardwise._torch import autograd
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.module_state import ModuleState
from shardwise.sharding.passes import Pass
from shardwise.sharding.phase import Phase
from shardwise.sharding.tree import every_tensor_in, map_tensors, tensors_in


def mark_inputs(
    state: ModuleState, group: ParamGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
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


def mark_outputs(state: ModuleState, output: Any) -> None:
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
    state: ModuleState, passes: tuple[Pass | None, ...], grad: torch.Tensor
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
            _prefetch(before)
    for other in state.backward_prefetch:
        for group in reversed(other.groups):
            _prefetch(group)
    return grad


def _pre_base(
    state: ModuleState, passes: tuple[Pass | None, ...], grads: tuple[torch.Tensor, ...]
) -> None:
    """Begin backward where no hook on an output has: what they were on was written to in place."""
    if not any(group.phase is Phase.BACKWARD for group in state.groups):
        _pre_backward(state, passes, grads[0])


def _prefetch(group: ParamGroup) -> None:
    if group.options.unshard_in_backward:
        group.unshard()


def post_backward(state: ModuleState, group: ParamGroup) -> None:
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
        ctx: Any, state: ModuleState, group: ParamGroup, begun: Pass, *inputs: torch.Tensor
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
