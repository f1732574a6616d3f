"""What trainings do with the blocks of a model: recompute their activations, and shard them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise._torch import autograd, fsdp, saved
from shardwise.base.arguments import check_arguments
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.frontends.strategies import Checkpointing, Runtime
from shardwise.sharding.state import gather_in_order, groups_of
from shardwise.transport.wire import Wire

_Module = TypeVar("_Module", bound=nn.Module)
_MARK = "_shardwise_checkpointed"
_OFFLOADED = "_shardwise_offloaded"


#: Returns the contexts around a forward, and around its recomputation in backward.
Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint_module(
    module: _Module, *, preserve_rng_state: bool = True, context_fn: Contexts | None = None
) -> _Module:
    """Keep only the inputs of ``module`` for backward, and recompute its activations there.

    Replaces ``module.forward``. The module keeps its identity, class, names and hooks, and batch
    norms inside it update their statistics once. It can be combined with sharding in either order.
    With an ``auto_wrap_policy``:

        def wrapper(module, *args, **kwargs):
            return FullyShardedDataParallel(checkpoint_module(module), *args, **kwargs)

        model = FullyShardedDataParallel(model, auto_wrap_policy=p, auto_wrapper_callable=wrapper)

    Source: ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``.

    Args:
        module: the module. A second call has no effect.
        preserve_rng_state: draw the same random numbers again, for dropout. This saves the state of
            the random number generators in each forward.
        context_fn: returns the contexts around forward and around its recomputation, as for
            ``torch.utils.checkpoint.checkpoint``: those of ``create_selective_checkpoint_contexts``
            keep what some operators compute.

    Returns:
        ``module``.

    Raises:
        ValueError: :func:`offload_activations` came first.
    """
    check_arguments(checkpoint_module, locals())
    if _MARK in module.__dict__:
        return module
    if _OFFLOADED in module.__dict__:
        raise ValueError(
            f"checkpoint_module: found a {type(module).__name__} whose activations are offloaded, "
            "expected the other order: offload_activations(checkpoint_module(module), policy)"
        )
    patched = _patched_forward(module)

    @functools.wraps(module.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A partial function, into which torch.compile sees; it does not into a new method.
        run = functools.partial(patched or type(self).forward, self)
        contexts = context_fn
        given: dict[str, Any] = {}
        # A compiler has the writes to running statistics apart from what it computes again.
        if not torch.compiler.is_compiling() and (norms := batch_norms(self)):
            contexts = functools.partial(_contexts, norms, context_fn)
        if contexts is not None:
            given["context_fn"] = contexts
            if not torch.compiler.is_compiling():
                given |= saved.CHECKPOINT_OPTIONS
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            **given,
            **kwargs,
        )

    # A bound method, so that a deep copy runs the forward of the copy.
    module.__dict__["forward"] = types.MethodType(forward, module)
    module.__dict__[_MARK] = True
    return module


def offload_activations(
    module: _Module, offload_policy: OffloadPolicy, *, smallest: int = 64 * 1024
) -> _Module:
    """Keep elsewhere what autograd saves in ``module`` for backward.

    That is all activations, or, after :func:`checkpoint_module`, the inputs that are given by
    position:

        offload_activations(checkpoint_module(block), DiskOffloadPolicy("/scratch"))

    On an accelerator, they go to pinned memory of the host, and come back beside computing. On
    CPUs, they go to a file that vanishes with the process. When backward comes to one module, what
    the module before it has kept begins to come back. Losses and gradients have the same bits. All
    views of the same memory are kept once. What the program itself still has in backward is taken
    from there.

    Replaces ``module.forward``, and can be combined with sharding in either order. Parameters,
    buffers and sparse tensors stay. So do tensor subclasses other than ``DTensor``, and views of
    less than a fourth of a memory. Inside of a checkpoint, or of other ``saved_tensors_hooks``,
    those get everything. A compiler compiles what ``forward`` calls, not ``forward`` itself.

    Autograd raises as ever if a saved tensor is written to before backward. Writes that it does not
    count, such as those to ``tensor.data``, must not come between two operations that save the same
    memory.

    Args:
        module: the module. A second call has no effect.
        offload_policy: ``CPUOffloadPolicy()``: the host of an accelerator; tensors on the CPU stay.
            :class:`shardwise.DiskOffloadPolicy`: a folder of a local disk, for which accelerators
            wait.
        smallest: memory of fewer bytes stays.

    Returns:
        ``module``.

    Raises:
        TypeError: ``offload_policy`` keeps nothing elsewhere.
        OffloadError: no file can be made in the folder. Forward and backward raise it if the disk
            is full, or fails.

    Sources: ``torch.autograd.graph.saved_tensors_hooks``; Rajbhandari et al., "ZeRO-Infinity",
    arXiv 2104.07857.
    """
    from shardwise.base.activations import store_of  # here: few use it

    check_arguments(offload_activations, locals())
    if _OFFLOADED in module.__dict__:
        return module
    store, patched = store_of(offload_policy), _patched_forward(module)

    # Hooks on saved tensors are nothing that a compiler can trace.
    @functools.partial(torch.compiler.disable, recursive=False)
    @functools.wraps(module.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with store.around(self, smallest):
            return (patched or type(self).forward)(self, *args, **kwargs)

    module.__dict__["forward"] = types.MethodType(forward, module)
    module.__dict__[_OFFLOADED] = True
    return module


def _patched_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that an earlier patch has given a module: of the module, or a copy."""
    inner = module.__dict__.get("forward")
    if isinstance(inner, types.MethodType) and inner.__self__ is module:
        return inner.__func__
    return None if inner is None else lambda _, *args, **kwargs: inner(*args, **kwargs)


BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """Return the batch norms in a module that keep running statistics."""
    return [m for m in module.modules() if isinstance(m, BatchNorm) and m.track_running_stats]


def _contexts(
    norms: list[BatchNorm], context_fn: Contexts | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts around forward and around its recomputation, for a module with batch norms."""
    if context_fn is None:
        return contextlib.nullcontext(), _counted_already(norms, contextlib.nullcontext())
    forward, recomputation = context_fn()
    return forward, _counted_already(norms, recomputation)


@contextlib.contextmanager
def _counted_already(norms: list[BatchNorm], around: AbstractContextManager[Any]) -> Iterator[None]:
    """Leave the running statistics of batch norms unchanged, within another context."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    # A momentum of zero, and not eval(): autograd has to save the same tensors as in forward.
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        with around:
            yield
    finally:
        for norm, momentum, batches in before:
            norm.momentum, norm.num_batches_tracked = momentum, batches


def checkpoint_blocks(
    blocks: Iterable[nn.Module],
    mode: Checkpointing,
    every: int = 1,
    policy: OffloadPolicy | None = None,
) -> None:
    """Have blocks recompute activations in backward, before they are sharded and compiled.

    Args:
        blocks: modules that keep their inputs alone, in the order of forward.
        mode: which activations are recomputed; none changes nothing.
        every: of the blocks, every N-th is recomputed, beginning with the N-th.
        policy: where ``mode`` keeps inputs, if it offloads them.
    """
    if mode is Checkpointing.NONE:
        return
    for block in itertools.islice(blocks, every - 1, None, every):
        checkpoint_module(block, context_fn=_CONTEXTS[mode])
        if mode is Checkpointing.OFFLOAD:
            assert policy is not None
            offload_activations(block, policy)


# -- selective checkpointing -----------------------------------------------------------------------

#: Operators whose results are kept: nearly all of the operations of a model are theirs.
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.convolution.default,
    *autograd.GROUPED_PRODUCTS,
}

#: Operators whose results are small, and take long.
_SMALL = {torch.ops.aten.max.default, autograd.REDUCE_SCATTER}


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A ``context_fn`` that keeps the results of matrix products, convolutions and attention.

    What is recomputed (norms, activations, rotations) takes little time and most of the memory.

    Source: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return, no-untyped-call]


def keep_every_second_product() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A ``context_fn`` that keeps attention and every second product or convolution.

    Results of reduce-scatters are kept, too: they take time and little memory. So are maxima of
    whole tensors, the scales of float8. torchtitan calls this selective checkpointing by operator.

    Source: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """
    counts = {False: 0, True: 0}  # in forward, and when it is computed again

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        if operator in _SMALL:
            return CheckpointPolicy.MUST_SAVE
        return _policy(context, operator, *args, **kwargs)

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the result of an operator is kept."""
    del context
    if operator in _PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    at = autograd.ATTENTION.get(operator)
    if at is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    dropout = kwargs.get("dropout_p", args[at] if len(args) > at else 0.0)
    # With dropout it draws random numbers: what follows it would draw others if it did not run.
    return CheckpointPolicy.PREFER_RECOMPUTE if dropout else CheckpointPolicy.MUST_SAVE


_CONTEXTS: Mapping[Checkpointing, Contexts | None] = {
    Checkpointing.FULL: None,
    Checkpointing.OFFLOAD: None,
    Checkpointing.SELECTIVE: keep_products,
    Checkpointing.OPERATOR: keep_every_second_product,
}


# -- sharding --------------------------------------------------------------------------------------


def shard_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool | int,
    precision: MixedPrecisionPolicy,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
    transport: str | None = None,
    offload_policy: OffloadPolicy | None = None,
    wire: Wire | Mapping[str, Wire] | None = None,
    runtime: Runtime = Runtime.SHARDWISE,
) -> None:
    """Shard every block, then the rest, so that each block is gathered by itself.

    Batch norm is kept and computes in float32 whatever the rest does, as its statistics are.

    Args:
        model: on the meta device, or the same on every rank.
        blocks: modules of it that are to be gathered one at a time, inner ones first.
        mesh: as for ``fully_shard``.
        reshard_after_forward: of the blocks, as for ``fully_shard``. The rest stays unsharded.
        precision: dtypes of forward, backward and reduction.
        placement: along which dimension a parameter is cut; by default the first.
        transport: as for ``fully_shard``.
        offload_policy: as for ``fully_shard``.
        wire: as for ``fully_shard``.
        runtime: whose ``fully_shard`` does it: torch's own in plans and proofs alone. It takes no
            ``transport`` and no ``wire``.
    """
    shard: Callable[..., object] = functools.partial(fully_shard, transport=transport, wire=wire)
    if runtime is Runtime.TORCH:
        shard = fsdp.fsdp2_functions(["fully_shard"])["fully_shard"]
    # Inputs stay as they are: batch norm takes bfloat16 beside float32 parameters.
    full = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    taken: set[nn.Module] = set()
    for module in (*blocks, model):
        # The root's own parameters (embedding, head) are needed at both ends of the forward.
        reshard = False if module is model else reshard_after_forward
        groups: list[tuple[nn.Module | list[nn.Module], MixedPrecisionPolicy]] = []
        norms: list[nn.Module] = [norm for norm in batch_norms(module) if norm not in taken]
        if norms and precision.param_dtype not in (None, torch.float32):
            taken.update(norms)
            groups.append((norms, full))
        for part, policy in (*groups, (module, precision)):
            shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
                mp_policy=policy,
                offload_policy=OffloadPolicy() if offload_policy is None else offload_policy,
            )
    if any(group.mesh.shard.overlaps_compute for group in groups_of(model)):
        # Trainings write to parameters between steps only, so gathering early is safe.
        gather_in_order(model)


def store_in(
    model: nn.Module, dtype: torch.dtype, kept: Collection[nn.Parameter] = frozenset()
) -> None:
    """Keep floating-point parameters in a dtype, except those of batch norms, and adapters.

    Buffers stay as they are.

    Args:
        model: not sharded yet; parameters that are tied stay tied. The configuration of a model of
            ``transformers`` names the dtype from then on.
        dtype: of parameters, and so of their gradients and of the optimizer's state.
        kept: further parameters that stay as they are.
    """
    left = {p for norm in batch_norms(model) for p in norm.parameters()}
    left.update(kept)
    trained = {p for p in model.parameters() if p.requires_grad}
    if len(trained) < len(list(model.parameters())):
        left |= trained  # adapters on a frozen base stay in float32, as peft has them
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in left:
            parameter.data = parameter.data.to(dtype)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.dtype = dtype
