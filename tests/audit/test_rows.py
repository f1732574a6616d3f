"""Each row of docs/dtensors.md: still wrong in torch, right as written instead, and audited."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import shardwise
from shardwise import fully_shard
from tests.audit.rows import ROWS, Program, Row
from tests.worlds import Ranks

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
OURS = "(on torch's `fully_shard`)"
TABLE = Path(__file__).parents[2] / "docs" / "dtensors.md"


class Holder(nn.Module):
    """A module with one parameter."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def values(row: Row) -> torch.Tensor:
    return torch.randn(row.rows, 4, generator=torch.Generator().manual_seed(3))


def sharded(row: Row) -> Holder:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Holder(distribute_tensor(values(row), mesh, [row.placement]))


def run(rank: int, world_size: int, row: Row, program: Program) -> Any:
    return program(sharded(row).weight)


def run_audited(rank: int, world_size: int, row: Row, program: Program) -> str:
    model = sharded(row)
    try:
        with shardwise.audit(model):
            program(model.weight)
    except ValueError as error:
        return str(error)
    return ""


def is_as_expected(row: Row, found: Any) -> bool:
    want = row.wrong(Holder(values(row)).weight)
    if isinstance(want, torch.Tensor):
        return torch.allclose(found, want, rtol=1e-5, atol=1e-6)
    return found == pytest.approx(want)


def is_wrong_in_this_torch(row: Row) -> bool:
    return row.mended is None or row.mended > VERSION


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_a_row_is_wrong_in_torch_and_right_as_written_instead(threads: Ranks, row: Row) -> None:
    is_right = all(is_as_expected(row, each) for each in threads(run, 2, row, row.wrong))
    if is_wrong_in_this_torch(row):
        assert not is_right, f"torch {torch.__version__} mended this: remove the row ({row.name})"
    else:
        assert is_right, f"wrong again in torch {torch.__version__}: {row.name}"

    assert all(is_as_expected(row, each) for each in threads(run, 2, row, row.right))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_an_audit_tells_what_is_wrong_and_where(threads: Ranks, row: Row) -> None:
    if is_wrong_in_this_torch(row) and row.told is not None:
        (told,) = {*threads(run_audited, 2, row, row.wrong)}  # the same on all ranks
        assert row.told in told
        assert "weight" in told
        assert re.search(r"(rows|test_rows)\.py:\d+ in", told)

    assert [*threads(run_audited, 2, row, row.right)] == ["", ""]


def _on_ours(rank: int, world_size: int, row: Row) -> tuple[Any, str]:
    def made() -> Any:
        return fully_shard(Holder(values(row)), shard_placement_fn=lambda _: row.placement)

    plain, model = made(), made()
    found = row.wrong(plain.weight)
    try:
        with shardwise.audit(model):
            row.wrong(model.weight)
    except ValueError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_audit_agrees_with_what_our_runtime_computes(threads: Ranks, row: Row) -> None:
    each = threads(_on_ours, 2, row)
    is_right = all(is_as_expected(row, found) for found, _ in each)
    said = {said for _, said in each}

    assert is_right == (row.right_on_ours or not is_wrong_in_this_torch(row))
    assert (said == {""}) == (is_right or row.told is None)


def test_the_table_of_the_docs_has_these_rows() -> None:
    lines = TABLE.read_text().splitlines()
    table = [line.split(" | ") for line in lines if line.startswith("| ")]
    listed = {cells[0].removeprefix("| "): cells[-1].removesuffix(" |") for cells in table}

    for row in ROWS:
        until = "" if row.mended is None else f"right as of {row.mended[0]}.{row.mended[1]}"
        assert listed.get(row.name) == until, row.name
        says_so = any(f"| {row.name} |" in line and OURS in line for line in lines)
        assert says_so == row.right_on_ours, row.name
