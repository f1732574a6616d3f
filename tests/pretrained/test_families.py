"""Families of ``transformers`` on two ranks: values and first loss are those of one process."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise
from tests.harness import run_ranks
from tests.pretrained.families import FAMILIES, loss_of, save_family
from tests.pretrained.small import assert_same, full_tensors

transformers = pytest.importorskip("transformers")


def _load_all(rank: int, world_size: int, root: Path, names: list[str]) -> dict[str, str]:
    """What is wrong with each family; all on one pair of processes, since a start takes seconds."""
    wrong = {}
    logging.disable(logging.WARNING)
    for name in names:
        try:
            _load(rank, name, root / name)
        except Exception:
            wrong[name] = traceback.format_exc(limit=-3)
    return wrong


def _load(rank: int, name: str, folder: Path) -> None:
    import transformers

    family = FAMILIES[name]
    model_class = getattr(transformers, family.loaded or family.saved)
    torch.manual_seed(3)
    model = shardwise.from_pretrained(folder, model_class=model_class)
    torch.manual_seed(3)
    plain = model_class.from_pretrained(folder)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert_same(full_tensors(model), full_tensors(plain))
    losses = [loss_of(each, name) for each in (model, plain)]
    assert torch.equal(*losses), losses


@pytest.mark.parametrize(
    "third", [0, *(pytest.param(third, marks=pytest.mark.long) for third in (1, 2))]
)
def test_families_load_as_unsharded(third: int, tmp_path: Path) -> None:
    transformers.logging.disable_progress_bar()
    names = list(FAMILIES)[third::3]
    for name in names:
        save_family(name, tmp_path / name)
    found = run_ranks(_load_all, 2, tmp_path, names)
    assert not any(found), "\n".join(f"{name}: {why}" for name, why in found[0].items())
    assert len({name.partition(" ")[0] for name in FAMILIES}) >= 30
