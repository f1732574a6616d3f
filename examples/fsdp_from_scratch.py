"""Fully sharded data parallel training from scratch: the whole idea in one file, on torch alone.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_from_scratch.py

Every rank trains on its own data, and between steps it keeps only its rows of each parameter, of
the gradient and of the optimizer's states. Seven rows over three ranks:

    rows      0  1  2 | 3  4  5 | 6  .  .
    rank          0   |    1    |    2        3, 3 and 1 rows; a chunk is 3 rows, 2 are padding

The parameters of one ``fully_shard`` call are a group, and travel together:

    before its forward       all-gather the rows of all ranks into full parameters
    after its forward        free them again (ZeRO-3), or keep them for backward (ZeRO-2)
    before its backward      all-gather again if they were freed, and start to gather the group
                             that comes next, so that it arrives while this one computes
    after its backward       free them, and start to reduce-scatter their gradients: each rank gets
                             the mean over all ranks of its own rows

What this file leaves out (activation checkpointing, ties between groups, writes at odd moments,
ranks that die, ...) is what the real runtime is for. On programs without those, both compute the
same bits; tests/test_examples.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

# By their names since torch 2.13, or before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Param:
    """One parameter: a shard that always exists, and a full form whose memory comes and goes.

    Attributes:
        places: the modules that use it, with its name there. A tied parameter has several.
        shard: this rank's rows, shape ``(at most chunk, ...)``. The optimizer sees only this.
        full: all rows in the compute dtype, for forward and backward.
        memory: the memory of ``full`` and its padding, shape ``(ranks, numel of a chunk)``.
    """

    def __init__(self, whole: Tensor, ranks: int, rank: int, dtype: torch.dtype | None) -> None:
        if whole.dim() == 0:
            raise ValueError("a scalar has no rows to shard; give it the shape (1,)")
        self.places: list[tuple[nn.Module, str]] = []
        rows, *rest = whole.shape
        chunk = -(-rows // ranks)
        mine = whole.detach()[rank * chunk : (rank + 1) * chunk].clone()
        self.shard = nn.Parameter(mine, requires_grad=whole.requires_grad)
        padded = torch.empty(ranks * chunk, *rest, dtype=dtype or whole.dtype, device=whole.device)
        # Through .data, since autograd counts the writes to what it has saved for backward, and
        # refuses to go on after one. Here, every write restores the values that were saved.
        self.full = nn.Parameter(padded.data[:rows], requires_grad=whole.requires_grad)
        self.memory = padded.view(ranks, -1)
        self.nbytes = padded.untyped_storage().nbytes()

    def fill(self, chunks: Tensor) -> None:
        """Let the modules use the full form, with these values, in the storage it has had before.

        What autograd saved in forward are views of that storage, so it is never another one.
        """
        self.memory.untyped_storage().resize_(self.nbytes)
        self.memory.copy_(chunks)
        for module, name in self.places:
            setattr(module, name, self.full)

    def free(self) -> None:
        """Let the modules use the shard, and free the memory of the full form."""
        for module, name in self.places:
            setattr(module, name, self.shard)
        self.memory.untyped_storage().resize_(0)

    def chunk_of_shard(self) -> Tensor:
        """Return the shard in the compute dtype, flat and padded to a chunk."""
        flat = self.shard.detach().reshape(-1).to(self.full.dtype)
        return nn.functional.pad(flat, (0, self.memory.shape[1] - flat.numel()))

    def chunks_of_grad(self, dtype: torch.dtype | None) -> Tensor:
        """Take the full gradient; return it as one padded chunk for each rank."""
        grad, self.full.grad = self.full.grad, None
        flat = grad.reshape(-1).to(dtype or grad.dtype)
        return nn.functional.pad(flat, (0, self.memory.numel() - flat.numel())).view_as(self.memory)


@dataclass(eq=False)
class Group:
    """The parameters of one ``fully_shard`` call, which are gathered and reduced together."""

    params: list[Param]
    process_group: dist.ProcessGroup | None
    reshard_after_forward: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    is_full: bool = False  # whether the modules hold full parameters
    model: Model | None = None  # known from the first forward on
    gathering: tuple[dist.Work, Tensor] | None = None
    missing_grads: set[Param] = field(default_factory=set)

    def start_gather(self) -> None:
        """Start to gather, unless that has been done: one message for the whole group."""
        if self.is_full or self.gathering is not None or not self.params:
            return
        mine = torch.cat([param.chunk_of_shard() for param in self.params])
        everything = mine.new_empty(mine.numel() * dist.get_world_size(self.process_group))
        work = all_gather(everything, mine, group=self.process_group, async_op=True)
        self.gathering = work, everything

    def unshard(self) -> None:
        """Let the modules hold full parameters with the values of all ranks' shards."""
        self.start_gather()
        if self.gathering is not None:
            (work, everything), self.gathering = self.gathering, None
            work.wait()
            widths = [param.memory.shape[1] for param in self.params]
            by_param = everything.view(-1, sum(widths)).split(widths, dim=1)
            for param, chunks in zip(self.params, by_param, strict=True):
                param.fill(chunks)
        self.is_full = True

    def reshard(self) -> None:
        """Let the modules hold shards again, and free the full parameters."""
        if self.gathering is not None:
            self.unshard()  # it was gathered ahead, for nothing
        if self.is_full:
            for param in self.params:
                param.free()
        self.is_full = False

    def grad_arrived(self, param: Param, _: Tensor) -> None:
        """End the backward of the group with its last gradient; frozen parameters defer that."""
        self.missing_grads.discard(param)
        if not self.missing_grads:
            self.end_backward()

    def end_backward(self) -> None:
        """Free the full parameters, and start to reduce the gradients that there are."""
        self.reshard()
        params = [param for param in self.params if param.full.grad is not None]
        if params:
            # Row r of this matrix is what rank r gets the sum of, over all ranks.
            by_rank = torch.cat([p.chunks_of_grad(self.reduce_dtype) for p in params], dim=1)
            mine = by_rank.new_empty(by_rank.shape[1])
            work = reduce_scatter(mine, by_rank.view(-1), group=self.process_group, async_op=True)
            self.model.finish_reduction()  # of the group before: one is in flight at a time
            self.model.reduction = work, mine, params


class Model:
    """What the groups of one model share: the order of their forwards, which backward reverses.

    Attributes:
        groups: all of them, the root's first.
        order: the groups, as the last forward ran them.
        reduction: the gradients that are on their way.
    """

    def __init__(self, root: nn.Module) -> None:
        self.groups = [m.fsdp_group for m in root.modules() if hasattr(m, "fsdp_group")]
        self.order: list[Group] = []
        self.reduction: tuple[dist.Work, Tensor, list[Param]] | None = None
        self._in_backward = False
        for group in self.groups:
            group.model = self

    def begin_forward(self) -> None:
        """Forget full parameters of an earlier step: their shards may have changed since."""
        self.order.clear()
        self._in_backward = False
        for group in self.groups:
            group.reshard()

    def begin_backward(self, group: Group) -> None:
        """Gather the group, and start to gather the one that comes after it."""
        if not self._in_backward:
            self._in_backward = True
            for each in self.groups:
                each.missing_grads = set(each.params)
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        group.unshard()
        if group in self.order and (index := self.order.index(group)):
            self.order[index - 1].start_gather()

    def end_backward(self) -> None:
        """Do what is left: groups of which some parameter was not used, and the last reduction."""
        for group in reversed(self.order):
            group.end_backward()
        self.finish_reduction()
        self._in_backward = False

    def finish_reduction(self) -> None:
        """Wait for the sum that is in flight, if there is one, and add the mean to the shards."""
        if self.reduction is None:
            return
        (work, summed, params), self.reduction = self.reduction, None
        work.wait()
        widths = [param.memory.shape[1] for param in params]
        for param, flat in zip(params, summed.split(widths), strict=True):
            mean = flat[: param.shard.numel()].view_as(param.shard) / len(param.memory)
            before = 0 if param.shard.grad is None else param.shard.grad
            param.shard.grad = before + mean.to(param.shard.dtype)


def fully_shard(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Shard the parameters of a module that no earlier call has sharded.

    Call it on the blocks first and on the whole model last, then build the optimizer.

    Args:
        module: a block of a model, or the model; every rank has the same weights.
        process_group: the ranks to shard over, by default all.
        reshard_after_forward: free full parameters between forward and backward (ZeRO-3), or
            keep them (ZeRO-2), as the root does in any case: backward begins with them.
        param_dtype: of forward and backward, by default the shards'.
        reduce_dtype: that gradients are summed in, by default that of forward and backward.
    """
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    found: dict[nn.Parameter, Param] = {}
    for part in module.modules():
        for name, whole in part._parameters.items():
            if whole is not None and not hasattr(whole, "is_shard"):
                if whole not in found:
                    found[whole] = Param(whole, ranks, rank, param_dtype)
                found[whole].places.append((part, name))
    group = module.fsdp_group = Group(
        *(list(found.values()), process_group, reshard_after_forward, param_dtype, reduce_dtype)
    )
    for param in group.params:
        param.shard.is_shard = True
        param.free()
        if param.full.requires_grad:
            param.full.register_post_accumulate_grad_hook(partial(group.grad_arrived, param))
    module.register_forward_pre_hook(_before_forward, with_kwargs=True)
    module.register_forward_hook(_after_forward)


def _before_forward(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    group = module.fsdp_group
    if group.model is None:
        group.model = Model(module)  # the outermost forward comes first: this is the root
    if group is group.model.groups[0]:
        group.model.begin_forward()
    group.unshard()
    if torch.is_grad_enabled():
        group.model.order.append(group)

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(group.param_dtype) if is_float and group.param_dtype else value

    return tree_map(cast, (args, kwargs))


def _after_forward(module: Any, args: Any, output: Any) -> None:
    group = module.fsdp_group
    if group.reshard_after_forward and group is not group.model.groups[0]:
        group.reshard()
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda grad: group.model.begin_backward(group))


def main() -> None:
    """Train three blocks on random sequences whose next value is the one before."""
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    for module in [*blocks, model]:
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())  # and its own data
    for step in range(60):
        x = torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
