"""How states come into staging memory and leave it.

Between steps, the tensors of a state are its homes: parts of a file that are mapped, or pinned
memory. For a step they are replaced by tensors in a block of staging memory, which is read ahead
and written behind:

    chunk        1         2         3         4
    read         ----      ----      ----      ----
    step             --        --        --        --
    write              ----      ----      ----      ----
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch import dtensor
from shardwise.base import observe
from shardwise.base.observe import Activity
from shardwise.base.scratch import file
from shardwise.base.scratch.file import KeptPart
from shardwise.optim.forms import Form
from shardwise.optim.offloaded.stores import StagingBlock, StateStaging, Store, Wait

_STATES = "optimizer states"  # what a timeline calls waiting for them


def kept_form(value: object) -> Form | None:
    """Return the form of a tensor that can be kept elsewhere, ``None`` of anything else.

    That is a tensor with at least ``file.SMALLEST`` bytes on this rank, which lie together.
    Tensors of subclasses other than ``DTensor`` stay where they are, and so do those that
    require gradients.
    """
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return None
    local = dtensor.plain(value)
    if local.layout is not torch.strided or local.is_meta or dtensor.is_wrapper(local):
        return None
    if local.ndim == 0 or local.nbytes < file.SMALLEST or not _is_dense(local):
        return None
    spec = None if local is value else dtensor.spec_of(value)
    return Form(tuple(local.shape), local.stride(), local.dtype, spec)


@dataclass(eq=False)
class Entry:
    """A tensor of a state that is kept elsewhere.

    Attributes:
        form: what it looks like.
        memory: the bytes that keep it.
        home: the tensor there, which others see between steps.
        shown: the tensor in the state now: ``home``, or one in staging memory.
    """

    form: Form
    memory: torch.Tensor
    home: torch.Tensor
    shown: torch.Tensor

    @property
    def address(self) -> int:
        """Where its bytes are, so that neighbors move together; 0 in a rehearsal."""
        return self.memory.untyped_storage().data_ptr()


@dataclass(frozen=True, eq=False)
class StagedEntry:
    """An entry, and its place in a block.

    Attributes:
        param: whose state it is.
        key: its name in the state.
        entry: the entry.
        at: where its bytes begin in the block.
    """

    param: torch.Tensor
    key: str
    entry: Entry
    at: int


@dataclass(eq=False)
class StagedEntries:
    """Entries in a block of staging memory.

    Attributes:
        block: the memory.
        pieces: the entries.
        moved: waits for what was started last: to read them, or to write them.
    """

    block: StagingBlock
    pieces: list[StagedEntry]
    moved: Wait


class OffloadedStates:
    """The states of an optimizer, of which large tensors are kept in a store.

    Args:
        inner: the optimizer.
        store: what keeps the tensors.
        limit: bytes of staging memory.
    """

    def __init__(self, inner: torch.optim.Optimizer, store: Store, limit: int) -> None:
        self._inner = inner
        self._store = store
        self._staging = StateStaging(limit, store.make_block)
        self._entries: dict[torch.Tensor, dict[str, Entry]] = {}
        self._lent: dict[int, Entry] = {}  # by the identity of their homes
        self._ahead: StagedEntries | None = None
        self._behind: deque[StagedEntries] = deque()

    @property
    def nbytes(self) -> int:
        """How many bytes are kept in the store."""
        kept = (entry for entries in self._entries.values() for entry in entries.values())
        return sum(entry.form.nbytes for entry in kept)

    def read_ahead(self, params: Iterable[torch.Tensor]) -> None:
        """Start to read the states of parameters, if there is memory for them."""
        pieces = self._pieces_of(params)
        if not pieces or self._ahead is not None or self._are_behind(pieces):
            return
        block = self._staging.acquire(_nbytes(pieces))
        if block is not None:
            self._ahead = self._fetch(pieces, block)

    def borrow(self, params: Iterable[torch.Tensor]) -> StagedEntries | None:
        """Replace the states of parameters by tensors in staging memory, with the same values.

        Returns:
            What :meth:`give_back` takes; ``None`` if none of these states are kept in the store.

        Raises:
            OffloadError: they could not be read, or others could not be written.
        """
        params = list(params)
        self._forget_replaced(params)
        pieces = self._pieces_of(params)
        if not pieces:
            return None
        ahead = self._ahead
        if ahead is not None and [p.entry for p in ahead.pieces] != [p.entry for p in pieces]:
            self._drop_ahead()
        if self._ahead is None:
            while self._are_behind(pieces):
                self._finish_oldest()
            self._ahead = self._fetch(pieces, self._room(_nbytes(pieces)))
        # An interrupted wait leaves a block that is still read into, and is not used again.
        loan = self._ahead
        with observe.during(Activity.COPY, _STATES):
            loan.moved()
        self._ahead = None
        self._show(loan)
        return loan

    def give_back(self, loan: StagedEntries) -> None:
        """Start to write what :meth:`borrow` returned, after the step has changed it.

        What an optimizer has replaced by another tensor of the same form goes where the one before
        was. What it has removed, or replaced by something else, is kept no longer.

        Raises:
            OffloadError: it cannot be written.
        """
        pieces = []
        for piece in loan.pieces:
            view = piece.entry.shown
            found = self._inner.state.get(piece.param, {}).get(piece.key)
            if found is not view:
                if found is None or kept_form(found) != piece.entry.form:
                    del self._entries[piece.param][piece.key]
                    continue
                dtensor.plain(view).copy_(dtensor.plain(found))
                self._inner.state[piece.param][piece.key] = view
            pieces.append(piece)
        loan.pieces = pieces
        self._put(loan)

    def keep(self, params: Iterable[torch.Tensor]) -> None:
        """Move the large tensors of states that are in memory to the store.

        Raises:
            OffloadError: there is no room for them, or they cannot be written.
        """
        pieces, values, at = [], [], 0
        for param in params:
            kept = self._entries.setdefault(param, {})
            state = self._inner.state.get(param, {})
            shared = _shared(state)
            for key, value in state.items():
                form = None if key in kept or key in shared else kept_form(value)
                if form is not None:
                    kept[key] = self.make_entry(form)
                    pieces.append(StagedEntry(param, key, kept[key], at))
                    values.append(value)
                    at += form.nbytes
        if not pieces:
            return
        loan = StagedEntries(self._room(at), pieces, lambda: None)
        self._show(loan)
        for piece, value in zip(pieces, values, strict=True):
            dtensor.plain(piece.entry.shown).copy_(dtensor.plain(value))
        self._put(loan)

    def make_entry(self, form: Form) -> Entry:
        """Set bytes aside for a tensor.

        Raises:
            OffloadError: there is no room.
        """
        memory = self._store.allocate(form.nbytes)
        home = form.over(memory)
        return Entry(form, memory, home, shown=home)

    def settle(self) -> None:
        """Bring every state home: finish all writes, and forget what was read ahead.

        Raises:
            OffloadError: something could not be written.
        """
        self._drop_ahead()
        while self._behind:
            self._finish_oldest()
        self._staging.clear()  # which activations may need now

    def lend_home(self, form: Form) -> torch.Tensor:
        """Return a tensor in the store, without values, for a state that :meth:`replace` is given.

        Raises:
            OffloadError: there is no room.
        """
        entry = self.make_entry(form)
        self._lent[id(entry.home)] = entry
        return entry.home

    def replace(self, every: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Give all parameters other states. What was in the store before is kept no longer.

        Args:
            every: the states, by parameter. Those that are in the store already stay where they
                are: homes, and what :meth:`lend_home` returned.

        Raises:
            OffloadError: there is no room for one, or it cannot be written.
        """
        self.settle()
        known = {id(e.home): e for entries in self._entries.values() for e in entries.values()}
        known |= self._lent
        self._entries, self._lent = {}, {}
        for param, state in every.items():
            self._entries[param] = {
                key: known.pop(id(value)) for key, value in state.items() if id(value) in known
            }
        for entries in self._entries.values():
            for entry in entries.values():
                entry.shown = entry.home
        self._inner.state.clear()
        known.clear()  # now that they are out of sight, their bytes can be used again
        for param, state in every.items():
            self._inner.state[param] = dict(state)
            self.keep([param])

    def _pieces_of(self, params: Iterable[torch.Tensor]) -> list[StagedEntry]:
        """The entries of parameters, in the order in which they are kept."""
        found = [
            (param, key, entry)
            for param in params
            for key, entry in self._entries.get(param, {}).items()
        ]
        pieces, at = [], 0
        for param, key, entry in sorted(found, key=lambda each: each[2].address):
            pieces.append(StagedEntry(param, key, entry, at))
            at += entry.form.nbytes
        return pieces

    def _fetch(self, pieces: list[StagedEntry], block: StagingBlock) -> StagedEntries:
        return StagedEntries(block, pieces, self._store.fetch(block, _parts(pieces)))

    def _put(self, loan: StagedEntries) -> None:
        loan.moved = self._store.put(loan.block, _parts(loan.pieces))
        self._behind.append(loan)

    def _show(self, loan: StagedEntries) -> None:
        """Replace states by tensors in the block."""
        for piece in loan.pieces:
            view = piece.entry.form.over(loan.block.memory[piece.at :])
            self._inner.state[piece.param][piece.key] = piece.entry.shown = view

    def _room(self, nbytes: int) -> StagingBlock:
        """A block; others are waited for until there is memory for it."""
        while (block := self._staging.acquire(nbytes)) is None:
            if self._behind:
                self._finish_oldest()
            else:
                assert self._ahead is not None
                self._drop_ahead()
        return block

    def _are_behind(self, pieces: Sequence[StagedEntry]) -> bool:
        """Whether some of them are still being written."""
        written = {piece.entry for loan in self._behind for piece in loan.pieces}
        return any(piece.entry in written for piece in pieces)

    def _finish_oldest(self) -> None:
        """Wait for the oldest write, and bring its states home."""
        loan = self._behind[0]  # also after an interrupt
        with observe.during(Activity.COPY, _STATES):
            loan.moved()
        for piece in loan.pieces:
            state = self._inner.state.get(piece.param, {})
            if state.get(piece.key) is piece.entry.shown:
                state[piece.key] = piece.entry.home
            piece.entry.shown = piece.entry.home
        self._behind.popleft()
        self._staging.release(loan.block)

    def _drop_ahead(self) -> None:
        """Forget what was read ahead, if anything was."""
        if self._ahead is not None:
            loan = self._ahead
            loan.moved()
            self._ahead = None
            self._staging.release(loan.block)

    def _forget_replaced(self, params: Iterable[torch.Tensor]) -> None:
        """Keep no longer what somebody has removed from a state, or replaced, between steps."""
        for param in params:
            state, kept = self._inner.state.get(param, {}), self._entries.get(param, {})
            for key in [key for key, entry in kept.items() if state.get(key) is not entry.shown]:
                while any(p.entry is kept[key] for loan in self._behind for p in loan.pieces):
                    self._finish_oldest()
                del kept[key]


def _nbytes(pieces: Sequence[StagedEntry]) -> int:
    return sum(piece.entry.form.nbytes for piece in pieces)


def _shared(state: Mapping[str, object]) -> set[str]:
    """The names of tensors in a state that have the memory of each other, to be changed alike."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            local = dtensor.plain(value)
            if local.layout is torch.strided and dtensor.has_memory(local):
                address = local.untyped_storage().data_ptr()
                if address:  # empty and fake tensors have none
                    names.setdefault(address, []).append(name)
    return {name for each in names.values() if len(each) > 1 for name in each}


def _parts(pieces: Sequence[StagedEntry]) -> list[KeptPart]:
    return [(piece.at, piece.entry.memory) for piece in pieces]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills the memory that it spans, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]
    ):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
