"""The timeline of some steps of a run, which few trainings record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from shardwise.app.recipes.core.recipe import PLAN_FILE, PREDICTION
from shardwise.base import plain
from shardwise.base.errors import CheckpointError
from shardwise.elastic.errors import Stopped
from shardwise.timeline import record

if TYPE_CHECKING:
    from shardwise.base.spans import StepTime
    from shardwise.timeline import Recording


def read_prediction() -> StepTime | None:
    """Return what ``--plan`` predicted; ``None`` if it was not asked for, or knows no times."""
    planned = os.environ.get(PLAN_FILE)
    if planned is None:
        return None
    from shardwise.base.spans import StepTime

    path = Path(planned).with_name(PREDICTION)
    try:
        return plain.read(StepTime, path.read_bytes())
    except (OSError, ValueError):
        return None


@dataclass
class TimelineOfRun:
    """Records some steps of a training, and nothing otherwise.

    Attributes:
        steps: which; empty: none.
        folder: where the timeline is written.
        say: tells the user what came of it.
        prediction: what a plan says that a step takes.
    """

    steps: range
    folder: Path
    say: Callable[[str], object]
    prediction: StepTime | None = None
    _recording: Recording | None = field(default=None, init=False)

    def __enter__(self) -> TimelineOfRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what was recorded, also if the training ended before the last of the steps."""
        if error is None or isinstance(error, Stopped):
            self._finish()
        elif self._recording is not None:
            self._recording.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a step, if it is one of those. Every rank calls it."""
        if number not in self.steps:
            yield
            return
        if self._recording is None:
            recording = record(self.folder, prediction=self.prediction)
            try:
                recording.__enter__()
            except OSError as error:  # on all ranks alike; the training matters more
                self.say(f"warning    --timeline: {self.folder} cannot be written: {error}")
                self.steps = range(0)
                yield
                return
            self._recording = recording
        with self._recording.step(number):
            yield
        if number == self.steps[-1]:
            self._finish()

    def _finish(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            recording.__exit__(None, None, None)
        except (OSError, CheckpointError) as error:  # the training matters more
            self.say(f"timeline   {self.folder} could not be written: {error}")
            return
        assert recording.timeline is not None
        self.say(f"timeline   {recording.timeline.summary()}")
        self.say(f"timeline   {self.folder}")
