"""The table of ``docs/architecture.md`` that counts the lines of each addition to the example.

python -m tests.architecture --write    # count them anew; without --write, only say what is off
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import shardwise

SOURCE = Path(shardwise.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "architecture.md"
#: The runtime below the front doors, of which every file is counted once.
CORE = ("sharding", "transport", "_torch")
WRITE = "python -m tests.architecture --write"
_ROW = re.compile(r"\| `([\w/]+)/`((?: \w+)*) \| (\d+) \|")


def counted(page: str) -> tuple[str, list[str]]:
    """Return the page with today's counts, and what is wrong with those that it has.

    A count is rounded to ten lines, and is wrong if it is a tenth and more than 20 lines off.

    Raises:
        FileNotFoundError: the table names a file that is not there.
    """
    left = {path for part in CORE for path in (SOURCE / part).rglob("*.py")}
    wrong = []

    def count(row: re.Match[str]) -> str:
        folder, names, stated = SOURCE / row[1], row[2].split(), int(row[3])
        files = [folder / f"{name}.py" for name in names]
        files = files or [path for path in left if folder in path.parents]
        left.difference_update(files)
        lines = sum(len(path.read_text().splitlines()) for path in files)
        if abs(lines - stated) > max(20, lines // 10):
            wrong.append(f"{row[1]}{row[2]}: {stated} lines in the table, found {lines}")
        return row[0].replace(f"| {stated} |", f"| {round(lines, -1)} |")

    new = _ROW.sub(count, page)
    wrong += [f"{path.relative_to(SOURCE)}: in no row of the table" for path in sorted(left)]
    return new, wrong


def main() -> int:
    """Write the counts, or say what is wrong with them."""
    new, wrong = counted(PAGE.read_text())
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(new)
        wrong = counted(new)[1]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
