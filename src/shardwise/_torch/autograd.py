"""Private names of autograd, the compiler, function transforms, operators and optimizers."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._C._functorch import get_unwrapped, is_batchedtensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from shardwise._torch import dtensor

_F = TypeVar("_F", bound=Callable[..., Any])


def backward_id() -> int | None:
    """Return a number that identifies the backward that this thread is in; ``None`` outside."""
    found: int = torch._C._current_graph_task_id()
    return None if found == -1 else found


def in_backward() -> bool:
    """Whether this thread is inside a backward (activation checkpointing recomputes there)."""
    return torch._C._current_graph_task_id() != -1


def copies_saved_tensors() -> bool:
    """Whether ``torch.autograd.graph.allow_mutation_on_saved_tensors`` is active."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def sequence_number() -> int:
    """Return the number that the next node of the graph on this thread gets; see ``Node``."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def running_node_number() -> int | None:
    """Return the number of the node that backward runs now; ``None`` outside, and for leaves."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number: int = node._sequence_nr()
    return None if number > _MOST else number


#: (tensors, factor): multiply every tensor in place by a 0-dim tensor.
foreach_mul_ = torch._foreach_mul_
#: (starts, ends, weight) -> tensors ``weight`` of the way from ``starts`` to ``ends``.
foreach_lerp = torch._foreach_lerp
#: (starts, ends, weight): move ``starts`` in place by ``weight`` of the way to ``ends``.
foreach_lerp_ = torch._foreach_lerp_
#: (tensors): replace every element by its sign.
foreach_sign_ = torch._foreach_sign_

#: Nodes that accumulate gradients have the largest number that there is.
_MOST = 2**62


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward has finished."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def runs_in_this_backward(node: torch.autograd.graph.Node) -> bool:
    """Whether the current backward executes, or has executed, ``node`` of the graph."""
    runs: bool = torch._C._will_engine_execute_node(node)
    return runs


def is_newer(node: torch.autograd.graph.Node, other: torch.autograd.graph.Node) -> bool:
    """Whether this thread made ``node`` after ``other``, so that ``other`` cannot depend on it."""
    return node._sequence_nr() > other._sequence_nr()


class _WaitInGraph(torch.autograd.Function):
    """Return the plain tensor of a running collective; its gradient is that of the wrapper."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # A new tensor: autograd marks what is returned, and the wrapper must keep its own.
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


def add_grad_hook(tensor: Any, hook: Callable[[torch.Tensor], Any]) -> None:
    """Register a hook on the gradient of ``tensor``, for good.

    ``register_hook`` also makes a handle that removes it, which takes longer than the rest.
    """
    if type(tensor) is not torch.Tensor:
        tensor.register_hook(hook)
        return
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    hooks[hook] = hook


#: The key of :func:`set_first_grad_hook` among the hooks of a tensor; those of users count from 0.
_FIRST = -1


def set_first_grad_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Have autograd call ``hook`` with each gradient of ``parameter``, before those of users.

    It stays while ``parameter`` is frozen. It is to be set again after ``swap_tensors``, which
    keeps the hooks of a tensor in Python, and no longer calls them.
    """
    hooks: Any = parameter._backward_hooks
    if hooks is None:
        hooks = OrderedDict()
    hooks[_FIRST] = hook
    hooks.move_to_end(_FIRST, last=False)
    parameter._backward_hooks = hooks  # also if it is the same: this tells autograd


def grad_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Return the hooks registered with ``register_hook``, in order."""
    hooks = parameter._backward_hooks
    if not hooks or (len(hooks) == 1 and _FIRST in hooks):  # the rule: this runs in every step
        return []
    return [hook for key, hook in hooks.items() if key != _FIRST]


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the current backward adds to ``parameter.grad``: not that of ``autograd.grad``."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return runs_in_this_backward(node)
    except RuntimeError:  # torch does not say, as the gradient is what autograd.grad returns
        return False


def has_post_accumulate_hooks(parameter: Any) -> bool:
    """Whether a hook reads ``parameter.grad`` as soon as it is accumulated."""
    return bool(parameter._post_accumulate_grad_hooks)


def share_hooks(parameter: Any, other: Any) -> None:
    """Give ``other`` the hooks of ``parameter``, whose handles then remove them from both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, name):
            setattr(other, name, getattr(parameter, name))


def is_in_graph(parameter: torch.Tensor) -> bool:
    """Whether a graph of autograd that is alive leads to ``parameter``."""
    return int(parameter._use_count()) > 1  # type: ignore[attr-defined]


def run_post_accumulate_hooks(parameter: Any) -> None:
    """Run the hooks registered with ``register_post_accumulate_grad_hook``."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows when ``tensor`` is modified; -1 if that is not counted."""
    try:
        return tensor._version
    except RuntimeError:  # a tensor of inference mode
        return -1


def version_with_local(tensor: torch.Tensor) -> int:
    """Return a number that grows when ``tensor``, or the local tensor in it, is modified."""
    local = dtensor.plain(tensor)
    try:
        return tensor._version if local is tensor else tensor._version + local._version
    except RuntimeError:  # one of them is a tensor of inference mode
        return version_of(tensor) + (0 if local is tensor else version_of(local))


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return what :func:`version_of` does for each of some tensors."""
    try:
        return [each._version for each in tensors]
    except RuntimeError:  # one of them is a tensor of inference mode
        return [version_of(each) for each in tensors]


def version_of_sharded(parameter: Any) -> tuple[int, int]:
    """Return :func:`version_with_local` of a ``DTensor``, and which local tensor it has."""
    local = parameter._local_tensor
    try:
        return parameter._version + local._version, id(local)
    except RuntimeError:  # one of them is a tensor of inference mode
        return version_with_local(parameter), id(local)


def look_at_sharded(parameter: Any, steps: int) -> tuple[int, int, int, int]:
    """Return :func:`version_of_sharded` of a ``DTensor``, and its steps and address, in a row."""
    local = parameter._local_tensor
    try:
        version = parameter._version + local._version
    except RuntimeError:  # one of them is a tensor of inference mode
        version = version_with_local(parameter)
    return version, steps, id(local), local.data_ptr()


def look_at(parameters: Sequence[torch.nn.Parameter]) -> list[tuple[int, int]]:
    """Return what changes when each of some parameters is written to, or gets other data."""
    return [
        (each._version, each.data_ptr())
        if type(each) is torch.nn.Parameter
        else (version_with_local(each), 0)  # a subclass has no address
        for each in parameters
    ]


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set what :func:`version_of` returns of each tensor. None is a tensor of inference mode."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def writable_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what ``tensor`` is a view of, if autograd allows the view to be modified in place.

    It does not allow that for what a custom function returned, such as ``DTensor.to_local()``.
    """
    native = torch._C._autograd
    base = tensor._base
    if base is None or native._get_creation_meta(tensor) != native.CreationMeta.DEFAULT:
        return None
    return base


def foreach_norm(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Compute the norm of each tensor, in float32 or wider, in one pass per dtype."""
    found: list[torch.Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        found += torch._foreach_norm(alike, order, dtype=wide)
    return found


def foreach_add_(tensors: Any, others: Any, factor: float) -> None:
    """Add ``factor`` times ``others`` in place."""
    torch._foreach_add_(tensors, others, alpha=factor)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let learning rate schedulers know that ``optimizer`` has stepped, without a call of its step.

    Otherwise they warn that it has to step before they do.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_torchs_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all code of an optimizer's step is torch's: no program has put its own there."""
    methods = type(optimizer).step, optimizer._init_group  # type: ignore[attr-defined]
    return all(each.__module__.startswith("torch.optim.") for each in methods)


def is_read_by_step(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether torch's code of a step calls the function that calls this one."""
    frame = sys._getframe(2)
    is_of_step = frame.f_code.co_name in ("step", "_init_group")
    return is_of_step and frame.f_globals.get("__name__") == kind.step.__module__


def disable_compile(function: _F) -> _F:
    """Keep ``torch.compile`` from tracing ``function``, which then runs between graphs.

    Like ``torch.compiler.disable``, but without a wrapper: it runs thousands of times per step.
    """
    function.__dict__["_torchdynamo_disable"] = True
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(cast(Any, function).__code__, skip)
    return function


def in_transform() -> bool:
    """Whether a ``torch.func`` transform is running."""
    return peek_interpreter_stack() is not None


def that_needs_grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that needs a gradient: ``tensor``, or what a ``vmap`` has wrapped in it.

    Returns:
        The tensor, or ``None`` if none of them needs a gradient.
    """
    while not tensor.requires_grad:
        if not is_batchedtensor(tensor):
            return None
        tensor = get_unwrapped(tensor)
    return tensor


def outside_transforms() -> AbstractContextManager[object]:
    """Leave the running ``torch.func`` transforms for the duration of the context.

    Inside a transform, every tensor that an operation creates is a wrapper without memory.
    """
    if peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


class no_grad:  # noqa: N801 (as torch's)
    """A context for writes to parameter memory that nothing must record.

    Inside there are no gradients and no ``torch.func`` transforms, and new tensors are not those
    of inference mode. It is entered several times for each group and step, so it does nothing more
    than it must.
    """

    __slots__ = ("_before", "_outside")

    def __enter__(self) -> None:
        self._outside: ExitStack | None = None
        self._before = torch.is_grad_enabled()
        if peek_interpreter_stack() is not None or torch.is_inference_mode_enabled():
            self._outside = ExitStack()
            self._outside.enter_context(outside_transforms())
            if torch.is_inference_mode_enabled():
                self._outside.enter_context(torch.inference_mode(False))  # enables gradients
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        if self._outside is not None:
            self._outside.close()
        torch._C._set_grad_enabled(self._before)


def outside_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in the dtypes of tensors on ``device``, although backward may run under autocast."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


#: Products of groups of rows with a matrix each, as of the experts of a model.
GROUPED_PRODUCTS: tuple[Any, ...] = (torch.ops.aten._grouped_mm.default,)

#: What functional collectives reduce to shards with, as sequence parallelism does.
REDUCE_SCATTER: Any = torch.ops._c10d_functional.reduce_scatter_tensor.default

#: Operators of attention, and the position of their argument ``dropout_p``.
ATTENTION: dict[Any, int] = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
}

#: (query, key, value, dropout_p, is_causal) -> (out, logsumexp), on CPUs.
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
#: (grad, query, key, value, out, logsumexp, dropout_p, is_causal) -> three gradients.
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
