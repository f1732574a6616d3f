"""What we write, we read: optimizers of all kinds, saved in every way, loaded in every way.

A training is saved, and goes on by one step. Whatever loads what was saved has the same values and
settings, to the last bit and the type, and so it has after that step. ``SAME`` and ``LATER`` say
what reads what, and ``REFUSED`` what is refused instead, and by which words.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OptimStateKeyType

from shardwise import FullyShardedDataParallel, StateDictType, checkpoint, relayout
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.ranks.xla import rank_file
from shardwise.checkpoint.tools.convert import consolidate, convert
from tests.checkpoint.written_and_read import (
    LAYOUTS,
    OPTIMIZERS,
    build,
    differences,
    everything,
    train,
)
from tests.threads import run_threads

Training = tuple[nn.Module, torch.optim.Optimizer]
FSDP = FullyShardedDataParallel
KINDS = list(StateDictType)
EXTRA = {"step": 3, "noise": [torch.ones(2), None], "pair": (torch.ones(3), 0.5)}


@dataclass
class Saved:
    """A training that was saved.

    Attributes:
        folder: where files are.
        optimizer: the name of its optimizer.
        dtype: of its parameters.
        steps: that it had taken.
        values: what it held then.
        later: what it held after one more.
        held: state dicts of this rank, by the way in which they were made.
    """

    folder: Path
    optimizer: str
    dtype: torch.dtype
    steps: int
    values: dict[str, Any]
    later: dict[str, Any]
    held: dict[str, tuple[dict[str, Any], dict[str, Any]]]


# ---- what writes ----


def _save_files(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder = saved.folder
    checkpoint.save(folder / "save", model, optimizer, EXTRA)
    checkpoint.save_rank_checkpoint(f"{folder}/ranks", model, optimizer)
    checkpoint.save_hf(folder / "save_hf", model)


def _hold(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved.held["state_dict"] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if not isinstance(model, FSDP):
        return
    if saved.optimizer.startswith("whole"):
        return
    for kind in KINDS:
        with FSDP.state_dict_type(model, kind):
            by_name = FSDP.optim_state_dict(model, optimizer)
            saved.held[kind.name] = copy.deepcopy((model.state_dict(), by_name))


def _write_from_files(folder: Path) -> None:
    """What is written without ranks, from the files of ranks."""
    convert(folder / "save", folder / "dcp", Format.DCP)
    convert(folder / "dcp", folder / "dcp, back", Format.SHARDWISE)
    convert(rank_file(f"{folder}/ranks", 0, 2), folder / "ranks, back", Format.SHARDWISE)
    convert(folder / "save", folder / "hf", Format.HF)
    consolidate(folder / "save", folder / "all.pt", everything=True)
    consolidate(folder / "save", folder / "model.pt")
    consolidate(folder / "save", folder / "model.safetensors")
    checkpoint.consolidate_sharded_model_checkpoints(f"{folder}/ranks")


# ---- what reads ----


def _load(written: str) -> Callable[[Saved, nn.Module, torch.optim.Optimizer], None]:
    def read(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        extra = checkpoint.load(saved.folder / written, model, optimizer)
        assert repr(extra) == repr({} if written == "ranks, back" else EXTRA)

    return read


def _load_ranks(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.load_rank_checkpoint(f"{saved.folder}/ranks", model, optimizer)


def _load_state_dicts(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own, states = copy.deepcopy(saved.held["state_dict"])
    model.load_state_dict(own)
    optimizer.load_state_dict(states)


def _load_kind(kind: StateDictType) -> Callable[[Saved, nn.Module, torch.optim.Optimizer], None]:
    def read(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if saved.optimizer.startswith("whole"):
            FSDP.optim_state_dict(model, optimizer)
        own, by_name = saved.held[kind.name]
        with FSDP.state_dict_type(model, kind):
            model.load_state_dict(own)
            FSDP.optim_state_dict_to_load(model, optimizer, by_name, load_directly=True)

    return read


def _load_file(written: str) -> Callable[[Saved, nn.Module, torch.optim.Optimizer], None]:
    """Load a plain file by torch's functions, and ours for states by name."""

    def read(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(saved.folder / written, weights_only=True)
        model.load_state_dict(state["model"])
        if isinstance(model, FSDP):
            FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"], load_directly=True)
        else:
            ids = OptimStateKeyType.PARAM_ID
            optimizer.load_state_dict(
                FSDP.rekey_optim_state_dict(state["optimizer"], ids, model, optim=optimizer)
            )

    return read


def _load_twice(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load into a training that has states and gradients, and again."""
    train(model, optimizer, step=70)
    for _ in range(2):
        checkpoint.load(saved.folder / "save", model, optimizer)


def _transfer(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = build("full", OPTIMIZERS[saved.optimizer][0], saved.dtype, seed=8)
    checkpoint.load(saved.folder / "save", *other)
    checkpoint.transfer(other, (model, optimizer))


def _relayout(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.load(saved.folder / "save", model, optimizer)
    relayout(model, optimizer, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))


Read = Callable[[Saved, nn.Module, torch.optim.Optimizer], None]

#: By the layout that wrote: what reads on the same ranks, by the name of the cell.
SAME: dict[str, dict[str, Read]] = {
    "full": {
        "save_rank_checkpoint, load_rank_checkpoint": _load_ranks,
        "state_dict, load_state_dict": _load_state_dicts,
        "save, load twice": _load_twice,
        "save, load, relayout": _relayout,
    },
    "FSDP1": {
        **{f"optim_state_dict, {kind.name}": _load_kind(kind) for kind in KINDS},
        "save_rank_checkpoint, load_rank_checkpoint": _load_ranks,
    },
}
#: By the layout that wrote: what reads later, by layout.
LATER: dict[str, dict[str, dict[str, Read]]] = {
    "full": {
        "grad-op": {"save, load, transfer": _transfer},
        "unsharded": {
            "save, load": _load("save"),
            "save, convert to dcp and back, load": _load("dcp, back"),
            "save_rank_checkpoint, convert, load": _load("ranks, back"),
            "save, consolidate everything, load_state_dict": _load_file("all.pt"),
            "save_rank_checkpoint, consolidate, load_state_dict": _load_file(
                "ranks_consolidated.pth"
            ),
        },
        "hybrid": {"save, load": _load("save")},
    },
    "FSDP1": {
        "FSDP1": {
            "save, consolidate everything, by name": _load_file("all.pt"),
            "save_rank_checkpoint, consolidate, by name": _load_file("ranks_consolidated.pth"),
        },
        "wide": {"save, load": _load("save")},
        "XLA": {"save, load": _load("save")},
    },
}


#: Cells in which torch's own ``load_state_dict`` casts states to the dtype of their parameter.
CAST = {
    name
    for cells in (*SAME.values(), LATER["full"]["unsharded"], LATER["FSDP1"]["FSDP1"])
    for name in cells
    if "state_dict" in name or "by name" in name
}
#: Optimizers that add up over ranks, in another order on another layout: steps round otherwise.
SUMS_OVER_RANKS = ("Adafactor",)
#: What is refused, by the beginnings of the optimizer's name and the cell's: a part of the error.
REFUSED = {
    ("whole", "optim_state_dict"): "which has states of different parameters on each rank",
    ("whole", "save, consolidate everything, by name"): "states of different parameters",
    ("whole", "save_rank_checkpoint, consolidate, by name"): "states of different parameters",
}


def _write(
    rank: int,
    world_size: int,
    layout: str,
    name: str,
    dtype: torch.dtype,
    folder: Path,
    cells: dict[str, Read],
) -> tuple[Saved, list[str]]:
    """Save a training in all ways, go on, and load on the same ranks."""
    make, steps = OPTIMIZERS[name]
    model, optimizer = build(layout, make, dtype)
    for step in range(steps):
        train(model, optimizer, step)
    optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does
    saved = Saved(folder, name, dtype, steps, everything(model, optimizer), {}, {})
    _save_files(saved, model, optimizer)
    _hold(saved, model, optimizer)
    assert not differences(everything(model, optimizer), saved.values)  # saving changes nothing
    train(model, optimizer, steps)
    saved.later = everything(model, optimizer)
    return saved, _read(rank, world_size, saved, layout, cells)


def _read(
    rank: int, world_size: int, saved: Saved, layout: str, cells: dict[str, Read]
) -> list[str]:
    """Fill the cells of a layout, and return what is wrong in them."""
    return [
        f"{cell}, on {layout}: {each}"
        for cell, read in cells.items()
        for each in _wrong(saved, layout, cell, read)
    ]


def _wrong(saved: Saved, layout: str, cell: str, read: Read) -> Iterator[str]:
    model, optimizer = build(layout, OPTIMIZERS[saved.optimizer][0], saved.dtype, seed=9)
    if saved.optimizer == "states of all kinds" and cell in CAST:
        return
    refused = next(
        (
            why
            for (name, what), why in REFUSED.items()
            if saved.optimizer.startswith(name) and cell.startswith(what)
        ),
        None,
    )
    try:
        read(saved, model, optimizer)
    except Exception as error:
        if refused is None or refused not in str(error):
            yield f"{type(error).__name__}: {error}"
        return
    if refused is not None:
        yield "expected it to be refused"
    yield from differences(everything(model, optimizer), saved.values)
    train(model, optimizer, saved.steps)
    rtol = 1e-5 if saved.optimizer in SUMS_OVER_RANKS else 0.0
    later = differences(everything(model, optimizer), saved.later, rtol)
    yield from (f"a step later: {each}" for each in later)


def _fill(layout: str, name: str, dtype: torch.dtype, folder: Path, of: int = 1) -> list[str]:
    """Fill one of ``of`` cells, in turn: the next optimizer fills others."""
    turn = itertools.count(list(OPTIMIZERS).index(name))

    def chosen(cells: dict[str, Read]) -> dict[str, Read]:
        return {cell: read for cell, read in cells.items() if next(turn) % of == 0}

    same = chosen(SAME[layout])
    ranks = run_threads(_write, LAYOUTS[layout][0], layout, name, dtype, folder, same)
    saved, wrong = ranks[0]
    _write_from_files(folder)
    for other, cells in LATER[layout].items():
        size, later = LAYOUTS[other][0], chosen(cells)
        if size == 1:  # without a process group
            wrong += _read(0, 1, saved, other, later)
        elif later:
            wrong += run_threads(_read, size, saved, other, later)[0]
    return wrong


#: Optimizers whose states by name differ in something from all others'.
WRAPPED = ("SGD", "tensors as settings", "groups", "states of all kinds", "whole", "Adafactor")


def _of_cells() -> list[Any]:
    """All cells, except that `make test` fills one of four for optimizers like others."""
    alike = [name for name in OPTIMIZERS if name not in WRAPPED]
    return [
        *((name, 1) for name in WRAPPED),
        *((name, 4) for name in alike),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in alike),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "of"), _of_cells())
def test_what_is_written_is_read(name: str, of: int, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if name == "states of all kinds" else torch.float32
    assert not (wrong := _fill("full", name, dtype, tmp_path, of)), "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPED)
def test_what_the_wrapper_writes_is_read(name: str, tmp_path: Path) -> None:
    assert not (wrong := _fill("FSDP1", name, torch.float32, tmp_path)), "\n".join(wrong)
