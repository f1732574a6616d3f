"""Groups of torch's own FSDP2, observed: what they compute, gather, reduce and wait for.

Hooks of modules, and collectives in the place of those that ``set_custom_all_gather`` and
``set_custom_reduce_scatter`` replace, report what happens to whoever observes, as our own runtime
does. Torch itself does the work, with the same tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise._torch import autograd, fsdp
from shardwise.base import observe
from shardwise.base.observe import Activity
from shardwise.sharding.tree import every_tensor_in
from shardwise.transport.base import Label
from shardwise.transport.collective_log import CollectiveLog, Issued
from shardwise.transport.custom import AllGather, ReduceScatter
from shardwise.transport.peers import Peers
from shardwise.transport.waiter import Launched

#: Launches a collective; whether the caller waits for it is the argument.
Launch = Callable[[bool], Any]


class Carried(Protocol):
    """What is called around each collective of an observed group."""

    def launch(
        self, launch: Launch, tensors: tuple[torch.Tensor, torch.Tensor], peers: Peers, doing: str
    ) -> Launched | None:
        """Launch a collective; return what is to be waited for, or ``None`` if it is over.

        Args:
            launch: launches it.
            tensors: what it writes, and what it reads.
            peers: the ranks that take part.
            doing: what it is, such as ``"the all-gather of layers.3"``.
        """


class ByTorch:
    """Collectives as torch launches them: it waits itself."""

    def launch(
        self, launch: Launch, tensors: tuple[torch.Tensor, torch.Tensor], peers: Peers, doing: str
    ) -> Launched | None:
        """Launch a collective. What torch waits for later is returned."""
        work: Launched | None = launch(False)
        return work


@contextlib.contextmanager
def observed(model: nn.Module, carried: Carried | None = None) -> Iterator[None]:
    """Report what the groups of torch's own FSDP2 in a model do, until the end of the block.

    Does nothing for a model that has none. Collectives that a user has set are called as before.

    Args:
        model: sharded by ``torch.distributed.fsdp.fully_shard``.
        carried: how collectives are launched; by default as torch does.
    """
    with contextlib.ExitStack() as stack:
        for group in fsdp.torch_groups(model):
            stack.enter_context(_ObservedGroup(group, carried or ByTorch()).installed())
        yield


class _ObservedGroup:
    """A group of torch's FSDP2, and what it does now.

    Args:
        group: the group.
        carried: how its collectives are launched.
    """

    def __init__(self, group: fsdp.TorchGroup, carried: Carried) -> None:
        self._group = group
        self._carried = carried
        self._label = Label.of_group(group.name, group.shapes)
        self._forwards: list[int] = []
        self._backward = self._reduction = 0
        self._all_reduce: Issued | None = None
        for mesh in {param.device_mesh for _, param in group.params}:
            for name in mesh.mesh_dim_names or ():
                Peers(mesh.get_group(name)).name_dimension(name)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put hooks and collectives in place until the end of the block."""
        group = self._group
        before = group.collectives
        gather, scatter, after_all_reduce = before
        hook = after_all_reduce if group.replicas is None else self._after(after_all_reduce)
        hooks: list[RemovableHandle] = []

        def remove() -> None:
            group.collectives = before
            for each in hooks:
                each.remove()

        try:
            try:
                group.collectives = (
                    _ObservedAllGather(gather, self),
                    _ObservedReduceScatter(scatter, self),
                    hook,
                )
                for module in group.modules:
                    hooks.append(module.register_forward_pre_hook(self._begin_forward))
                    hooks.append(module.register_forward_hook(self._end_forward, prepend=True))
                    hooks.append(module.register_forward_hook(self._follow_backward))
                yield
            finally:
                remove()
        finally:
            remove()  # Ctrl-C may have ended the first attempt

    # -- forward and backward --------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self._forwards.append(observe.begin(Activity.FORWARD, self._label.name))

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._forwards:
            observe.end(self._forwards.pop())

    def _follow_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in every_tensor_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, grad: torch.Tensor) -> None:
        if not self._backward:
            self._backward = observe.begin(Activity.BACKWARD, self._label.name)
            autograd.queue_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        observe.end(self._backward)
        self._backward = 0

    def begin_reduction(self) -> None:
        """Note that gradients are being copied to where they are reduced from."""
        self._end_backward()
        self._reduction = observe.begin(Activity.REDUCE, self._label.name)

    # -- collectives -----------------------------------------------------------------------------

    def run(
        self,
        activity: Activity,
        launch: Launch,
        tensors: tuple[torch.Tensor, torch.Tensor],
        group: dist.ProcessGroup,
        waits_later: bool,
    ) -> dist.Work | None:
        """Run a collective, and report it.

        Args:
            activity: which one.
            launch: launches it.
            tensors: what it writes, and what it reads.
            group: of the ranks that take part.
            waits_later: whether torch waits for it, by what this returns.
        """
        peers = Peers(group)
        log = peers.once(collective_log)
        call = log.add(activity.value, tensors[1:], self._label)
        issued = log.issue(call, 1, lambda: max(tensor.nbytes for tensor in tensors))
        with issued:
            work = self._carried.launch(launch, tensors, peers, call.text)
        found = None if work is None else _ObservedWork(work, issued)
        if found is None:
            issued.end()
        elif not waits_later:
            found.wait()  # else torch does
            found = None
        observe.end(self._reduction)
        self._reduction = 0
        if activity is Activity.REDUCE_SCATTER:
            self._begin_all_reduce(tensors[0])
        return found

    def _begin_all_reduce(self, reduced: torch.Tensor) -> None:
        """Report the all-reduce that follows over replicas, which torch has no place for."""
        group = self._group.replicas
        if group is not None and self._group.all_reduces:
            log = Peers(group).once(collective_log)
            call = log.add(Activity.ALL_REDUCE.value, [reduced], self._label)
            self._all_reduce = log.issue(call, 1, lambda: reduced.nbytes)
            self._all_reduce.__enter__()

    def _after(self, hook: Callable[[torch.Tensor], None] | None) -> Callable[..., None]:
        def after_all_reduce(reduced: torch.Tensor) -> None:
            if self._all_reduce is not None:
                self._all_reduce.__exit__()
                self._all_reduce.end()
                self._all_reduce = None
            if hook is not None:
                hook(reduced)

        return after_all_reduce


def collective_log(peers: Peers) -> CollectiveLog:
    """Make the log of the collectives of torch's FSDP2 over a process group."""
    return CollectiveLog(peers, "torch")


class _ObservedWork(dist.Work):
    """A collective that torch waits for later."""

    def __init__(self, work: Launched, issued: Issued) -> None:
        super().__init__()
        self._work, self._issued = work, issued

    def wait(self, *_: object) -> bool:
        """Wait, and report it."""
        with self._issued:
            self._work.wait()
        self._issued.end()
        return True


class _ObservedAllGather:
    """The all-gather of an observed group. Source: torch's ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, inner: AllGather | ReduceScatter, group: _ObservedGroup) -> None:
        self._inner: Any = inner
        self._group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the memory to gather into, as torch does."""
        made: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather."""

        def launch(waits_later: bool) -> Any:
            return self._inner(output_tensor, input_tensor, group, waits_later or async_op)

        tensors = output_tensor, input_tensor
        return self._group.run(Activity.ALL_GATHER, launch, tensors, group, async_op)


class _ObservedReduceScatter(_ObservedAllGather):
    """The reduce-scatter of one; see torch's ``FSDPModule.set_custom_reduce_scatter``."""

    _is_prepared = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the memory to reduce from, which comes first, or the memory to reduce into."""
        if not self._is_prepared:
            self._group.begin_reduction()
        self._is_prepared = not self._is_prepared
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce."""

        def launch(waits_later: bool) -> Any:
            return self._inner(output_tensor, input_tensor, group, op, waits_later or async_op)

        tensors = output_tensor, input_tensor
        return self._group.run(Activity.REDUCE_SCATTER, launch, tensors, group, async_op)
