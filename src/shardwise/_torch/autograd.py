"""Private names of autograd, and of the compiler and the transforms that go through it.

Tried on torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_backward() -> bool:
    """Whether this thread is inside a backward (activation checkpointing recomputes there)."""
    return torch._C._current_graph_task_id() != -1


def backward_id() -> int:
    """A number of the backward that this thread is inside of."""
    return int(torch._C._current_graph_task_id())


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that now runs has finished."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def runs_in_this_backward(node: torch.autograd.graph.Node) -> bool:
    """Whether the backward that now runs goes, or went, through ``node`` of the graph."""
    runs: bool = torch._C._will_engine_execute_node(node)
    return runs


class _WaitInGraph(torch.autograd.Function):
    """The plain tensor that a collective under way makes, with the gradient of the wrapper."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor of its own: autograd marks what is returned, and the wrapper keeps what it has.
        return dtensor.wait_tensor(tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def wait_in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor that needs a gradient, as a node of autograd's graph.

    A compiler that traces backward waits for such an input outside autograd, and then gives it no
    gradient.
    """
    if not (isinstance(tensor, AsyncCollectiveTensor) and tensor.requires_grad):
        return tensor
    return cast(torch.Tensor, _WaitInGraph.apply(tensor))  # type: ignore[no-untyped-call]


def grad_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """What was registered with ``register_hook``, in order."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


def has_post_accumulate_hooks(parameter: torch.Tensor) -> bool:
    """Whether someone reads ``parameter.grad`` as soon as it is there."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def run_post_accumulate_hooks(parameter: torch.Tensor) -> None:
    """Run the hooks that ``register_post_accumulate_grad_hook`` put on ``parameter``."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for hook in (hooks or {}).values():
        hook(parameter)


def set_grad_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Let ``parameter.grad`` have ``dtype``, which is not the parameter's."""
    parameter.grad_dtype = dtype


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows when ``tensor`` is written to; -1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def version_with_local(tensor: torch.Tensor) -> int:
    """A number that grows when ``tensor`` is written to, as ``DTensor`` or as what is in it."""
    version = version_of(tensor)
    return (
        version + version_of(dtensor.local_of(tensor)) if isinstance(tensor, DTensor) else version
    )


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set what :func:`version_of` returns; does nothing where that is not counted."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def writable_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """What ``tensor`` is a view of, if autograd lets the view be written to in place.

    What a custom function returned, ``DTensor.to_local()`` for one, it does not.
    """
    made = torch._C._autograd
    base = tensor._base
    if base is None or made._get_creation_meta(tensor) != made.CreationMeta.DEFAULT:
        return None
    return base


def foreach_norm(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of every tensor, in float32 at least, in one pass for each dtype."""
    found: list[torch.Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        found += torch._foreach_norm(alike, order, dtype=wide)
    return found


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor in place by a 0-dim tensor."""
    torch._foreach_mul_(tensors, factor)


def disable_compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep ``torch.compile`` from tracing ``function``: it runs between graphs.

    ``torch.compiler.disable`` for functions that run thousands of times a step in programs that
    compile nothing: where no compiler listens, one question is all that it costs.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    # The question itself is not traced either: neither from a caller's frame nor as a frame.
    call.__dict__["_torchdynamo_disable"] = True
    set_code_exec_strategy(
        cast(Any, call).__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    )
    return call


def outside_transforms() -> AbstractContextManager[object]:
    """Leave the transforms of ``torch.func`` that are running, for as long as the context lasts.

    Inside of them every tensor that an operation makes is a wrapper, without memory of its own.
    """
    if peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def no_grad() -> AbstractContextManager[object]:
    """Return a context for writes to parameter memory that nothing must record.

    Inside there are no gradients and no ``torch.func`` transforms, and new tensors are not those
    of inference mode.
    """
    stack = ExitStack()
    stack.enter_context(outside_transforms())
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))  # enables gradients
    stack.enter_context(torch.no_grad())
    return stack
