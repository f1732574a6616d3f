"""The training of a language model, as the launcher starts it: check first, import torch later."""

from __future__ import annotations

from shardwise.launch.signals import StopSignals
from shardwise.launch.world import World
from shardwise.recipes.lm_config import LmConfig, LmInputs, check_folder, check_lm, sized


class LmJob:
    """What the command line starts.

    Args:
        config: as the user asked.
    """

    def __init__(self, config: LmConfig) -> None:
        self._config = config
        self._inputs: LmInputs | None = None

    def check(self, world: World) -> None:
        """See :func:`check_lm` and :func:`sized`."""
        self._config = sized(self._config, world.size)
        self._inputs = check_lm(self._config, world)

    def check_folder(self) -> str | None:
        """See :func:`check_folder`; a run that is complete already is nothing to do."""
        assert self._inputs is not None, "check() comes first"
        done, steps = check_folder(self._config, self._inputs), self._config.train.steps
        if done < steps:
            return None
        return (
            f"Nothing to do: the run in {self._config.files.root} is at step {done} of {steps}. "
            "To go on, say --resume with more --steps."
        )

    def run(self, world: World, signals: StopSignals) -> None:
        """Train, as one rank."""
        # Here, and not before: it takes seconds to import.
        from shardwise.recipes.lm import train_lm

        assert self._inputs is not None, "check() comes first"
        train_lm(self._config, self._inputs, world, signals)
