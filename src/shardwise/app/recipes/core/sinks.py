"""What draws curves, beside ``metrics.jsonl``, which every run has: ``--log``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardwise.base.errors import UserError
from shardwise.base.say import say
from shardwise.base.units import one_line
from shardwise.insight.schema.training import LogName


class Sink:
    """Something that draws curves."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""

    def flush(self) -> None:
        """Flush to disk what does not get there by itself."""

    def close(self, failed: BaseException | None) -> None:
        """End, after training has ended, or failed with an error."""


class TensorBoard(Sink):
    """TensorBoard's event files.

    Args:
        folder: where they are.
        done: steps done before; TensorBoard drops events of later steps.
    """

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write an event for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Flush the events to disk."""
        self._writer.flush()

    def close(self, failed: BaseException | None) -> None:
        """Close the files."""
        del failed
        self._writer.close()


class Wandb(Sink):
    """A run of Weights & Biases, by its own package.

    Its environment variables choose the project, the entity and the mode. Without an account on
    this host, and unless ``WANDB_MODE`` says otherwise, it writes to the run's folder only, and
    asks for no login: ``wandb sync`` uploads that later.

    Source: https://docs.wandb.ai/ref/python.

    Args:
        folder: of the run; ``wandb/`` in it is written to.
        identity: the same in every session of the run, which goes on in the same curves.
        config: to show beside the curves.

    Raises:
        UserError: the package refuses to begin, or cannot reach its server.
    """

    def __init__(self, folder: Path, identity: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._lost = False
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "shardwise"),
                name=os.environ.get("WANDB_NAME", folder.name),
                dir=str(folder),
                id=identity,
                resume="allow",
                mode=None if "WANDB_MODE" in os.environ or _has_account() else "offline",
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # of its client, its service and the network
            reason = one_line(error)
            raise UserError(
                f"--log wandb: found {type(error).__name__} ({reason}), expected a run to begin; "
                "WANDB_MODE=offline needs neither a network nor an account"
            ) from error
        # A run that is resumed repeats steps, and an evaluation comes after its step.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values; this waits for no network."""
        self._attempt(lambda: self._run.log({"step": step, **values}))

    def close(self, failed: BaseException | None) -> None:
        """End the run, finished or failed."""
        self._attempt(lambda: self._run.finish(exit_code=0 if failed is None else 1))

    def _attempt(self, act: Callable[[], object]) -> None:
        """Act, unless it failed before: no training ends because its curves do."""
        if self._lost:
            return
        try:
            act()
        except Exception as error:  # of its client, its service and the network
            self._lost = True
            reason = one_line(error)
            say(
                f"warning    --log wandb: its curves end here ({type(error).__name__}: {reason}); "
                "metrics.jsonl goes on"
            )


def _has_account() -> bool:
    """Return whether a key for Weights & Biases is on this host."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc

    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return host is not None and entries.authenticators(host) is not None


def open_sinks(
    names: Collection[LogName], folder: Path, done: int, identity: str, config: Mapping[str, Any]
) -> list[Sink]:
    """Open the sinks of a run, beside ``metrics.jsonl``, which every run has.

    Args:
        names: which.
        folder: of the run.
        done: steps done before.
        identity: of the run.
        config: of the run.

    Raises:
        UserError: one cannot be opened.
    """
    sinks: list[Sink] = []
    if LogName.TENSORBOARD in names:
        sinks.append(TensorBoard(folder / "tensorboard", done))
    if LogName.WANDB in names:
        sinks.append(Wandb(folder, identity, config))
    return sinks
