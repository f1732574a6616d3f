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
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise._torch import autograd, dtensor, losses
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
    (``retain_graph``), but not be differentiated. ``torch.compile`` runs all of it between graphs.

    Args:
        head: an ``nn.Linear``, with or without bias.
        hidden: (..., in_features), of the dtype that the head takes.
        targets: (...) int64, each a row of the head or ``ignore_index``.
        ignore_index: the target of tokens without a loss.
        reduction: ``"mean"`` over the tokens with a loss, NaN if there are none; or ``"sum"``.

    Returns:
        A float32 scalar, in nats; float64 for a head in float64.

    Raises:
        WholeLogitsError: the head is no plain ``nn.Linear``, or is cut in another way. It is a
            ``NotImplementedError``.
        ValueError: shapes do not fit, or there is no such reduction.
        IndexError: a target is no row of the head; on accelerators, an error of the device.
    """
    check_arguments(linear_cross_entropy, locals())
    with returning_loss(head, targets, ignore_index, reduction):
        return scalar(head(hidden))


@contextlib.contextmanager
def returning_loss(
    head: nn.Module | None, targets: torch.Tensor, ignore_index: int, reduction: Reduction
) -> Iterator[None]:
    """Have ``head`` return its loss in place of logits, until the end of the block.

    Raises:
        WholeLogitsError: the head is no plain ``nn.Linear``.
        ValueError: there is no such reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: found {reduction!r}, expected 'mean' or 'sum'")
    linear = _plain_linear(head)

    @autograd.disable_compile
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return _loss(linear, hidden, targets, ignore_index, reduction)

    try:
        linear.__dict__["forward"] = forward
        yield
    finally:
        linear.__dict__.pop("forward", None)


def _plain_linear(head: nn.Module | None) -> nn.Linear:
    """The linear layer that a head is, or that ``FullyShardedDataParallel`` has around it."""
    linear: object = head.module if isinstance(head, _WRAPPERS) else head
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        kind = type(linear)  # with its module: peft, too, has a class Linear
        found = "none" if linear is None else f"{kind.__module__}.{kind.__qualname__}"
    elif "forward" in linear.__dict__:
        found = f"{type(linear).__name__} with a forward of its own"
    else:
        return linear
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
    rows, mesh = _Rows(0, len(weight), None), None
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        each = -(-len(weight) // mesh.size())
        if weight.placements != (Shard(0),) or each * (mesh.size() - 1) >= len(weight):
            raise WholeLogitsError(
                f"head: found a weight of {len(weight)} rows placed as {weight.placements}, "
                "expected rows on every rank of one dimension, as by ColwiseParallel; "
                "compute the loss from whole logits"
            )
        rows = _Rows(mesh.get_local_rank() * each, len(weight), mesh.get_group())
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
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    tensors = hidden.reshape(-1, hidden.shape[-1]), weight, bias
    wanted = _Wanted(targets.flatten(), ignore_index, reduction, torch.is_grad_enabled())
    with torch.autocast(device, enabled=False):
        loss = cast(torch.Tensor, _ChunkedLoss.apply(*tensors, wanted, rows))  # type: ignore[no-untyped-call]
    # Hooks of tensor parallelism expect logits, of which a rank has a part of the last dimension.
    return loss if mesh is None else DTensor.from_local(loss[None], mesh, [Shard(0)])


def scalar(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss that a head has returned, after its hooks.

    Raises:
        WholeLogitsError: a hook has gathered what it takes for logits.
    """
    loss = loss.to_local() if isinstance(loss, DTensor) else loss
    if loss.numel() != 1:
        raise WholeLogitsError(
            "head: found output_layouts=Replicate(), expected Shard(-1), as by ColwiseParallel; "
            "compute the loss from whole logits"
        )
    return loss if loss.ndim == 0 else loss.reshape(())


class _Wanted(NamedTuple):
    """What is computed from logits."""

    targets: torch.Tensor
    ignore_index: int
    reduction: Reduction
    gradients: bool


class _Rows(NamedTuple):
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
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: _Wanted,
        rows: _Rows,
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
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *found, divisor = ctx.saved_tensors
        factor: torch.Tensor = grad / divisor.clamp(
            min=1
        )  # gradients are 0, and not NaN, if all are ignored

        def scaled(each: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            if each.dtype == factor.dtype and not losses.keeps_graph():
                return each.mul_(factor)  # no other backward reads it
            return (each.to(factor.dtype) * factor).to(dtype)

        pairs = zip(found, ctx.dtypes, strict=True)
        grads = [None if each is None else scaled(each, dtype) for each, dtype in pairs]
        return *grads, None, None
