"""``DiLoCo``: an optimizer around an optimizer, which synchronizes replicas once in many steps.

What happens after inner step t, for a fragment whose exchange is due every H steps:

    t            pseudo-gradient = outer - inner; its exchange begins
    t + tau / 2  its second half begins                                       (see average.py)
    t + tau      outer step; inner = alpha * inner + (1 - alpha) * outer

With the defaults (one fragment, tau = 0, alpha = 0) all of it happens at once every H steps, which
is DiLoCo; with others it is Streaming DiLoCo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.diloco import members, state
from shardwise.diloco.average import Average, codec_of
from shardwise.diloco.fragment import Fragment, Pending, deal_out, local_of
from shardwise.diloco.settings import OuterSGD, Streaming, WireFormat
from shardwise.errors import PeerLostError
from shardwise.optim_names import names_in_order
from shardwise.sharding.module import FSDPModule
from shardwise.transport.all_to_all import AllToAll
from shardwise.wrap.policies import repeated_blocks


class AroundOptimizer(torch.optim.Optimizer):
    """Has the parameters, settings and state of another optimizer.

    Args:
        inner: the other one.

    Attributes:
        inner: the other one.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._made = False
        super().__init__(inner.param_groups, inner.defaults)
        self._made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        """The base class begins with none of its own, and adds the inner optimizer's to them."""

    @property
    def state(self) -> Any:
        """The inner optimizer's; the outer state is in :meth:`state_dict`."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """The base class begins with an empty one of its own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after construction.

        Raises:
            NotImplementedError: always; the base class does not add any either.
        """
        if self._made:
            raise NotImplementedError(
                "DiLoCo: parameters cannot be added; add them to the inner optimizer and make "
                "DiLoCo again"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none)


class DiLoCo(AroundOptimizer):
    """Distributed low-communication training: ``every`` inner steps, then an outer step for all.

    Each replica trains by itself, sharded in any way over ranks of its own. After every ``every``
    inner steps the replicas average how far they have moved, and the outer optimizer moves the
    outer parameters, from which all go on. Nothing else crosses between replicas.

    It is an optimizer itself: call its :meth:`step` and :meth:`zero_grad`, give it to learning rate
    schedules and to ``shardwise.checkpoint``. Every rank of every replica makes it, and all call it
    alike. Making it compares the replicas; where parameters differ, all get those of the group's
    first.

    Memory of a rank, beside model and inner optimizer: two fp32 copies of its shards (outer
    parameters, momentum), a third with error feedback, and during an exchange up to three and a
    half of the fragment that is exchanged.

    Args:
        model: sharded over the ranks of this replica only, or plain.
        inner: the optimizer of its parameters, AdamW say. Parameters that it does not have are left
            alone.
        outer: the outer optimizer.
        every: inner steps of a round.
        group: one rank of every replica, those that hold the same shards: a process group, or a
            dimension of a mesh, such as ``mesh["replicate"]``. ``None``: a replica alone.
        wire: what pseudo-gradients are on the wire.
        error_feedback: send what encoding has lost along with the next pseudo-gradient.
        streaming: exchange fragments one by one, while inner steps go on.

    Attributes:
        inner: the inner optimizer.
        steps: inner steps made.
        bytes_sent: what this rank has sent to other replicas.

    Raises:
        ValueError: arguments that contradict each other; the group is not one of replicas; the
            optimizer has parameters that the model has not.
        TypeError: a parameter's dtype is not supported.
        RanksDivergedError: replicas have other models or settings.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        *,
        every: int,
        group: dist.ProcessGroup | DeviceMesh | None,
        outer: OuterSGD | None = None,
        wire: WireFormat = WireFormat.FP32,
        error_feedback: bool = False,
        streaming: Streaming | None = None,
    ) -> None:
        super().__init__(inner)
        self._outer = outer or OuterSGD()
        self._streaming = streaming or Streaming()
        self._streaming.check(every)
        self._every = every
        self._wire = WireFormat(wire)
        self._codec = codec_of(self._wire)
        self._model = model
        self.steps = 0
        self._sent_before = 0
        self._swap: AllToAll | None = None
        self._group: dist.ProcessGroup | None = None
        parameters = trained_parameters(model, inner)
        blocks = [set(block.parameters()) for block in repeated_blocks(model)]
        self._fragments = [
            Fragment(f"fragment {i}", part, keeps_error=error_feedback)
            for i, part in enumerate(deal_out(parameters, blocks, self._streaming.fragments))
            if part
        ]
        self.change_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make an inner step, and whatever exchange or outer step is due after it.

        Raises:
            PeerLostError: another replica is lost. The outer parameters of this one are as they
                were; see :meth:`change_group`.
            ValueError: a parameter has changed its shape.
        """
        loss = self.inner.step(closure)
        self.after_inner_step()
        return loss

    def after_inner_step(self) -> None:
        """Count a step that the inner optimizer has made by itself, and do what is due.

        For loops that step the inner optimizer themselves, such as those with a gradient scaler.
        All replicas have to count alike.

        Raises:
            PeerLostError: as :meth:`step`, and so are other errors.
        """
        self.steps += 1
        overlap = self._streaming.overlap
        for fragment in self._fragments:
            pending = fragment.pending
            if pending is None:
                continue
            age = self.steps - pending.begun
            if age >= overlap:
                self._apply(fragment)
            elif age >= overlap // 2 and pending.average is not None:
                pending.average.advance()
        for i, fragment in enumerate(self._fragments):
            if self._streaming.due(i, self.steps, self._every):
                self._begin(fragment)
                if not overlap:
                    self._apply(fragment)

    def state_dict(self) -> dict[str, Any]:
        """The states of both optimizers, tensors sharded as the parameters are.

        Inner parameters and the inner optimizer's state are each replica's own. Where exchanges
        overlap with steps it calls :meth:`finish_exchanges`, and so all replicas have to call it,
        or that, after the same step.
        """
        self.finish_exchanges()
        return state.pack(self.inner, self._fragments, self.steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states of both optimizers; the model has been loaded before.

        The state of an inner optimizer alone will do: then the outer parameters begin as the
        model's are.

        Raises:
            ValueError: it is of other parameters, or cut in another way.
        """
        self.steps = state.unpack(self.inner, self._fragments, state_dict)

    # -- replicas ----------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The replicas, or ``None`` for one alone."""
        return self._group

    @property
    def rounds(self) -> tuple[int, ...]:
        """Outer steps made, by fragment."""
        return tuple(fragment.rounds for fragment in self._fragments)

    @property
    def bytes_sent(self) -> int:
        """Bytes of encoded pseudo-gradients that this rank has sent to other replicas."""
        return self._sent_before + (self._swap.bytes_sent if self._swap is not None else 0)

    def change_group(self, group: dist.ProcessGroup | DeviceMesh | None) -> None:
        """Go on with other replicas. Every rank of the new group calls it, or makes its DiLoCo.

        Exchanges that are under way are finished with the old group; a replica that leaves calls
        this with ``None``. Where the old group has broken they are given up, and nothing is lost
        by it: what inner steps have done since is still in the inner parameters, and goes into the
        next exchange (:meth:`flush` makes one at once).

        In the new group whoever has made the most outer steps hands outer parameters and momentum
        to those who have not: to a replica that joins, or one that missed the end of an exchange.
        The latter keep what their inner steps have done that no exchange has carried.

        Args:
            group: as for the constructor.

        Raises:
            ValueError: it is not a group of replicas.
            RanksDivergedError: replicas have other models or settings.
            PeerLostError: a member of the new group is lost.
        """
        group = checked_group(group, self._fragments)
        broken = self._finish_if_possible()
        self._sent_before = self.bytes_sent
        self._group = group
        self._swap = None
        if group is None:
            return
        self._swap = AllToAll(group, self._fragments[0].device)
        settings = f"every={self._every}, {self._outer}, {self._wire}, {self._streaming}"
        mine = members.Report.of(settings, self.steps, self._fragments)
        agreed = members.agree(group, mine)
        self.steps = agreed.leader.steps
        self._reshard()
        for i, fragment in enumerate(self._fragments):
            moved = fragment.pseudo_gradient() if agreed.lacked[i] else None
            if agreed.needed[i]:
                members.hand_over(group, agreed.leader_rank, fragment)
            rounds = agreed.leader.rounds[i]
            if moved is not None and fragment in broken and rounds > fragment.rounds:
                # The exchange that only others could finish: it carried what this rank has done.
                fragment.mix_in(self._streaming.alpha)
            elif moved is not None:
                fragment.move_inner_by(moved)
            fragment.rounds, fragment.even_at = rounds, agreed.leader.even_at[i]

    def finish_exchanges(self) -> None:
        """Wait for the exchanges under way. Their results are still applied when they are due.

        Raises:
            PeerLostError: another replica is lost.
        """
        for fragment in self._fragments:
            if fragment.pending is not None:
                fragment.pending.wait()

    def flush(self) -> None:
        """End the round now: afterwards the inner parameters of all replicas are the outer ones.

        All replicas call it after the same step, at the end of the training say. Exchanges under
        way are applied; then whatever inner steps have done since is exchanged and applied.

        Raises:
            PeerLostError: as :meth:`step`, and so are other errors.
        """
        for fragment in self._fragments:
            if fragment.pending is not None:
                self._apply(fragment)
        for fragment in self._fragments:
            if fragment.even_at < self.steps:
                self._begin(fragment)
        for fragment in self._fragments:
            if fragment.pending is not None:
                self._apply(fragment, alpha=0.0)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Inside, the model has the outer parameters: to judge it, or to export it.

        They are the same on all replicas. Takes a copy of this rank's shards. What is written to
        parameters inside is lost.
        """
        self._reshard()
        kept = {
            parameter: local_of(parameter).clone()
            for fragment in self._fragments
            for parameter in fragment.parameters.values()
        }
        try:
            for fragment in self._fragments:
                fragment.mix_in(0.0)
            yield
        finally:
            self._reshard()
            for parameter, values in kept.items():
                local_of(parameter).copy_(values)

    # -- exchanges ---------------------------------------------------------------------------------

    def _begin(self, fragment: Fragment) -> None:
        fragment.check()
        gradient = fragment.pseudo_gradient()
        if self._swap is None:
            fragment.pending = Pending(self.steps, mean=gradient)
            return
        label = f"the pseudo-gradient of {fragment.name}"
        average = Average(gradient, self._swap, self._codec, label, fragment.error)
        fragment.pending = Pending(self.steps, average)

    def _apply(self, fragment: Fragment, alpha: float | None = None) -> None:
        assert fragment.pending is not None
        mean = fragment.pending.wait()
        fragment.pending = None
        self._reshard()
        fragment.outer_step(mean, self._outer)
        alpha = self._streaming.alpha if alpha is None else alpha
        fragment.mix_in(alpha)
        if not alpha:
            fragment.even_at = self.steps

    def _finish_if_possible(self) -> list[Fragment]:
        """Apply what is under way; return the fragments whose exchange has broken."""
        broken = []
        for fragment in self._fragments:
            if fragment.pending is None:
                continue
            try:
                self._apply(fragment)
            except PeerLostError:  # which is why the caller changes the group
                fragment.pending = None
                broken.append(fragment)
        return broken

    def _reshard(self) -> None:
        """Have no one hold full parameters made of shards that are about to change."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def trained_parameters(model: nn.Module, inner: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer moves, by fully qualified name, in the model's order.

    Raises:
        ValueError: one is none of the model's.
    """
    names: dict[Tensor, str] = {each: fqn for fqn, each in model.named_parameters()}
    held = set(names_in_order(inner, names, "inner optimizer"))
    found = {fqn: each for fqn, each in model.named_parameters() if fqn in held}
    if not found:
        raise ValueError("inner optimizer: found no parameters, expected those of the model")
    return found


def checked_group(
    group: dist.ProcessGroup | DeviceMesh | None, fragments: list[Fragment]
) -> dist.ProcessGroup | None:
    """The process group of the replicas.

    Raises:
        ValueError: a mesh of several dimensions, or ranks that share a parameter of one replica.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: found a mesh of {group.ndim} dimensions {group.mesh_dim_names}, expected "
                'the one that replicates, such as mesh["replicate"]'
            )
        group = group.get_group()
    if group is None:
        return None
    ranks = set(dist.get_process_group_ranks(group))
    me = dist.get_rank()
    for fragment in fragments:
        for fqn, parameter in fragment.parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            shared = ranks & set(parameter.device_mesh.mesh.flatten().tolist())
            if shared - {me}:
                raise ValueError(
                    f"group: rank {me} found ranks {sorted(ranks)}, expected one rank of each "
                    f"replica; but {fqn} is sharded over ranks {sorted(shared)} of them. Shard the "
                    'model over mesh["shard"] only, and pass group=mesh["replicate"]'
                )
    return group
