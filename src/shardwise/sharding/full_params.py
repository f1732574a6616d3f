"""What shards are gathered into: the memory of the full parameters of a group.

Each parameter is filled in one of five ways, chosen once. A way is a list of parameters:

=========  =======================================  ============================================
way        when                                     cost of an unshard
=========  =======================================  ============================================
aliased    there is one rank, and its shard is in   none: full parameter and shard share memory
           the compute dtype
copied     the shard is the full parameter, but     one copy
           there are several ranks (a scalar), or
           another dtype or device
direct     cut along dimension 0                    the gather: the gathered buffer *is* the
                                                    parameter, without a copy
staged     cut along another dimension              the gather, then one copy that interleaves
                                                    the columns of the ranks
extended   the shard is a tensor subclass with      the gather of what the subclass sends, and
           ``fsdp_pre_all_gather``                  what it does with the result
=========  =======================================  ============================================

Under ``reshard_after_forward=k`` the full parameters are not freed after forward, but cut over
every k consecutive ranks (say those of one host). Backward gathers among those only:

    sharded over 4       rank 0: a   rank 1: b   rank 2: c   rank 3: d
    full                 abcd        abcd        abcd        abcd
    post-forward over 2  ab          cd          ab          cd
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, dtensor, fsdp
from shardwise.base import observe
from shardwise.base.observe import Activity, Memory
from shardwise.sharding import attributes
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import ShardedParam, Version
from shardwise.sharding.placement import full_tensor
from shardwise.transport.base import FullBuffers, Label, Transport, Work
from shardwise.transport.memory import HeapBuffers

observe.ALLOCATES[__file__] = Memory.FULL_PARAMETERS

if TYPE_CHECKING:
    from shardwise.sharding.extension import Extension

# More writes than a parameter will ever see.
_SEALED = 1_000_000_000


class AliasedParams:
    """Full parameters that share memory with their shards.

    Args:
        params: the parameters.
    """

    def __init__(self, params: Sequence[GroupParam]) -> None:
        self._forms = [param.form for param in params]
        _make_fulls(params, [param.local.detach().view(-1) for param in params])
        self._looks = self._look()
        addresses = [address for *_, address in self._looks]
        self._fulls = list(zip(params, _fulls_of(params), addresses, strict=True))
        self._is_in_place = True

    def _look(self) -> list[tuple[int, int, int, int]]:
        """Return what changes when shards are written to, exchanged or moved; see ``Version``."""
        return [autograd.look_at_sharded(form.parameter, form.steps) for form in self._forms]

    def follow(self) -> bool:
        """Let autograd see writes to the shards as writes to the full parameters.

        A backward that needs the value of before then raises, as without sharding.

        Returns:
            Whether the shards are in the same memory as the full parameters.
        """
        before, self._looks = self._looks, self._look()
        if before != self._looks:
            self._is_in_place = True
            for (_, full, address), old, new in zip(self._fulls, before, self._looks, strict=True):
                *written, local, _ = old
                *written_now, local_now, address_now = new
                self._is_in_place &= address_now == address
                # What `to()` or `swap_tensors` put in the place of a shard wrote nothing.
                if written != written_now and local == local_now:
                    autograd.set_versions([full], [autograd.version_of(full) + 1])
        return self._is_in_place

    def take_back(self) -> None:
        """Copy the data that a module gave to a full parameter, and alias it again.

        A module does that with ``.data = ...``.
        """
        for param, full, address in self._fulls:
            # A subclass has no address.
            if type(full) is nn.Parameter and full.data_ptr() != address:
                assert param.memory is not None
                param.memory.copy_(param.full_data)
                full.data = param.memory


class FilledParams:
    """Full parameters with memory of their own, which hold their values from time to time.

    At other times they are *sealed*: autograd refuses them, since it finds another version than it
    saved. A backward that no hook sees (through a tensor that the module did not return, say) would
    otherwise compute with whatever is in that memory.

    Args:
        params: the parameters.
    """

    def __init__(self, params: Sequence[GroupParam]) -> None:
        self.params = params
        self._fulls = _fulls_of(params)
        self._forms = [param.form for param in params]
        # The versions of the shards when they were gathered.
        self._shards: list[Version] = []
        # The versions and addresses of full parameters that hold their values.
        self._found: list[tuple[int, int]] | None = None

    def begin(self) -> None:
        """Note that the shards are gathered now."""
        self._shards = [form.version for form in self._forms]

    @property
    def outdated(self) -> list[GroupParam]:
        """The parameters whose shards were written to since they were gathered."""
        looks = zip(self.params, self._shards, strict=True)
        return [param for param, before in looks if param.form.version != before]

    @property
    def holds_values(self) -> bool:
        """Whether autograd may use the full parameters: they are not sealed."""
        return self._found is not None

    def unseal(self) -> None:
        """Let autograd use the full parameters: they hold their values now."""
        versions = autograd.versions_of(self._fulls)
        if max(versions, default=0) >= _SEALED:
            autograd.set_versions(self._fulls, [version % _SEALED for version in versions])
        self._found = autograd.look_at(self._fulls)

    def seal(self) -> None:
        """Make autograd refuse the full parameters: their memory is about to be freed."""
        if self._found is not None:
            self._found = None
            versions = autograd.versions_of(self._fulls)
            autograd.set_versions(self._fulls, [version + _SEALED for version in versions])

    @property
    def written(self) -> list[GroupParam]:
        """The parameters that modules have written to since they hold their values."""
        if self._found is None or self._found == (now := autograd.look_at(self._fulls)):
            return []
        looks = zip(self.params, self._found, now, strict=True)
        return [param for param, before, after in looks if before != after]

    def deliver(self) -> list[GroupParam]:
        """Copy what was written to the shards.

        Returns:
            The parameters that were written to.

        Raises:
            MisuseError: a shard was written to as well, or a full parameter got data of another
                shape.
        """
        written = self.written
        for param in written:
            i = self.params.index(param)
            param.take_over_writes(is_shard_written=param.form.version != self._shards[i])
            self._shards[i] = param.form.version
        if written:
            self._found = autograd.look_at(self._fulls)
        return written

    def outdate(self, form: ShardedParam) -> None:
        """Make autograd refuse what it has saved of a parameter: the shard has other values now.

        Not in another dtype: without sharding, backward needs a copy there, which no step writes
        to.
        """
        for i, param in enumerate(self.params):
            if param.form is form and self._fulls[i].dtype == param.dtype:
                version = autograd.version_of(self._fulls[i]) + 1
                autograd.set_versions([self._fulls[i]], [version])
                if self._found is not None:
                    before, address = self._found[i]
                    self._found[i] = before + 1, address


#: What an all-gather sends, and into what it receives.
Gathered = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


class CopiedParams:
    """Full parameters that shards are copied to.

    Args:
        params: the parameters.
        fulls: their memory.
    """

    def __init__(self, params: Sequence[GroupParam], fulls: Sequence[torch.Tensor]) -> None:
        self._params = params
        _make_fulls(params, fulls)

    def fill(self, source: PostForwardShards | None) -> None:
        """Copy the shards now, or what forward kept of them: later writes are for the next gather.

        Args:
            source: the post-forward shards to copy instead of the shards, if there are any.
        """
        for param in self._params:
            shard = param.local if source is None else source.shard_of(param)
            param.full_data.copy_(shard, non_blocking=True)


class DirectParams:
    """Full parameters that *are* what shards are gathered into.

    Args:
        params: the parameters.
        buffers: what their shards are gathered into.
        fulls: the memory of the full parameters.
    """

    def __init__(
        self, params: Sequence[GroupParam], buffers: FullBuffers, fulls: Sequence[torch.Tensor]
    ) -> None:
        self._params = params
        self._buffers = buffers
        self._gathering: tuple[str, PostForwardShards | None] = "", None
        _make_fulls(params, fulls)

    def gathered(self, name: str, source: PostForwardShards | None) -> Gathered:
        """Return what the all-gather takes.

        Args:
            name: of the group.
            source: the post-forward shards to gather instead of the shards, if there are any.
        """
        self._gathering = name, source
        if source is None:
            return [param.local.view(-1) for param in self._params], self._buffers.tensors
        buffers = [
            buffer[: source.layout_of(param).padded_numel]
            for param, buffer in zip(self._params, self._buffers.tensors, strict=True)
        ]
        return [source.shard_of(param) for param in self._params], buffers


class StagedParams(DirectParams):
    """Full parameters whose chunks are gathered elsewhere, and then interleaved."""

    def finish(self) -> None:
        """Copy the chunks that have arrived to where they belong, and free their memory."""
        name, source = self._gathering
        with observe.during(Activity.COPY, name):
            for param, chunks in zip(self._params, self._buffers.tensors, strict=True):
                layout = param.layout if source is None else source.layout_of(param)
                layout.from_chunks(chunks[: layout.padded_numel], param.full_data)
            self._buffers.free()


def _fulls_of(params: Sequence[GroupParam]) -> list[nn.Parameter]:
    return [param.full for param in params if param.full is not None]


def _make_fulls(params: Sequence[GroupParam], fulls: Sequence[torch.Tensor]) -> None:
    for param, full in zip(params, fulls, strict=True):
        param.make_full(full)


class FullParams:
    """The full parameters of one group, their memory, and the all-gather that fills it.

    The constructor makes the full form of every parameter, without memory.

    Args:
        params: the parameters.
        mesh: the ranks that they are sharded over.
        post_forward: the shards between forward and backward, which are gathered over fewer ranks.

    Attributes:
        aliased: the full parameters that share memory with their shards.
        filled: the full parameters whose memory :meth:`free` frees.
        is_allocated: whether a gather has given them memory, or is about to.
        moves: whether a gather does anything at all: not if all parameters are aliased.
        storages: the storages of those that are freed.
    """

    def __init__(
        self,
        params: Sequence[GroupParam],
        mesh: DataMesh,
        post_forward: PostForwardShards | None = None,
    ) -> None:
        self._params = params
        self._made_of = [param.look() for param in params]
        self._transport = mesh.shard
        self._works: list[Work] = []
        self._name = ""  # of the group
        self.is_allocated = False
        self._extended: list[Extension] = []
        aliased: list[GroupParam] = []
        copied: list[GroupParam] = []
        direct: list[GroupParam] = []
        staged: list[GroupParam] = []
        for param in params:
            alone = mesh.shard.world_size == 1
            same = param.compute_dtype == param.dtype
            if fsdp.has_extension(param.local):
                from shardwise.sharding.extension import Extension

                self._extended.append(Extension(param, mesh))
            elif alone and same and param.local.device == mesh.device:
                aliased.append(param)
            elif alone or param.layout.dim is None:
                copied.append(param)
            elif param.layout.is_rank_major:
                direct.append(param)
            else:
                staged.append(param)

        def memory(make: _MakeBuffers, its: list[GroupParam], numels: list[int]) -> FullBuffers:
            dtypes = [param.compute_dtype for param in its]
            return make(numels, dtypes, mesh.device)

        # The transport owns the buffers that it gathers into. The rest is plain memory.
        gather_into = self._transport.full_buffers if post_forward is None else HeapBuffers

        def make_arriving() -> list[FullBuffers]:
            return [
                memory(gather_into, its, [param.layout.padded_numel for param in its])
                for its in (direct, staged)
            ]

        arriving = make_arriving()
        owned = staged + copied
        own = memory(HeapBuffers, owned, [param.layout.numel for param in owned])
        self._buffers = [buffers for buffers in (own, *arriving) if buffers.tensors]
        # What is received in gathers of which this rank needs nothing.
        self._gathered = direct + staged
        self._make_spare = functools.cache(make_arriving)
        self._reported = dict.fromkeys(self._buffers, 0)  # how much memory of each
        self.aliased = AliasedParams(aliased)
        self._copied = CopiedParams(copied, own.tensors[len(staged) :])
        self._direct = DirectParams(direct, arriving[0], arriving[0].tensors)
        self._finished: list[StagedParams | Extension] = [*self._extended]
        if staged:
            self._finished.append(StagedParams(staged, arriving[1], own.tensors[: len(staged)]))
        self.filled = FilledParams(direct + owned)
        self.moves = bool(self._buffers or self._extended)
        self.storages = frozenset(
            storage
            for tensor in (*arriving[0].tensors, *own.tensors)
            if tensor.numel() and (storage := dtensor.storage_of(tensor)) is not None
        )

    @property
    def is_outdated(self) -> bool:
        """Whether a shard was replaced since the full parameters were made."""
        return self._made_of != [param.look() for param in self._params]

    def start(self, label: Label, source: PostForwardShards | None = None) -> None:
        """Allocate memory, and start the all-gather. Shards must not change until :meth:`finish`.

        Not called, as :meth:`finish` is not, if nothing moves.

        Args:
            label: the label of the group.
            source: the post-forward shards to gather instead of the shards, if there are any.
        """
        self.is_allocated = True
        self._name = label.name
        with autograd.no_grad():
            for each in self._buffers:
                each.allocate()
            self._report()
            if source is None:
                self.filled.begin()
            self._copied.fill(source)
            shards, buffers = self._direct.gathered(label.name, source)
            for way in self._finished:
                sent, into = way.gathered(label.name, source)
                shards, buffers = [*shards, *sent], [*buffers, *into]
            if shards:
                transport = self._transport if source is None else source.transport
                self._works.append(transport.all_gather(shards, buffers, label))

    def supply(self, label: Label) -> None:
        """Take part in an all-gather for other ranks. What this rank holds stays as it is.

        Args:
            label: the label of the group.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        if not self._gathered:
            return
        with autograd.no_grad():
            spare = self._make_spare()
            for each in spare:
                each.allocate()
            shards = [param.local.view(-1) for param in self._gathered]
            buffers = [tensor for each in spare for tensor in each.tensors]
            self._transport.all_gather(shards, buffers, label).wait()
            for each in spare:
                each.free()

    def finish(self) -> None:
        """Wait for the all-gather. Afterwards every full parameter holds its values.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        with autograd.no_grad():
            while self._works:
                self._works.pop().wait()
            for way in self._finished:
                way.finish()
            self._report()
            self.filled.unseal()

    def _report(self) -> None:
        for buffers, before in self._reported.items():
            if buffers.nbytes != before:
                self._reported[buffers] = buffers.nbytes
                observe.memory(Memory.FULL_PARAMETERS, self._name, buffers.nbytes - before)

    def abandon(self) -> None:
        """Give up a gather that will not be waited for.

        It may still write to the memory, which stays for the next one: by the end of that, the
        first is over, too.
        """
        self._end_use()
        self._works.clear()
        for each in self._buffers:
            each.abandon()

    def free(self) -> None:
        """Free the memory that is not aliased. Autograd refuses it until the next gather."""
        if self._end_use():
            for each in self._buffers:
                each.free()
            self._report()
            for extension in self._extended:
                extension.free()

    def retain(self) -> None:
        """End the use of the memory as :meth:`free` does, but keep its addresses."""
        if self._end_use():
            for each in self._buffers:
                each.retain()

    def _end_use(self) -> bool:
        """Seal what was filled, and return whether it has memory."""
        self.aliased.take_back()
        had_memory, self.is_allocated = self.is_allocated, False
        if had_memory:
            self.filled.seal()
        return had_memory


_MakeBuffers = Callable[[Sequence[int], Sequence[torch.dtype], torch.device], FullBuffers]


def check_home(params: Sequence[GroupParam], home: torch.device) -> None:
    """Check that all shards are on the device ``home``.

    Raises:
        RuntimeError: a shard is on the meta device or on another one.
        MisuseError: its values are lost.
    """
    for param in params:
        param.form.check_not_lost()
    on_meta = [param.fqn for param in params if param.local.is_meta]
    if on_meta:
        raise RuntimeError(
            f"rank {dist.get_rank()}: parameters {', '.join(on_meta)} are on the meta device; "
            "materialize them first, with shardwise.materialize(model), or with "
            "model.to_empty(device=...) followed by an initialization"
        )
    elsewhere = [param for param in params if param.local.device != home]
    if elsewhere:
        found = ", ".join(f"{param.fqn} on {param.local.device}" for param in elsewhere)
        raise RuntimeError(
            f"rank {dist.get_rank()}: expected shards on {home}, found {found}; move the model "
            "there, or shard it on a mesh of the device it is on"
        )


class PostForwardShards:
    """The shards of one group between forward and backward, over fewer ranks.

    Args:
        params: the parameters of the group.
        mesh: the mesh ``(replicate, shard)`` made by :meth:`DataMesh.of_groups_of`.

    Attributes:
        mesh: the same mesh.
    """

    def __init__(self, params: Sequence[GroupParam], mesh: DataMesh) -> None:
        self.mesh = mesh
        self._layouts: dict[GroupParam, Layout] = {}
        self._shards: dict[GroupParam, torch.Tensor] = {}
        self._registered: dict[GroupParam, tuple[nn.Parameter, int]] = {}
        self._uncut = [param for param in params if param.layout.dim is None]
        for param in params:
            if param.layout.dim is not None:
                self._layouts[param] = Layout(
                    param.layout.shape, param.layout.dim, mesh.shard.world_size
                )

    @property
    def transport(self) -> Transport:
        """The transport that gathers them."""
        return self.mesh.shard

    def keep(self, label: Label) -> None:
        """Copy the shards out of the full parameters, and put them into the modules.

        Args:
            label: the label of the group.
        """
        for param in self._uncut:
            GroupParam.leave_all([param])
            param.register(param.form.parameter)  # every rank has all of it
            self._shards[param] = param.full_data.clone()
            observe.memory_of(Memory.FULL_PARAMETERS, label.name, self._shards[param])
        with autograd.no_grad():
            for param, layout in self._layouts.items():
                rows = layout.cut(param.full_data, self.mesh.shard.rank)
                shard = rows.clone(memory_format=torch.contiguous_format)
                observe.memory_of(Memory.FULL_PARAMETERS, label.name, shard)
                spec = dtensor.make_spec(
                    self.mesh.mesh,
                    self.mesh.placements(layout.dim),
                    layout.shape,
                    layout.strides,
                    shard.dtype,
                )
                assert param.full is not None
                param.follow_requires_grad(param.full)
                kept = dtensor.make_parameter(shard, spec, requires_grad=True)
                attributes.share(kept, param.form.attributes)
                hand_on = functools.partial(_hand_on_grad, param)
                kept.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
                kept.requires_grad_(param.sharded.requires_grad)  # it may be thawed meanwhile
                param.register(kept)
                self._registered[param] = kept, autograd.version_with_local(kept)
                self._shards[param] = shard.view(-1)

    def release(self) -> None:
        """Free the shards."""
        for param, (kept, _) in self._registered.items():
            param.follow_requires_grad(kept)
        self._registered.clear()
        self._shards.clear()

    @property
    def written(self) -> list[GroupParam]:
        """The parameters whose post-forward shards were written to: those writes would be lost."""
        return [
            p
            for p, (kept, before) in self._registered.items()
            if autograd.version_with_local(kept) != before
        ]

    def shard_of(self, param: GroupParam) -> torch.Tensor:
        """The post-forward shard of ``param``: 1-D, or all of a scalar."""
        return self._shards[param]

    def layout_of(self, param: GroupParam) -> Layout:
        """How ``param`` is cut over the smaller mesh."""
        return self._layouts[param]


def _hand_on_grad(param: GroupParam, kept: torch.Tensor) -> None:
    """Add the gradient of a post-forward shard, such as that of a penalty, to the parameter's."""
    grad, kept.grad = kept.grad, None
    assert isinstance(grad, DTensor)
    with autograd.no_grad():
        rows = param.layout.cut(full_tensor(grad), param.form.mesh.shard.rank)
        param.form.add_grad(rows.to(param.dtype, memory_format=torch.contiguous_format))
    param.form.run_hooks()
