"""A training in the memory of hosts: each keeps what its ranks hold, and what those before it hold.

    host 0: ranks 0 1        host 1: ranks 2 3        host 2: ranks 4 5
    keeps 0 1 and 4 5        keeps 2 3 and 0 1        keeps 4 5 and 2 3

After a step, each rank copies its shards, states and extra values into a file of its host's folder
(:mod:`shardwise.checkpoint.disk.host_memory`). While training goes on, a thread sends the file to a
rank of the next host, or as much of it as no other host holds: where each shard is on two hosts
anyway, almost nothing. When all ranks have done that, they agree that the version is complete, and
only then is the version before written over.

After a loss, the ranks that are started then say what their hosts keep. The latest version of which
everything is there, each tensor without a gap, goes from where it is to where it belongs, over any
number of ranks (:mod:`shardwise.checkpoint.ranks.moving`).
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch import autograd
from shardwise.base.arguments import check_arguments
from shardwise.base.boxes import full_box
from shardwise.base.devices import GLOO
from shardwise.base.errors import CheckpointError, MisuseError, PeerLostError
from shardwise.base.units import binary_size
from shardwise.checkpoint.disk.entries import (
    Manifest,
    Origin,
    StatePath,
    TensorEntry,
    Value,
    torch_dtype,
)
from shardwise.checkpoint.disk.host_memory import (
    FileWriter,
    KeptFile,
    KeptPart,
    KeptVersion,
    bytes_in,
    keep_only,
    kept_files,
)
from shardwise.checkpoint.disk.place import StrPath
from shardwise.checkpoint.disk.safetensors import PieceData
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.alike import RankState, check_alike
from shardwise.checkpoint.ranks.moving import (
    Departure,
    HeldState,
    Training,
    find_mixed,
    merge,
    move,
)
from shardwise.checkpoint.ranks.ring import VERSIONS, HostRing, Piece, ReplicaCost, folder_of
from shardwise.checkpoint.ranks.saving import Handle
from shardwise.elastic.memory_folder import memory_folder
from shardwise.transport.base import Label
from shardwise.transport.carrier import carrier
from shardwise.transport.peers import Peers, new_group

_AT_ONCE = 16 * 1024 * 1024  # bytes that a rank sends at once
_DOING, _RECOVER = "replicate", "recover"


def replicate(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    folder: StrPath | None = None,
    group: dist.ProcessGroup | None = None,
) -> Handle:
    """Keep a training state in the memory of this host and of the next. Every rank calls this.

    It returns once this rank's shards and states are copied into its host's memory. A thread then
    sends them to a rank of the next host, in a process group of its own; what two hosts hold anyway
    is not sent. The state counts, for :func:`recover`, once all ranks have done that, and the one
    before is kept until then. It survives the ranks, and the loss of any one host. If all ranks are
    on one host, it survives the ranks alone.

    A call first waits for the one before. Two states of this host's ranks, and two of those of the
    host before it, are in memory at the most. Whether there is room is checked by the first call.

    Args:
        step: the number of the state, larger than that of the call before.
        model: the model, between two steps.
        optimizer: an optimizer of the model's parameters.
        extra: anything else; see :func:`save`.
        folder: a folder in the memory of this host, for one training; ``None``: one in ``/dev/shm``
            (or in ``SHARDWISE_MEMORY``) for this job, which ends with the launcher. A group of some
            of the ranks needs a folder of its own.
        group: the ranks; the default process group if ``None``. It keeps one training.

    Returns:
        A handle to wait for. Wait before you destroy the process group.

    Raises:
        CheckpointError: a host has no room, ranks differ in ``step`` or ``extra``, nothing starts
            these ranks again, or the call before failed. Raised on every rank alike.
        MisuseError: there is no process group, or the model is not between two steps.
        RuntimeError: this rank is simulated.
    """
    given = locals()
    neighbors = _checked(replicate, given)
    carrier().check_threads()
    return neighbors.start(step, (model, optimizer), extra, folder)


@dataclass(frozen=True)
class Recovered:
    """What :func:`recover` has brought back, beside the model and the optimizer.

    Attributes:
        step: the number of the state.
        extra: as it was passed to :func:`replicate`.
        world_size: the number of ranks then.
    """

    step: int
    extra: dict[str, Any]
    world_size: int


def recover(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    at_least: int = 0,
    folder: StrPath | None = None,
    group: dist.ProcessGroup | None = None,
) -> Recovered | None:
    """Go on from what hosts keep in memory. Every rank calls this, before :func:`replicate`.

    The latest state that :func:`replicate` has kept goes into the model and the optimizer, sharded
    as they are now, over any ranks. It is complete: all ranks kept their part after the same step.

    If it is of another model, the model and the optimizer are as they were. If a rank fails later,
    the model is lost: what uses it raises an error, so build it again. The state stays in memory.

    Args:
        model: the model, sharded.
        optimizer: an optimizer of the model's parameters.
        at_least: the smallest ``step`` of use: that of the newest checkpoint.
        folder: as for :func:`replicate`.
        group: the ranks; the default process group if ``None``.

    Returns:
        The recovered state; ``None`` if no complete one is left.

    Raises:
        CheckpointError: it is of another model or optimizer, nothing starts these ranks again, or a
            rank failed. Raised on every rank alike.
        MisuseError: there is no process group.

    Warns:
        UserWarning: there were states, and too many hosts were lost.
    """
    given = locals()
    neighbors = _checked(recover, given)
    found = neighbors.recover((model, optimizer), at_least, folder, group)
    if found is None and neighbors.lost is not None and neighbors.ranks.coordinates:
        warnings.warn(words_of_loss(neighbors.lost), stacklevel=2)
    return found


def _checked(function: Callable[..., object], given: Mapping[str, Any]) -> Neighbors:
    """The memory of hosts, once all ranks have checked the arguments of a function."""
    if not dist.is_initialized():
        check_arguments(function, given)
    neighbors = neighbors_of(given["group"])

    def check() -> None:
        neighbors.wait()  # its error may have been reported on this rank, and not on others
        check_arguments(function, given)

    neighbors.ranks.begin(function.__name__, check)
    return neighbors


def words_of_loss(step: int) -> str:
    """Say that a state cannot be brought back."""
    return f"what hosts kept in memory of step {step} is no longer complete: too many were lost"


def neighbors_of(group: dist.ProcessGroup | None) -> Neighbors:
    """The memory of the hosts of a process group. All ranks must call this, the first time.

    Raises:
        MisuseError: there is no process group.
    """
    check_arguments(neighbors_of, locals())
    if not dist.is_initialized():
        raise MisuseError("replicate: found no process group; call init_process_group first")
    return Peers(group).once(Neighbors)


@dataclass(frozen=True)
class _Share:
    """What a rank copies: for each part, names and boxes; and what it has to know of the others."""

    version: KeptVersion
    pieces: Mapping[KeptPart, Sequence[Piece]]
    cost: ReplicaCost


@dataclass(frozen=True)
class _Home:
    """Where the hosts of a process group keep a training.

    Attributes:
        root: the folder that this rank was given, or that of the job.
        folder: this host's, in the root.
        ring: the hosts.
    """

    root: Path
    folder: Path
    ring: HostRing


class Neighbors:
    """What the hosts of a process group keep in memory; made once for each group.

    Args:
        peers: the ranks of the group.

    Attributes:
        ranks: the same ranks, in a group that nothing else uses.
        cost: what it takes; ``None`` before the first copy.
        lost: the step of a version that is no longer complete, where none is; else ``None``.
    """

    def __init__(self, peers: Peers) -> None:
        own = new_group(peers.members, timeout=timedelta(seconds=peers.timeout), backend=GLOO.name)
        self.ranks = Ranks(own)
        carrier().announce(Peers(own), _DOING)
        self._hosts = [each.host for each in carrier().announced(Peers(own))]
        self._found_home: _Home | None = None
        self.cost: ReplicaCost | None = None
        self._files: list[KeptFile] = []  # that this rank looks after, to recover
        self.lost: int | None = None
        self._sessions = 0  # before this one
        self._apart: frozenset[str] = frozenset()
        self._entries: list[TensorEntry] = []
        self._share: _Share | None = None
        self._complete: KeptVersion | None = None
        self._before: KeptVersion | None = None  # the one before it, of this session
        self._is_incomplete = False  # the last version that was begun
        self._handle: Handle | None = None

    def wait(self) -> None:
        """Wait for the version under way, if there is one.

        Raises:
            CheckpointError: it failed, and that has not been reported yet.
        """
        handle = self._handle
        if handle is not None:
            handle.join_thread()
            self._handle = None
            handle.join()

    @property
    def is_under_way(self) -> bool:
        """Whether a version is under way on this rank."""
        return self._handle is not None and not self._handle.done()

    @property
    def _home(self) -> _Home:
        assert self._found_home is not None
        return self._found_home

    def _use(self, doing: str, folder: StrPath | None) -> None:
        """Take this host's folder, the first time. All ranks must call this."""
        given, known = None if folder is None else Path(folder).absolute(), self._found_home

        def part() -> str:
            if known is not None:
                if given not in (None, known.root):
                    raise ValueError(
                        f"folder: found {given}, expected {known.root}, as in the first call: a "
                        "process group keeps one training"
                    )
                return str(known.root)
            if given is None and self.ranks.size < dist.get_world_size():
                raise ValueError(
                    "folder: found None for a group of some of the ranks, expected a folder: that "
                    "of the job is for a training on all of them"
                )
            return str(memory_folder() if given is None else given)

        roots = self.ranks.agree(doing, part, list)
        if known is not None:
            return
        root = Path(roots[self.ranks.rank])
        # Hosts may share a disk, of which each needs a part of its own; and of two launchers on
        # one host, each has a folder.
        mine = root / folder_of(self._hosts[self.ranks.rank])
        pairs = zip(self._hosts, roots, strict=True)
        ring = HostRing([f"{host} {root}" for host, root in pairs])
        self._found_home = _Home(root, mine, ring)
        self.ranks.all(doing, lambda: mine.mkdir(mode=0o700, parents=True, exist_ok=True))

    # -- keeping -------------------------------------------------------------------------------

    def start(
        self,
        step: int,
        source: Training,
        extra: Mapping[str, Any] | None = None,
        folder: StrPath | None = None,
    ) -> Handle:
        """Copy what this rank holds, and send it in a thread; see :func:`replicate`."""
        send = self.copy(step, source, extra, folder)
        self._handle = Handle(send, self._home.folder / self._version(step).name)
        self._handle.start()
        return self._handle

    def _version(self, step: int) -> KeptVersion:
        assert self._share is not None
        return replace(self._share.version, step=step)

    def _kept(self, version: KeptVersion, part: KeptPart, rank: int) -> KeptFile:
        return KeptFile(self._home.folder, version, part, rank, self.ranks.size)

    def copy(
        self,
        step: int,
        source: Training,
        extra: Mapping[str, Any] | None = None,
        folder: StrPath | None = None,
    ) -> Callable[[], None]:
        """Copy what this rank holds into its host's memory; see :func:`replicate`.

        Returns:
            What sends it. All ranks have to call that, at any time and in any thread.
        """
        self._use(_DOING, folder)
        if self._share is None or self._is_incomplete:
            # It takes up room. Without a version, what another session has left is all there is.
            self._clean(_DOING, () if self._complete else self._find(_DOING)[:1])
        self._is_incomplete = True
        held: list[Departure] = []
        files: dict[KeptPart, FileWriter] = {}

        def attempt() -> tuple[int, bool, RankState]:
            if step < 0:
                raise ValueError(f"step: found {step}, expected 0 or more")
            if (last := self._complete) is not None and step <= last.step:
                raise ValueError(f"step: found {step}, expected more than {last.step}, the last")
            mine = Departure(source, extra, _DOING, self.ranks.rank)
            mine.take_apart(self._apart)
            held.append(mine)
            is_planned = self._share is not None and mine.entries(0) == self._entries
            if is_planned:
                files.update(self._copied(mine, step))
            return step, is_planned, mine.held_beside

        def check(parts: list[tuple[int, bool, RankState]]) -> bool:
            if len(steps := {step for step, _, _ in parts}) > 1:
                raise ValueError(f"step: found {sorted(steps)}, expected the same on all ranks")
            check_alike([each for *_, each in parts], self.ranks.names)
            return all(is_planned for _, is_planned, _ in parts)

        if not self.ranks.agree(_DOING, attempt, check):
            self._plan(held[0])
            self.ranks.all(_DOING, lambda: files.update(self._copied(held[0], step)))
        return partial(self._send, self._version(step), files, held[0].values)

    def _plan(self, mine: Departure) -> None:
        """Find out what each rank copies, and whether there is room for it."""
        apart = self.ranks.agree(_DOING, lambda: mine.origins, find_mixed)
        mine.take_apart(apart)
        self._apart |= apart
        self._entries = mine.entries(0)
        known = self._share and self._share.version

        def part() -> tuple[list[TensorEntry], int, tuple[int, int]]:
            here = self._home.folder
            found = [each.version.session for each in kept_files(here)]
            return mine.entries(self.ranks.rank), max(found, default=0), bytes_in(here)

        def answer(
            parts: list[tuple[list[TensorEntry], int, tuple[int, int]]],
        ) -> list[_Share]:
            last = max(self._sessions, *(session for _, session, _ in parts))
            version = known or KeptVersion(last + 1, secrets.token_hex(8), 0)
            entries = merge(entry for each, _, _ in parts for entry in each)
            dealt = self._home.ring.deal(entries)
            costs = [*self._home.ring.costs(dealt, {each.fqn: each.itemsize for each in entries})]
            for rank, (_, _, (free, used)) in enumerate(parts):
                if costs[rank].memory > free + used:
                    raise CheckpointError(
                        f"found {binary_size(free + used)} for it in the folder of rank "
                        f"{self.ranks.names[rank]}'s host, expected "
                        f"{binary_size(costs[rank].memory)}: {VERSIONS} versions of what its ranks"
                        " hold and of what it keeps for another host; make /dev/shm larger "
                        "(mount -o remount,size=..., docker run --shm-size), name a folder with "
                        "room (SHARDWISE_MEMORY), or take more hosts"
                    )
            return [_Share(version, *each) for each in zip(dealt, costs, strict=True)]

        self._share = self.ranks.together(_DOING, part, answer)
        self.cost = self._share.cost

    def _copied(self, mine: Departure, step: int) -> dict[KeptPart, FileWriter]:
        """Copy this rank's pieces into new files."""
        assert self._share is not None
        entries = {entry.fqn: replace(entry, pieces=()) for entry in self._entries}
        files = {}
        for part, pieces in self._share.pieces.items():
            file = self._kept(self._version(step), part, self.ranks.rank)
            data = (
                PieceData(name, entries[name].info, box, partial(mine.part, name, box))
                for name, box in pieces
            )
            files[part] = FileWriter(file, entries, data, self._older(file))
        return files

    def _older(self, file: KeptFile) -> KeptFile | None:
        """Return the same file of the version that is no longer needed."""
        return None if self._before is None else replace(file, version=self._before)

    def _send(
        self, version: KeptVersion, files: Mapping[KeptPart, FileWriter], values: list[Value]
    ) -> None:
        """Complete this rank's files, and bring the unique one to the next host."""
        doing = f"{_DOING} step {version.step}"
        sent: list[Tensor] = []

        def complete() -> tuple[int, int]:
            files[KeptPart.COMMON].complete(())
            unique = files[KeptPart.UNIQUE]
            text = bytearray(unique.complete(values))
            sent.extend((_bytes_of(unique.memory), _bytes_of(text)))
            return len(unique.memory), len(text)

        sizes = self.ranks.agree(doing, complete, list)
        landing: dict[int, tuple[KeptFile, Tensor, Tensor]] = {}

        def make_room() -> None:
            for rank in self._home.ring.sources(self.ranks.rank):
                file = self._kept(version, KeptPart.UNIQUE, rank)
                data, text = sizes[rank]
                memory = file.make(data, self._older(file))
                landing[rank] = file, _bytes_of(memory), torch.empty(text, dtype=torch.uint8)

        self.ranks.all(doing, make_room)
        elements = {rank: each for rank, (_, each, _) in landing.items()}
        texts = {rank: each for rank, (_, _, each) in landing.items()}
        self._exchange(f"{doing}, elements", sent[0], elements, [data for data, _ in sizes])
        self._exchange(f"{doing}, manifests", sent[1], texts, [text for _, text in sizes])

        def finish() -> None:
            for file, _, text in landing.values():
                file.complete(text.numpy().tobytes())

        self.ranks.all(doing, finish)
        # All ranks know that all hosts have it.
        last = self._complete
        self._before = last if last and last.own == version.own else None
        self._complete = version
        self._is_incomplete = False
        self._clean(doing)

    def _exchange(
        self, doing: str, sent: Tensor, landing: Mapping[int, Tensor], sizes: Sequence[int]
    ) -> None:
        """Send each rank's bytes to the next host, a part after the other.

        Args:
            doing: what the ranks do, for error messages.
            sent: this rank's, uint8 of shape (n,).
            landing: where those of other ranks go here.
            sizes: how many each rank has.
        """
        me, targets = self.ranks.rank, self._home.ring.targets
        totals = [0 if to is None else size for to, size in zip(targets, sizes, strict=True)]
        arriving = torch.empty(sum(min(totals[r], _AT_ONCE) for r in landing), dtype=torch.uint8)
        for at in range(0, max(totals), _AT_ONCE):
            counts = [max(0, min(_AT_ONCE, total - at)) for total in totals]
            here = [counts[rank] if rank in landing else 0 for rank in range(len(counts))]
            there = [counts[me] if rank == targets[me] else 0 for rank in range(len(counts))]
            landed = arriving[: sum(here)]
            label, leaving = Label(f"{doing}, byte {at}", str(at)), sent[at:][: sum(there)]
            try:
                self.ranks.all_to_all().start(leaving, landed, label, sizes=(there, here)).wait()
            except PeerLostError as error:
                raise CheckpointError(f"{doing}: {error}") from error
            for rank, part in enumerate(torch.split(landed, here)):
                if part.numel():
                    landing[rank][at : at + part.numel()] = part

    def _clean(self, doing: str, also: Iterable[KeptVersion] = ()) -> None:
        """Delete what is of no use any more; one rank of each host does it.

        The others wait for it: what they begin next would be deleted, too.
        """
        kept = [each for each in (self._complete, self._before, *also) if each is not None]

        def part() -> None:
            if self._home.ring.locals_of(self.ranks.rank)[0] == self.ranks.rank:
                keep_only(self._home.folder, kept)

        self.ranks.all(doing, part)

    # -- recovering ----------------------------------------------------------------------------

    def recover(
        self,
        target: Training,
        at_least: int = 0,
        folder: StrPath | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Recovered | None:
        """Bring the latest complete version back; see :func:`recover`.

        Returns:
            What it was; ``None`` if none is complete. :attr:`lost` then says whether one was.
        """
        self._use(_RECOVER, folder)
        for version in self._find(_RECOVER, at_least):
            files, world_size = self._verified(version)
            if not world_size:
                self.lost = max(self.lost or 0, version.step)
                continue
            with autograd.no_grad():
                extra = move(_state_of(files), target, doing=_RECOVER, group=group)
            self._complete, self.lost = version, None
            self._clean(_RECOVER)
            return Recovered(version.step, extra, world_size)
        return None

    def _find(self, doing: str, at_least: int = 0) -> list[KeptVersion]:
        """Find the versions of which all hosts' files may be there, the latest first."""

        def part() -> list[KeptFile]:
            mine, every = self._home.ring.locals_of(self.ranks.rank), kept_files(self._home.folder)
            self._files = every[mine.index(self.ranks.rank) :: len(mine)]
            return self._files

        def answer(parts: list[list[KeptFile]]) -> tuple[list[KeptVersion], int, int | None]:
            every = [file for each in parts for file in each]
            found = sorted({file.version for file in every}, reverse=True)
            last = max((version.session for version in found), default=0)
            found = [version for version in found if version.step >= at_least]
            whole = [v for v in found if _world_of(file for file in every if file.version == v)]
            lost = max((version.step for version in found if version not in whole), default=None)
            return whole, last, lost

        found, self._sessions, self.lost = self.ranks.agree(doing, part, answer)
        return found

    def _verified(self, version: KeptVersion) -> tuple[list[tuple[KeptFile, Manifest]], int]:
        """Return this rank's files of a version that are right, and of how many ranks it is.

        The number is 0 if not everything is there.
        """
        good: list[tuple[KeptFile, Manifest]] = []

        def part() -> list[tuple[KeptFile, tuple[TensorEntry, ...]]]:
            for file in self._files:
                if file.version == version:
                    with contextlib.suppress(CheckpointError):  # it is as if it were not there
                        manifest = file.read()
                        file.verify(manifest)
                        good.append((file, manifest))
            return [(file, _held_by(self.ranks.rank, manifest)) for file, manifest in good]

        def answer(parts: list[list[tuple[KeptFile, tuple[TensorEntry, ...]]]]) -> int:
            every = [found for each in parts for found in each]
            with contextlib.suppress(CheckpointError):  # there are gaps
                merge(entry for _, entries in every for entry in entries)
                return _world_of(file for file, _ in every)
            return 0

        return good, self.ranks.agree(_RECOVER, part, answer)


def _bytes_of(memory: mmap | bytearray) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _world_of(files: Iterable[KeptFile]) -> int:
    """The number of ranks that have made a version; 0 unless there is a unique file of each."""
    ranks = {(file.rank, file.world_size) for file in files if file.part is KeptPart.UNIQUE}
    sizes = {size for _, size in ranks}
    size = sizes.pop() if len(sizes) == 1 else 0
    # A name may have any number in it.
    return size if len(ranks) == size and all(rank < size for rank, _ in ranks) else 0


def _held_by(rank: int, manifest: Manifest) -> tuple[TensorEntry, ...]:
    """The tensors in a file, as parts that a rank holds."""
    return tuple(
        replace(entry, pieces=tuple(replace(p, file=str(rank), checksums=()) for p in entry.pieces))
        for entry in manifest.tensors
    )


def _state_of(files: Iterable[tuple[KeptFile, Manifest]]) -> HeldState:
    """What this rank has to give of a version: what the files have that it looks after."""
    state = HeldState()
    values: dict[StatePath, Value] = {}
    for file, manifest in files:
        for value in manifest.values:
            values.setdefault(value.path, value)
        for entry in manifest.tensors:
            state.origins[entry.fqn] = Origin(entry.path, entry.placements, entry.mesh)
            if not entry.info.numel:
                nothing = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
                state.hold(replace(entry, pieces=()), full_box(entry.shape), nothing)
        for entry, box, tensor in file.pieces(manifest):
            state.hold(replace(entry, pieces=()), box, tensor)
    state.values = [*values.values()]
    return state
