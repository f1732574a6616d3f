"""The cross-entropy of a linear head, over chunks of tokens: its logits are never whole.

For each chunk, forward computes logits, loss, and the gradients of hidden states and weight, which
backward multiplies by the gradient of the loss. That is three products, as with whole logits.

The head itself is called, with another ``forward``. So its hooks run, of whichever runtime: they
gather the weight once for all chunks, and reduce its gradient once.

If tensor parallelism has cut the head over the vocabulary, each rank has its columns of logits:

    largest logits             all-reduce (max) of (tokens,)
    sums, logits of targets    all-reduce (sum) of (2, tokens)
    gradients of hidden        left to DTensor, which adds them over the ranks
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise._torch import autograd, dtensor, losses, saved
from shardwise.base.arguments import check_arguments
from shardwise.frontends.state_dict import WrapperModule

Reduction: TypeAlias = Literal["mean", "sum"]

#: A chunk has half as many tokens as the hidden size, within these: its logits take half as much
#: memory as the gradient of the weight. Fewer make products slow, more hardly make them faster.
_FEWEST, _MOST = 256, 1024

#: What gradients of logits in fp16 are multiplied by, so that small ones do not vanish. Products
#: with weights below 128 stay within the range of fp16.
_FP16_SCALE = 256.0


_WRAPPERS = WrapperModule, fsdp.FullyShardedDataParallel


class WholeLogitsError(NotImplementedError):
    """A head or a model whose logits have to be whole."""


@autograd.disable_compile
def linear_cross_entropy(
    head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Return the cross-entropy of ``head(hidden)``, whose logits are never in memory as a whole.

    It equals, with its gradients, to rounding:

        F.cross_entropy(head(hidden).float().flatten(0, -2), targets.flatten())

    Call it in the ``forward`` of a model, in place of the head:

        loss = shardwise.linear_cross_entropy(self.head, hidden, targets)

    The head may be sharded by ``fully_shard``, ours or torch's, or be wrapped in
    ``FullyShardedDataParallel``; be tied to the embedding; frozen; or cut over the vocabulary by
    torch's ``ColwiseParallel``. Its hooks run, and forward hooks get the loss in place of logits,
    which an ``output_dtype`` of the head's own group rounds. Backward may run again
    (``retain_graph``), but not be differentiated. Selective checkpoints keep nothing of it.
    ``torch.compile`` runs all of it between graphs.

    Args:
        head: an ``nn.Linear``, with or without bias.
        hidden: (..., in_features), of the dtype that the head takes.
        targets: (...) int64, each a row of the head or ``ignore_index``.
        ignore_index: the target of tokens without a loss.
        reduction: ``"mean"`` over the tokens with a loss, NaN if there are none; or ``"sum"``.

    Returns:
        A float32 scalar, in nats; float64 for a head in float64.

    Raises:
        WholeLogitsError: the head is no plain ``nn.Linear``, is cut in another way, or has a hook
            that changes what it returns. It is a ``NotImplementedError``.
        ValueError: shapes do not fit, or there is no such reduction.
        IndexError: a target is no row of the head; on accelerators, an error of the device.
    """
    check_arguments(linear_cross_entropy, locals())
    with returning_loss(head, targets, ignore_index, reduction) as made:
        return scalar(head(hidden), made)


@contextlib.contextmanager
def returning_loss(
    head: nn.Module | None, targets: torch.Tensor, ignore_index: int, reduction: Reduction
) -> Iterator[list[torch.Tensor]]:
    """Have ``head`` return its loss in place of logits, until the end of the block.

    Other threads, and copies of the head, get logits. The list that this yields gets the losses.

    Raises:
        WholeLogitsError: the head is no plain ``nn.Linear``; or it is called in a checkpoint that
            is not around the block, and would compute logits again.
        ValueError: there is no such reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: found {reduction!r}, expected 'mean' or 'sum'")
    linear = _plain_linear(head)
    around = saved.innermost_checkpoint(), torch.is_grad_enabled()
    made: list[torch.Tensor] = []

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        if around != (saved.innermost_checkpoint(), torch.is_grad_enabled()):
            raise WholeLogitsError(
                "head: found it called in a checkpoint, or under no_grad, that begins in the "
                "model, and would compute its logits again in backward; begin it around the loss, "
                "or compute the loss from whole logits"
            )
        loss = _loss(linear, hidden, targets, ignore_index, reduction)
        made.append(loss)
        return loss

    asked = threading.get_ident(), id(linear)
    try:
        with _lock:
            _asked[asked] = compute
            # Bound, so that a deep copy runs the forward of the copy.
            linear.__dict__["forward"] = types.MethodType(_forward, linear)
        yield made
    finally:
        with _lock:
            _asked.pop(asked, None)
            if all(of != id(linear) for _, of in _asked):
                linear.__dict__.pop("forward", None)


#: What computes losses, by the thread that has asked for them, and the head.
_asked: dict[tuple[int, int], Callable[[torch.Tensor], torch.Tensor]] = {}
_lock = threading.Lock()


@autograd.disable_compile
def _forward(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Run forward of a head that a thread has asked for its loss."""
    compute = _asked.get((threading.get_ident(), id(self)))
    return type(self).forward(self, hidden) if compute is None else compute(hidden)


def _plain_linear(head: nn.Module | None) -> nn.Linear:
    """The linear layer that a head is, or that ``FullyShardedDataParallel`` has around it."""
    linear: object = head.module if isinstance(head, _WRAPPERS) else head
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        kind = type(linear)  # with its module: peft, too, has a class Linear
        found = "none" if linear is None else f"{kind.__module__}.{kind.__qualname__}"
    else:
        own = linear.__dict__.get("forward")
        of_another_thread = (
            getattr(own, "__func__", None) is _forward
            and (threading.get_ident(), id(linear)) not in _asked
        )
        if own is None or of_another_thread:
            return linear
        found = f"{type(linear).__name__} with a forward of its own"
    raise WholeLogitsError(
        f"head: found {found}, expected an nn.Linear that computes as torch's does; "
        "compute the loss from whole logits"
    )


def _loss(
    head: nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    reduction: Reduction,
) -> torch.Tensor:
    """What a head returns in place of logits, while its parameters are full."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: found shape {tuple(targets.shape)}, expected {tuple(hidden.shape[:-1])}, "
            f"one for each token of hidden states of shape {tuple(hidden.shape)}"
        )
    weight: torch.Tensor = head.weight
    bias: Any = head.bias
    rows, mesh = _OwnRows(0, len(weight), None), None
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        each = -(-len(weight) // mesh.size())
        if weight.placements != (Shard(0),) or each * (mesh.size() - 1) >= len(weight):
            raise WholeLogitsError(
                f"head: found a weight of {len(weight)} rows placed as {weight.placements}, "
                "expected rows on every rank of one dimension, as by ColwiseParallel; "
                "compute the loss from whole logits"
            )
        rows = _OwnRows(mesh.get_local_rank() * each, len(weight), mesh.get_group())
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [Replicate()])
        # This rank's columns of the logits give a part of the gradient, which is a sum over ranks.
        hidden = hidden.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    elif dtensor.is_wrapper(weight):
        raise WholeLogitsError(
            f"head: found a weight of {type(weight).__name__}, expected a plain tensor; "
            "compute the loss from whole logits"
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden, weight = _autocast(hidden), _autocast(weight)
        bias = None if bias is None else _autocast(bias)
    tensors = hidden.reshape(-1, hidden.shape[-1]), weight, bias
    wanted = _Wanted(targets.flatten(), ignore_index, reduction, torch.is_grad_enabled())
    with torch.autocast(device, enabled=False):
        loss = cast(torch.Tensor, _ChunkedLoss.apply(*tensors, wanted, rows))  # type: ignore[no-untyped-call]
    # Hooks of tensor parallelism expect logits, of which a rank has a part of the last dimension.
    return loss if mesh is None else DTensor.from_local(loss[None], mesh, [Shard(0)])


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype of autocast, which leaves float64 as it is."""
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def scalar(loss: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss that a head has returned, after its hooks.

    Args:
        loss: what the head has returned.
        made: what :func:`returning_loss` has yielded.

    Raises:
        WholeLogitsError: a hook has gathered, or changed, what it takes for logits.
    """
    loss = loss.to_local() if isinstance(loss, DTensor) else loss
    if loss.numel() != 1:
        raise WholeLogitsError(
            "head: found output_layouts=Replicate(), expected Shard(-1), as by ColwiseParallel; "
            "compute the loss from whole logits"
        )
    own = made[-1] if made else None
    # In another dtype it is what an output_dtype has rounded.
    if own is None or (loss.dtype == own.dtype and _is_changed(loss, own)):
        raise WholeLogitsError(
            "head: found a hook, or a __call__ of its own, that changes what it returns; "
            "compute the loss from whole logits"
        )
    return loss if loss.ndim == 0 else loss.reshape(())


def _is_changed(loss: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a loss is not, as it was, what a head has computed."""
    own = own.to_local() if isinstance(own, DTensor) else own
    return dtensor.storage_of(loss) != dtensor.storage_of(own) or autograd.version_of(loss) > 0


class _Wanted(NamedTuple):
    """What is computed from logits."""

    targets: torch.Tensor
    ignore_index: int
    reduction: Reduction
    gradients: bool


class _OwnRows(NamedTuple):
    """The rows of the weight that this rank has: from ``first`` on, of ``total``."""

    first: int
    total: int
    group: dist.ProcessGroup | None

    def reduced(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        """Combine values of all ranks that have rows of the weight."""
        return values if self.group is None else losses.all_reduced(values, operation, self.group)

    def own(self, targets: torch.Tensor, count: int, ignored: int) -> torch.Tensor:
        """Return targets by this rank's rows; those of other ranks are ignored, wrong ones stay."""
        if self.group is None:
            return targets
        own = targets - self.first
        others = (targets >= 0) & (targets < self.total) & ((own < 0) | (own >= count))
        return own.masked_fill(others | (targets == ignored), ignored)


class _ChunkedLoss(torch.autograd.Function):
    """The loss of hidden states (tokens, width) under a weight and a bias."""

    @staticmethod
    @saved.unseen_by_selective_checkpoints()
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: _Wanted,
        rows: _OwnRows,
    ) -> torch.Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        needed = [wanted.gradients and each for each in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        of_weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        of_bias = torch.zeros_like(bias, dtype=dtype) if needed[2] and bias is not None else None
        scale = _FP16_SCALE if hidden.dtype == torch.float16 else 1.0
        loss = hidden.new_zeros((), dtype=dtype)
        size = min(max(hidden.shape[1] // 2, _FEWEST), _MOST)
        for begin in range(0, len(hidden), size):
            part, ignored = slice(begin, begin + size), wanted.ignore_index
            targets = wanted.targets[part]
            own = rows.own(targets, len(weight), ignored)
            logits = F.linear(hidden[part], weight, bias).to(dtype)
            logits -= rows.reduced(logits.amax(1), "max")[:, None]
            reached = -F.nll_loss(logits, own, ignore_index=ignored, reduction="none")
            sums = torch.stack([logits.exp_().sum(1), reached])
            total, reached = rows.reduced(sums, "sum")
            kept = targets != ignored
            loss += (total.log() - reached).where(kept, 0).sum()
            if not any(needed):
                continue
            # From here on, logits are their gradients: probabilities, less 1 at the target.
            logits *= (scale * kept / total)[:, None]
            hit = own != ignored
            logits.scatter_add_(1, own.where(hit, 0)[:, None], -scale * hit.to(dtype)[:, None])
            low = logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(low, weight, out=of_hidden[part])
            if of_weight is not None:
                if hidden.dtype == torch.bfloat16:
                    of_weight += low.T @ hidden[part]
                else:  # the range of fp16 is too small for sums over tokens
                    torch.addmm(of_weight, logits.T, hidden[part].to(dtype), out=of_weight)
            if of_bias is not None:
                of_bias += logits.sum(0)
            del logits, low  # before those of the next chunk are there
        count = (wanted.targets != wanted.ignore_index).sum()
        count = count if wanted.reduction == "mean" else torch.ones_like(count)
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        ctx.save_for_backward(of_hidden, of_weight, of_bias, count * scale)
        return loss / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not grad.requires_grad:
            # To differentiate gradients has to be an error, even if they are of 1.
            grad = grad.detach().requires_grad_()
        return _ChunkedLoss.gradients(ctx, grad)

    @staticmethod
    @once_differentiable
    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Multiply what forward has computed by the gradient of the loss."""
        *found, divisor = ctx.saved_tensors
        factor: torch.Tensor = grad / divisor.clamp(
            min=1
        )  # gradients are 0, and not NaN, if all are ignored

        def scaled(each: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            alone = not losses.keeps_graph() and not losses.is_batched(factor)
            if alone and each.dtype == factor.dtype:
                return each.mul_(factor)  # no other backward reads it
            return (each.to(factor.dtype) * factor).to(dtype)

        pairs = zip(found, ctx.dtypes, strict=True)
        grads = [None if each is None else scaled(each, dtype) for each, dtype in pairs]
        return *grads, None, None
