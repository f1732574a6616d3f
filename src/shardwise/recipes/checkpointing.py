"""Checkpoints that are whole or not there.

    checkpoints/.step-00000040.partial/     every rank writes its shards here, and syncs them
    checkpoints/step-00000040/              then one rename, by rank 0

What lies in the folder is the business of this file alone: ``torch.distributed.checkpoint`` for
shards, optimizer state and random states, and ``state.json`` for the position.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.launch.errors import UserError
from shardwise.recipes.rundir import write_text

if TYPE_CHECKING:
    import torch
    from torch import nn

_NAME = re.compile(r"step-(\d{8,})")
_STATE = "state.json"
_METADATA = ".metadata"  # torch writes it last, when every rank's files are complete


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        examples: examples that all ranks together have taken.
    """

    step: int = 0
    examples: int = 0


class SaveError(UserError):
    """A checkpoint could not be written: a full disk, a folder that has gone."""

    exit_code = 1


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made when the first is saved.
        keep_last: how many to keep; older ones are deleted once a newer one is complete.
    """

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        self._folder = folder
        self._keep_last = keep_last

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
        return sorted(int(m[1]) for m, path in found if m and _is_complete(path))

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self._folder / f"step-{step:08}"

    def position(self, step: int) -> Position:
        """How far the run was.

        Raises:
            UserError: the file that says so is damaged.
        """
        file = self.path(step) / _STATE
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            return Position(int(fields["step"]), int(fields["examples"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"--resume: {file} is damaged ({error!r})") from None

    def save(self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Save everything that training goes on from. Every rank calls it.

        When it returns, the checkpoint is complete and on the disk. If it raises, or the process
        is killed, all earlier checkpoints are as they were.
        """
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict import get_state_dict

        target = self.path(position.step)
        if position.step in self.steps():
            return target
        partial = self._folder / f".{target.name}.partial"
        leader = dist.get_rank() == 0
        if leader:
            self._remove(self._leftovers(target))
            partial.mkdir(parents=True)
        dist.barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        everything = {"model": model_state, "optimizer": optimizer_state, "random": _random_state()}
        try:
            dcp.save(everything, checkpoint_id=partial)  # type: ignore[attr-defined]
        except CheckpointException as error:
            raise SaveError(self._lost(position.step, error.failures)) from error
        if leader:
            fields = {**asdict(position), "world_size": dist.get_world_size()}
            write_text(partial / _STATE, json.dumps(fields) + "\n")
            _sync_folder(partial)
            partial.rename(target)
            _sync_folder(self._folder)
            self._remove([self.path(step) for step in self.steps()[: -self._keep_last]])
        dist.barrier()
        return target

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Load a checkpoint into shards, on the same or another world. Every rank calls it.

        Random states come back where the world has as many ranks as when it was saved.

        Raises:
            UserError: the checkpoint is damaged, or is of another model.
        """
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        path = self.path(step)
        position = self.position(step)
        saved_world = json.loads((path / _STATE).read_text(encoding="utf-8")).get("world_size")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        everything: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        if saved_world == dist.get_world_size():
            everything["random"] = _random_state()
        try:
            dcp.load(everything, checkpoint_id=path)  # type: ignore[attr-defined]
        except CheckpointException as error:
            raise UserError(f"--resume: {path}: {_first(error.failures)}") from error
        set_state_dict(
            model,
            optimizer,
            model_state_dict=everything["model"],
            optim_state_dict=everything["optimizer"],
        )
        if "random" in everything:
            _set_random_state(everything["random"])
        return position

    def _lost(self, step: int, failures: Mapping[int, Any]) -> str:
        kept = self.steps()
        since = f"step {kept[-1]} is the last that is saved" if kept else "none was saved before"
        return f"checkpoint of step {step}: {_first(failures)}; {since}"

    def _leftovers(self, target: Path) -> list[Path]:
        """What a run that was killed while saving left behind, and what is in the way."""
        partial = list(self._folder.glob(".step-*.partial")) if self._folder.is_dir() else []
        return [*partial, target] if target.exists() else partial

    @staticmethod
    def _remove(folders: Sequence[Path]) -> None:
        for folder in folders:
            # Renamed first, so that a deletion that is cut short leaves no half checkpoint.
            doomed = folder.with_name(f".{folder.name.strip('.')}.partial")
            if folder != doomed:
                folder.rename(doomed)
            shutil.rmtree(doomed)


def _first(failures: Mapping[int, Any]) -> str:
    rank, (error, _) = min(failures.items())
    return f"rank {rank}: {type(error).__name__}: {error}"


def _is_complete(path: Path) -> bool:
    return (path / _METADATA).is_file() and (path / _STATE).is_file()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random_state() -> dict[str, dict[str, torch.Tensor]]:
    """The state of this rank's random generators, under a name that no other rank has."""
    import torch
    import torch.distributed as dist

    states = {"cpu": torch.get_rng_state()}
    if torch.distributed.get_backend() != "gloo":
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rank{dist.get_rank()}": states}


def _set_random_state(states: dict[str, dict[str, torch.Tensor]]) -> None:
    import torch
    import torch.distributed as dist

    own = states[f"rank{dist.get_rank()}"]
    torch.set_rng_state(own["cpu"])
    if "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
