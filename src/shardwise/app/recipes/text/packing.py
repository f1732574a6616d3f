"""Documents in rows of a fixed length: several in a row, or one in each.

    packed      | a a a a a b b b | c c c c c c d . |
    positions   | 0 1 2 3 4 0 1 2 | 0 1 2 3 4 5 0 0 |
    padded      | a a a a a . . . | b b b . . . . . | c c c c c c . . | d . . . . . . . |

No document is cut at the end of a row, and none attends to another: the positions of a packed row
begin anew with each document, from which attention in ``transformers`` makes a block-diagonal mask.
"""

from __future__ import annotations

import bisect
import enum
from array import array
from collections.abc import Sequence


class Packing(enum.Enum):
    """How documents are laid out in rows."""

    PACKED = "packed"
    PADDED = "padded"


class Rows:
    """Which documents each row holds.

    Args:
        rows: for each row, the numbers of its documents.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        # Two arrays: a list of lists would take more memory than the documents of a row.
        self._documents = array("q", (number for row in rows for number in row))
        self._starts = array("q", [0])
        for row in rows:
            self._starts.append(self._starts[-1] + len(row))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> Sequence[int]:
        """Return the numbers of the documents of a row."""
        return self._documents[self._starts[row] : self._starts[row + 1]]


def lay_out(lengths: Sequence[int], capacity: int, packing: Packing) -> Rows:
    """Return in which row each document goes.

    Packed rows are filled by the best-fit decreasing heuristic: from the longest document to the
    shortest, each goes into the fullest row that has room for it.

    Args:
        lengths: tokens of each document, 1 .. ``capacity``.
        capacity: tokens of a row.
        packing: how many documents may share a row.
    """
    if packing is Packing.PADDED:
        return Rows([[number] for number in range(len(lengths))])
    rows: list[list[int]] = []
    # Rows by the tokens that they have room for, and the sizes of room that there are, ascending.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
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
    return Rows(rows)
