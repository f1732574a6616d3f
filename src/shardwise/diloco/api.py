"""``DiLoCo``: an optimizer around an optimizer, which synchronizes replicas once in many steps.

What happens after inner step t, for a fragment whose exchange is due every H steps:

    t            pseudo-gradient = outer - inner; its exchange starts
    t + tau / 2  its second half starts                                       (see average.py)
    t + tau      outer step; inner = alpha * inner + (1 - alpha) * outer

With the defaults (one fragment, tau = 0, alpha = 0) all of it happens at once every H steps, which
is DiLoCo; with others it is Streaming DiLoCo. If steps are kept, the last line is

    t + tau      outer step; inner = outer + what inner steps have changed since t
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import PeerLostError
from shardwise.base.optim_names import names_in_order
from shardwise.diloco import members, state
from shardwise.diloco.average import Average
from shardwise.diloco.fragment import Fragment, Pending, assign_to_fragments
from shardwise.diloco.membership import Quorum, ReplicaSession
from shardwise.diloco.rounds import Rounds, check_alone
from shardwise.diloco.settings import (
    OuterSGD,
    Overlapped,
    Streaming,
    WireFormat,
    check_streaming,
    keeps_errors,
)
from shardwise.frontends.module import FSDPModule
from shardwise.optim.around import AroundOptimizer
from shardwise.sharding.mesh import mark_separate, unaveraged_dims
from shardwise.transport.all_to_all import AllToAll
from shardwise.wrap import repeated_blocks


class DiLoCo(AroundOptimizer):
    """Distributed low-communication training: ``every`` inner steps, then an outer step for all.

    Each replica trains alone, sharded in any way over its own ranks. After every ``every`` inner
    steps the replicas average how far they have moved, and the outer optimizer moves the outer
    parameters, from which all replicas continue. Nothing else is exchanged between replicas.

    It is an optimizer itself: call its :meth:`step` and :meth:`zero_grad`, and pass it to learning
    rate schedules and to ``shardwise.checkpoint``. Every rank of every replica creates it, and all
    make the same calls. Creating it compares the replicas; where parameters differ, all receive
    those of the first replica in the group.

    Memory of a rank, in addition to model and inner optimizer: two fp32 copies of its shards (outer
    parameters and momentum), a third with error feedback, and during an exchange up to three and a
    half copies of the fragment that is exchanged.

    Args:
        model: sharded over the ranks of this replica only, or not sharded.
        inner: the optimizer of its parameters, such as AdamW. Parameters that it does not have are
            left alone.
        outer: the outer optimizer.
        every: inner steps of a round.
        group: one rank of every replica, those that hold the same shards: a process group, or a
            dimension of a mesh, such as ``mesh["replicate"]``. ``None`` for a single replica. With
            a :class:`~shardwise.diloco.Quorum`, replicas are independent of each other.
        wire: the format of pseudo-gradients on the wire.
        error_feedback: add what encoding has lost to the next pseudo-gradient. By default, with
            formats of less than a byte per element, which do not go without it.
        streaming: exchange fragments one by one, while inner steps continue.

    Attributes:
        inner: the inner optimizer.
        steps: number of inner steps.
        bytes_sent: bytes that this rank has sent to other replicas.

    Raises:
        ValueError: arguments contradict each other, the group is not one of replicas, or the
            optimizer has parameters that the model does not have.
        TypeError: the dtype of a parameter is not supported.
        RanksDivergedError: replicas have different models or settings.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        *,
        every: int,
        group: dist.ProcessGroup | DeviceMesh | Quorum | None,
        outer: OuterSGD | None = None,
        wire: WireFormat = WireFormat.FP32,
        error_feedback: bool | None = None,
        streaming: Streaming | None = None,
    ) -> None:
        check_arguments(DiLoCo.__init__, locals())
        super().__init__(inner)
        self._outer = outer or OuterSGD()
        self._streaming = streaming or Streaming()
        check_streaming(self._streaming, every)
        self._every = every
        self._wire = WireFormat(wire)
        self._model = model
        self.steps = 0
        self._sent_before = 0
        self._all_to_all: AllToAll | None = None
        self._group: dist.ProcessGroup | None = None
        self._rounds: Rounds | None = None
        parameters = trained_parameters(model, inner)
        feedback = keeps_errors(self._wire, error_feedback)
        blocks = [set(block.parameters()) for block in repeated_blocks(model)]
        self._fragments = [
            Fragment(f"fragment {i}", part, error_feedback=feedback)
            for i, part in enumerate(
                assign_to_fragments(parameters, blocks, self._streaming.fragments)
            )
            if part
        ]
        if isinstance(group, Quorum):
            fragment = check_alone(self._fragments, self._streaming.overlap)  # before it connects
            self._rounds = Rounds(
                ReplicaSession(group),
                fragment,
                every=every,
                outer=self._outer,
                wire=self._wire,
                settings=f"every={every}, {self._outer}, {self._wire}",
                reshard=self._reshard,
            )
        else:
            self.change_group(group)
        for mesh in {each.device_mesh for each in parameters.values() if isinstance(each, DTensor)}:
            mark_separate(mesh, unaveraged_dims([mesh]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an inner step, and whatever exchange or outer step is due after it.

        Args:
            closure: passed to the inner optimizer.

        Returns:
            What the inner optimizer's step returned: the loss of ``closure``, or ``None``.

        Raises:
            PeerLostError: another replica is lost. The outer parameters of this one are as they
                were; see :meth:`change_group`.
            ValueError: a parameter has changed its shape.
        """
        loss = self.inner.step(closure)
        self.after_inner_step()
        return loss

    def after_inner_step(self) -> None:
        """Count a step that the inner optimizer made on its own, and do what is due.

        For loops that step the inner optimizer themselves, such as those with a gradient scaler.
        All replicas must count the same steps.

        Raises:
            PeerLostError: as for :meth:`step`, and so are other errors.
        """
        self.steps += 1
        if self._rounds is not None:
            self._rounds.after_step(self.steps)
            return
        overlap = self._streaming.overlap
        for fragment in self._fragments:
            pending = fragment.pending
            if pending is None:
                continue
            age = self.steps - pending.begun
            if age >= overlap:
                self._apply(fragment)
            elif age >= overlap // 2:
                pending.average.advance()
        for i, fragment in enumerate(self._fragments):
            if self._streaming.due(i, self.steps, self._every):
                self._begin(fragment)
                if not overlap:
                    self._apply(fragment)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both optimizers, with tensors sharded as the parameters are.

        Inner parameters and the state of the inner optimizer belong to each replica alone. If
        exchanges overlap with steps, this calls :meth:`finish_exchanges`, so all replicas must call
        either after the same step.

        Returns:
            A dict of tensors and plain values.

        Raises:
            PeerLostError: another replica is lost.
        """
        self.finish_exchanges()
        return state.pack(self.inner, self._fragments, self.steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both optimizers, after the model has been loaded.

        The state of an inner optimizer alone is enough: then the outer parameters start as the
        model's.

        Args:
            state_dict: what :meth:`state_dict` returned, or the state of an inner optimizer.

        Raises:
            ValueError: it belongs to other parameters, or is sharded differently.
        """
        self.steps = state.unpack(self.inner, self._fragments, state_dict)

    # -- replicas ----------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the replicas, or ``None`` for a single one."""
        return self._group

    @property
    def rounds(self) -> tuple[int, ...]:
        """The number of outer steps, by fragment."""
        return tuple(fragment.rounds for fragment in self._fragments)

    @property
    def bytes_sent(self) -> int:
        """The bytes of encoded pseudo-gradients that this rank has sent to other replicas."""
        if self._rounds is not None:
            return self._rounds.bytes_sent
        return self._sent_before + (
            self._all_to_all.bytes_sent if self._all_to_all is not None else 0
        )

    def change_group(self, group: dist.ProcessGroup | DeviceMesh | None) -> None:
        """Continue with other replicas; every rank of the new group calls it or creates its DiLoCo.

        Not with a :class:`~shardwise.diloco.Quorum`, whose replicas come and go by themselves.

        Exchanges in progress are finished with the old group; a replica that leaves passes
        ``None``. If the old group is broken, they are given up and nothing is lost: what inner
        steps have done since is still in the inner parameters, and goes into the next exchange
        (:meth:`flush` does one at once).

        In the new group, the member with the most outer steps sends outer parameters and momentum
        to those that do not have them: to a replica that joins, or one that missed the end of an
        exchange. The latter keep what their inner steps have done and no exchange has carried.

        Args:
            group: as for the constructor.

        Raises:
            ValueError: it is not a group of replicas, or there is a quorum.
            RanksDivergedError: replicas have different models or settings.
            PeerLostError: a member of the new group is lost.
        """
        if self._rounds is not None:
            raise ValueError("group: replicas that meet at a quorum have none that could change")
        group = checked_group(group, self._fragments)
        broken = self._finish_if_possible()
        self._sent_before = self.bytes_sent
        self._group = group
        self._all_to_all = None
        if group is None:
            return
        self._all_to_all = AllToAll(group, self._fragments[0].device)
        settings = f"every={self._every}, {self._outer}, {self._wire}, {self._streaming}"
        mine = members.MemberReport.of(settings, self.steps, self._fragments)
        leader_rank, found = members.agree(group, mine)
        leader = found[leader_rank]
        lacked = mine.lacks(leader)
        needed = [any(each) for each in zip(*(r.lacks(leader) for r in found), strict=True)]
        self.steps = leader.steps
        self._reshard()
        for i, fragment in enumerate(self._fragments):
            moved = fragment.pseudo_gradient() if lacked[i] else None
            if needed[i]:
                members.broadcast_outer_state(group, leader_rank, fragment)
            rounds = leader.rounds[i]
            if moved is not None and fragment in broken and rounds > fragment.rounds:
                # Only others could finish this exchange: it carried what this rank has done.
                self._take_over(fragment, broken[fragment], self._streaming.alpha)
            elif moved is not None:
                fragment.move_inner_by(moved)
            fragment.rounds, fragment.even_at = rounds, leader.even_at[i]

    def join(self) -> None:
        """Take part from now on, with the outer parameters of the replicas that are there.

        Only with a :class:`~shardwise.diloco.Quorum`; the first step does it otherwise. Call it
        after loading a checkpoint. What this replica has loaded is kept if no other one has newer
        outer parameters.

        Raises:
            RanksDivergedError: the other replicas have a different model or different settings.
            PeerLostError: the server of the quorum cannot be reached.
        """
        if self._rounds is not None:
            self._rounds.join()

    def leave(self) -> None:
        """Take no part any more, so that no other replica waits for this one.

        Only with a :class:`~shardwise.diloco.Quorum`. The last step comes before.
        """
        if self._rounds is not None:
            self._rounds.quorum.close()

    @property
    def has_peers(self) -> bool:
        """Whether other replicas train already, so that :meth:`join` gets what they have.

        Always with a group. With a :class:`~shardwise.diloco.Quorum` ranks may not see it at the
        same moment: ask one of them.
        """
        return self._group is not None if self._rounds is None else self._rounds.quorum.has_peers

    def count_tokens(self, tokens: int) -> None:
        """Count tokens of the step that follows: the weight of this replica in the next average.

        Only with a :class:`~shardwise.diloco.Quorum`, whose replicas may bring more or less to a
        round. Call it before every step on all replicas, or on none: then steps are counted.

        Args:
            tokens: of all ranks of this replica; equal on all of them.
        """
        if self._rounds is not None:
            self._rounds.count_tokens(tokens)

    def finish_exchanges(self) -> None:
        """Wait for the exchanges in progress. Their results are still applied when they are due.

        Raises:
            PeerLostError: another replica is lost.
        """
        for fragment in self._fragments:
            if fragment.pending is not None:
                fragment.pending.average.wait()

    def flush(self) -> None:
        """End the round now: afterwards the inner parameters of all replicas equal the outer ones.

        All replicas call it after the same step, for example at the end of training. Exchanges in
        progress are applied; then whatever inner steps have done since is exchanged and applied.

        Raises:
            PeerLostError: as for :meth:`step`, and so are other errors.
        """
        if self._rounds is not None:
            self._rounds.flush(self.steps)
            return
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
        """Put the outer parameters into the model inside the context, to evaluate or export it.

        They are the same on all replicas. This takes a copy of this rank's shards. What is written
        to parameters inside is lost.
        """
        self._reshard()
        kept = {
            parameter: dtensor.plain(parameter).detach().clone()
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
                dtensor.plain(parameter).detach().copy_(values)

    # -- exchanges ---------------------------------------------------------------------------------

    def _begin(self, fragment: Fragment) -> None:
        fragment.check()
        gradient = fragment.pseudo_gradient()
        label = f"the pseudo-gradient of {fragment.name}"
        average = Average(
            gradient, self._all_to_all, self._wire, label, fragment.error, fragment.sections
        )
        fragment.pending = Pending(self.steps, average)
        if self._streaming.overlap and self._streaming.overlapped is Overlapped.KEPT:
            fragment.pending.start = fragment.inner_parameters()

    def _apply(self, fragment: Fragment, alpha: float | None = None) -> None:
        pending = fragment.pending
        assert pending is not None
        mean = pending.average.wait()
        fragment.pending = None
        self._reshard()
        fragment.outer_step(mean, self._outer)
        self._take_over(fragment, pending, self._streaming.alpha if alpha is None else alpha)

    def _take_over(self, fragment: Fragment, pending: Pending, alpha: float) -> None:
        """Change the inner parameters at the end of an exchange, after the outer ones."""
        if pending.start is not None and self._streaming.overlapped is Overlapped.KEPT:
            fragment.move_from(pending.start)
            is_even = self.steps == pending.begun  # no step was made meanwhile
        else:
            fragment.mix_in(alpha)
            is_even = not alpha
        if is_even:
            fragment.even_at = self.steps

    def _finish_if_possible(self) -> dict[Fragment, Pending]:
        """Apply what is in progress; return the fragments whose exchange is broken."""
        broken: dict[Fragment, Pending] = {}
        for fragment in self._fragments:
            if fragment.pending is None:
                continue
            try:
                self._apply(fragment)
            except PeerLostError:  # the reason why the caller changes the group
                broken[fragment], fragment.pending = fragment.pending, None
        return broken

    def _reshard(self) -> None:
        """Free full parameters that were gathered from shards which are about to change."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def trained_parameters(model: nn.Module, inner: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer updates, by name, in the model's order.

    Raises:
        ValueError: one of them does not belong to the model.
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
    """Return the process group of the replicas.

    Raises:
        ValueError: the group is a mesh of several dimensions, or has ranks that share a parameter
            of one replica.
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
