"""What a part of ``gpu.py`` has found so far, on disk after every case.

A part that is killed, or runs out of time, leaves what it has measured. The next run of the part
measures what is missing, and what failed.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import save

#: Of the text of an error, as its end says most.
_LONGEST = 4000


class Journal:
    """The results of one part.

    Args:
        path: the JSON file of the part; what it holds already is kept.
        part: the name of the part.
        environment: where the results come from.
        deadline: when to stop measuring, as ``time.monotonic()`` counts.
    """

    def __init__(self, path: Path, part: str, environment: dict[str, Any], deadline: float) -> None:
        self.path = path
        self.deadline = deadline
        self._content = read(path) or {"part": part, "cases": []}
        self._content |= {"environment": environment, "status": "running", "error": None}
        self._begun = time.monotonic() - self._content.get("seconds", 0.0)
        self._save()

    def case(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure a case, unless an earlier run has. An error is a result, too.

        Args:
            key: the name of the case, unique in its part.
            measure: returns plain data; an entry ``"error"`` says that the case has failed.

        Returns:
            What is known of the case.
        """
        cases: list[dict[str, Any]] = self._content["cases"]
        before = next((case for case in cases if case["key"] == key), None)
        if before is not None and before["error"] is None:
            return before
        if before is not None:
            cases.remove(before)
        begun = time.monotonic()
        found: dict[str, Any] = {"key": key, "error": None}
        if begun > self.deadline:
            found["error"] = "not begun: the time of this part was over"
        else:
            try:
                found |= measure()
            except Exception:
                found["error"] = shortened(traceback.format_exc())
        found["case_seconds"] = time.monotonic() - begun
        cases.append(found)
        self._save()
        return found

    def end(self) -> bool:
        """Note that all cases were tried.

        Returns:
            Whether none failed.
        """
        failed = [case["key"] for case in self._content["cases"] if case["error"] is not None]
        self._content["status"] = "failed" if failed else "done"
        self._content["error"] = f"cases failed: {', '.join(failed)}" if failed else None
        self._save()
        return not failed

    def _save(self) -> None:
        self._content["seconds"] = time.monotonic() - self._begun
        save(self.path, self._content)


def read(path: Path) -> dict[str, Any] | None:
    """Return what a part has written; ``None`` if it has written nothing."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def end_badly(path: Path, part: str, status: str, error: str) -> None:
    """Note how a part ended that could not do so itself.

    Args:
        path: the JSON file of the part, which may not exist.
        part: the name of the part.
        status: ``"timed out"`` or ``"died"``.
        error: for people.
    """
    content = read(path) or {"part": part, "cases": [], "seconds": 0.0, "environment": {}}
    save(path, {**content, "status": status, "error": shortened(error)})


def shortened(text: str) -> str:
    """Return the end of a long text."""
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"
