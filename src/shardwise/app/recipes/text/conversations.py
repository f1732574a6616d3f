"""Batches of chats, and their loss: the assistant's tokens alone.

At the beginning the ranks divide the lines of the files, tokenize them, and tell each other how
long the documents are. From that every rank makes the same rows. The order of rows is a function of
seed and position, as for all data here. Documents are tokenized again when their row is needed, so
that no rank holds tokens of all chats.

    packed      | a a a a a b b b | c c c c c c d . |
    positions   | 0 1 2 3 4 0 1 2 | 0 1 2 3 4 5 0 0 |
    padded      | a a a a a . . . | b b b . . . . . | c c c c c c . . | d . . . . . . . |

No document is cut at the end of a row, and none attends to another: the positions of a packed row
begin anew with each document, from which attention in ``transformers`` makes a block-diagonal mask.
"""

from __future__ import annotations

import bisect
import contextlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from shardwise.app.recipes.core.model import WHOLE
from shardwise.app.recipes.core.position import Draw
from shardwise.app.recipes.text.chat import IGNORED, ChatEncoder, ChatLines, MaskedTokens
from shardwise.app.recipes.text.config import Packing
from shardwise.base.errors import UserError
from shardwise.base.progress import LongWork, progress
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError
from shardwise.insight.token_loss import TokenLoss
from shardwise.transport.peers import Peers

#: Padded rows are as long as the longest of a batch, rounded up to a multiple of this.
PADDED_TO = 64


@dataclass(frozen=True)
class TargetBatch:
    """Rows of tokens, and what the model should predict at each.

    Attributes:
        tokens: int64 of shape (rows, length).
        targets: the same shape: the next token, or ``IGNORED``.
        positions: the same shape, from 0 in each document; None: 0, 1, 2, ... in every row.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None

    def to(self, device: torch.device) -> TargetBatch:
        """Return the batch on a device."""
        positions = None if self.positions is None else self.positions.to(device)
        return TargetBatch(self.tokens.to(device), self.targets.to(device), positions)

    @property
    def target_count(self) -> int:
        """How many targets a loss is computed on."""
        return int((self.targets != IGNORED).sum())


def target_loss(model: nn.Module, batch: TargetBatch, loss: TokenLoss = WHOLE) -> torch.Tensor:
    """Return the sum of the cross-entropies of all targets, a float32 scalar, in nats."""
    given = {} if batch.positions is None else {"position_ids": batch.positions}
    return loss(model, batch.targets, "sum", input_ids=batch.tokens, **given)


@dataclass
class Survey:
    """The documents of chat files, without their tokens.

    Attributes:
        lines: for each document, the number of its line.
        parts: for each document, its number among those of its line.
        lengths: for each document, its tokens, at most ``--seq-length``.
        split: lines that became several documents.
        truncated: documents that were too long.
        lost: tokens that these lost.
        dropped: documents that were left out, since nothing to train on was left of them.
    """

    lines: array[int] = field(default_factory=lambda: array("q"))
    parts: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    split: int = 0
    truncated: int = 0
    lost: int = 0
    dropped: int = 0

    def add(self, line: int, documents: Sequence[MaskedTokens], length: int) -> None:
        """Add the documents of a line, of which each is cut to ``length`` tokens."""
        self.split += len(documents) > 1
        for part, document in enumerate(documents):
            lost = max(0, len(document.tokens) - length)
            self.truncated += lost > 0
            self.lost += lost
            if not document.cut(length).target_count:
                self.dropped += 1
                continue
            self.lines.append(line)
            self.parts.append(part)
            self.lengths.append(len(document.tokens) - lost)

    def extend(self, other: Survey) -> None:
        """Add what another rank has found."""
        for each in fields(self):  # arrays and counts
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def notes(self, length: int) -> str:
        """Return what became of chats that were not taken as they are; empty: of all."""
        remarks = []
        if self.split:
            remarks.append(
                f"{self.split:,} became a document per turn, as the chat template asks for"
            )
        if self.truncated:
            remarks.append(
                f"{self.truncated:,} {'was' if self.truncated == 1 else 'were'} cut to "
                f"--seq-length {length} and lost {self.lost:,} tokens"
            )
        if self.dropped:
            remarks.append(f"{self.dropped:,} had nothing to train on within it and were left out")
        return "; ".join(remarks)


def survey(lines: ChatLines, encoder: ChatEncoder, length: int, world: World) -> Survey:
    """Tokenize all lines, each on one rank. Every rank calls it and gets the same.

    Raises:
        UserError: a line cannot be used, the same on every rank: the first that a rank met with.
    """
    found = Survey()
    problem: UserError | None = None
    first = len(lines) * world.rank // world.size
    last = len(lines) * (world.rank + 1) // world.size
    shown = progress("tokenizing", last - first, "chats on this rank")
    try:
        with shown if world.rank == 0 else contextlib.nullcontext(LongWork("", None, "")) as work:
            for index in range(first, last):
                found.add(index, encoder.documents(lines.read(index), lines.where(index)), length)
                work.moved()
    except UserError as error:
        problem = error
    everyone = Peers().gather_objects((found, problem), "the lengths of chats")
    for _, each in everyone:
        if each is not None:
            raise each
    whole = Survey()
    for part, _ in everyone:
        whole.extend(part)
    if not whole.lengths:
        raise OptionError(
            lines.option,
            f"nothing of the assistant within --seq-length {length} of any chat",
            "shorter chats, or a larger --seq-length",
        )
    return whole


def lay_out(lengths: Sequence[int], capacity: int, packing: Packing) -> list[array[int]]:
    """Return the numbers of the documents of each row.

    Packed rows are filled by the best-fit decreasing heuristic: from the longest document to the
    shortest, each goes into the fullest row that has room for it.

    Args:
        lengths: tokens of each document, 1 .. ``capacity``.
        capacity: tokens of a row.
        packing: how many documents may share a row.
    """
    if packing is Packing.PADDED:
        return [array("q", [number]) for number in range(len(lengths))]
    rows: list[array[int]] = []
    # Rows by the tokens that they have room for, and the sizes of room that there are, ascending.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append(array("q"))
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(number)
        left = room - length
        if left:
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(row)
    return rows


@dataclass
class ChatRows:
    """Rows of chats.

    Attributes:
        lines: of the files.
        encoder: turns them into documents.
        found: what the documents are.
        length: tokens of a row.
        packing: how many documents share a row.
    """

    lines: ChatLines
    encoder: ChatEncoder
    found: Survey
    length: int
    packing: Packing

    def __post_init__(self) -> None:
        self._rows = lay_out(self.found.lengths, self.length, self.packing)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    @property
    def summary(self) -> str:
        """For people: how many rows there are, and how full they are."""
        tokens = sum(self.found.lengths)
        filled = f"{tokens / (len(self) * self.length):.0%} filled"
        return f"{tokens:,} tokens {self.packing.value} in {len(self):,} sequences, {filled}"

    def batch(self, rows: Sequence[int | None]) -> TargetBatch:
        """Return rows by their numbers; ``None`` is a row without a target.

        Raises:
            UserError: a file has changed since the training began.
        """
        held = [[*map(self._document, () if row is None else self._rows[row])] for row in rows]
        packed = self.packing is Packing.PACKED
        length = self.length
        if not packed:
            longest = max((len(each.tokens) for (each,) in filter(None, held)), default=1)
            length = min(length, -(-longest // PADDED_TO) * PADDED_TO)
        tokens = torch.full((len(held), length), self.encoder.padding, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        positions = torch.zeros_like(tokens)
        for row, documents in enumerate(held):
            at = 0
            for document in documents:
                end = at + len(document.tokens)
                tokens[row, at:end] = torch.tensor(document.tokens)
                targets[row, at:end] = torch.tensor(document.targets())
                positions[row, at:end] = torch.arange(end - at)
                at = end
            # What is left is one more document, that nothing is trained on.
            positions[row, at:] = torch.arange(length - at)
        return TargetBatch(tokens, targets, positions if packed else None)

    def drawn(self, draws: Sequence[Draw]) -> TargetBatch:
        """Return the rows that an order has drawn."""
        return self.batch([draw.index for draw in draws])

    def batches(self, size: int, world: World) -> Iterator[TargetBatch]:
        """Return all rows in order, as this rank's batches; equally many on every rank.

        Args:
            size: rows of a batch.
            world: this rank.
        """
        for first in range(0, len(self), size * world.size):
            mine = range(first + world.rank, first + size * world.size, world.size)
            yield self.batch([row if row < len(self) else None for row in mine])

    def _document(self, number: int) -> MaskedTokens:
        found = self.found
        line, length = found.lines[number], found.lengths[number]
        where = self.lines.where(line)
        documents = self.encoder.documents(self.lines.read(line), where)
        part = found.parts[number]
        if part < len(documents):
            document = documents[part].cut(self.length)
            if len(document.tokens) == length:
                return document
        raise UserError(f"{where}: found other tokens than when the training began")


@torch.no_grad()
def check_apart(model: nn.Module, vocabulary: int, name: str, device: torch.device) -> None:
    """Check that no document of a packed row changes what a model says about another one.

    Two rows differ in their first document; the second one has to give the same logits in both.
    Every rank calls it, since a forward takes all ranks.

    Args:
        model: sharded, with its weights.
        vocabulary: tokens from here up are not used.
        name: of the model, for the error.
        device: where it computes.

    Raises:
        OptionError: the model does not keep documents apart, or takes no positions.
    """
    length = 8
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, 2 * length), generator=draw)
    tokens[1, length:] = tokens[0, length:]
    positions = torch.arange(length).repeat(2).expand(2, -1)
    model.eval()
    try:
        logits = model(input_ids=tokens.to(device), position_ids=positions.to(device)).logits
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        raise _not_apart(f"{name}, which takes no positions") from None
    finally:
        model.train()
    one, other = logits[:, length:].float()
    # The same numbers, but for experts that may be computed in another order.
    bound = 16 * torch.finfo(logits.dtype).eps * one.nan_to_num(0, 0, 0).abs().max()
    if logits.isnan().any():
        raise _not_apart(f"{name}, whose logits are NaN")
    if not torch.allclose(one, other, rtol=0, atol=float(bound)):
        raise _not_apart(f"{name}, in which a document of a row changes another one")


def _not_apart(found: str) -> OptionError:
    return OptionError(
        "--packing", f"packed with {found}", "--packing padded: one document in each row"
    )
