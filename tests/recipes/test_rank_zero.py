"""Rank 0 looks at the disk, and all ranks go on from what it saw, or fail alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.checkpoint import CheckpointError
from shardwise.launch.errors import UserError
from shardwise.recipes.core.checkpointing import SaveError
from shardwise.recipes.core.config import OptionError
from shardwise.recipes.core.rank import on_rank_zero

Ranks = Callable[..., list[Any]]


def _look(rank: int, world_size: int, folder: Path) -> list[str]:
    def see() -> list[str]:
        assert rank == 0, "the others are told"
        return ["step-00000001"]

    return on_rank_zero("looking", see)


def test_what_rank_0_sees_all_ranks_return(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_look, 3, tmp_path) == [["step-00000001"]] * 3


def _fail(rank: int, world_size: int, folder: Path) -> list[tuple[type, int, str]]:
    def refuse() -> None:
        raise OptionError("--resume", "no run", "a run")

    def refuse_otherwise() -> None:
        raise SaveError("a full disk")

    def read() -> str:
        return (folder / "missing").read_text()

    told = []
    for act in (refuse, refuse_otherwise, read):
        with pytest.raises(UserError) as caught:
            on_rank_zero("looking", act)
        told.append((type(caught.value), caught.value.exit_code, str(caught.value)))
    with pytest.raises(CheckpointError, match="looking: rank 0: ZeroDivisionError"):
        on_rank_zero("looking", lambda: 1 // 0)
    dist.barrier()  # nobody is left behind
    return told


def test_what_rank_0_raises_all_ranks_raise(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(_fail, 3, tmp_path)
    texts = [
        (2, "--resume: found no run, expected a run"),
        (1, "a full disk"),
        (2, f"looking: {tmp_path / 'missing'}: No such file or directory"),
    ]
    assert [each[1:] for each in by_rank[0]] == texts
    assert [kind for kind, *_ in by_rank[0]] == [OptionError, SaveError, UserError]
    for told in by_rank[1:]:
        assert told == [(UserError, *each) for each in texts]
