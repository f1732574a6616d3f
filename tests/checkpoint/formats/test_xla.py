"""Checkpoints of one file a rank, and full state dicts of them without a process group."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import fully_shard
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import consolidate
from shardwise.checkpoint.ranks.xla import (
    consolidate_sharded_model_checkpoints,
    get_shard_metadata,
    load_rank_checkpoint,
    rank_file,
    save_rank_checkpoint,
)
from tests.checkpoint.meshes import Setup, build, expected, fill, filled, wrong
from tests.corpus.models import make_model
from tests.threads import run_threads
from tests.worlds import Ranks, on_threads

NAMES = ("mlp", "frozen", "scalars", "llama-tied")


def _by_hand(prefix: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save as a program for XLA does: everything by its own ``state_dict()``."""
    metadata = get_shard_metadata(model)
    state = {
        "model": model.state_dict(),
        "shard_metadata": metadata,
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, rank_file(prefix, metadata["rank"], metadata["world_size"]))


def _save(
    rank: int, world_size: int, shape: tuple[int, ...], names: tuple[str, ...], folder: Path
) -> None:
    for name in names:
        for last_dim in (False, True):
            model, optimizer = filled(Setup(name, shape, last_dim=last_dim))
            prefix = f"{folder}/{name}{'-columns' if last_dim else ''}"
            save_rank_checkpoint(prefix, model, optimizer)
            _by_hand(f"{prefix}-by-hand", model, optimizer)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2,), NAMES),
        ((2, 2), NAMES[:1]),
        pytest.param((2, 2), NAMES[1:], marks=pytest.mark.long),
    ],
)
def test_full_state_dicts_come_of_the_files_of_all_ranks(
    threads: Ranks, tmp_path: Path, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    threads(_save, torch.Size(shape).numel(), shape, names, tmp_path)

    for name in names:
        for kind in ("", "-columns", "-by-hand", "-columns-by-hand"):
            prefix = f"{tmp_path}/{name}{kind}"
            model, path = consolidate_sharded_model_checkpoints(prefix)
            assert path == f"{prefix}_consolidated.pth"

            saved = torch.load(path, weights_only=True)
            assert list(saved) == ["model", "optimizer"]
            again, optimizer = build(Setup(name, None), seed=7)
            again.load_state_dict(dict(model), strict=True)
            if "hand" in kind:
                optimizer.load_state_dict(saved["optimizer"])
                assert not wrong(again, optimizer), f"{name}{kind}"
            else:
                for param, state in saved["optimizer"]["state"].items():
                    for key, value in state.items():
                        assert torch.equal(value, expected(f"{param} {key}", value))
            assert zipfile.ZipFile(path).testzip() is None, "checksums other programs look at"

            whole, none = consolidate_sharded_model_checkpoints(prefix, save_model=False)
            assert none is None
            assert list(whole) == list(saved["model"]) == list(make_model(name).state_dict())
            for key, value in whole.items():
                assert torch.equal(value, saved["model"][key]), key
        tied = saved["model"]
        if name == "llama-tied":
            one, other = tied["lm_head.weight"], tied["model.embed_tokens.weight"]
            assert one.data_ptr() == other.data_ptr(), "tied parameters are saved once"


def _save_tensor_parallel(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7, bias=False), nn.ReLU(), nn.Linear(7, 5, bias=False))
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    assert all(isinstance(param, DTensor) for param in model.parameters())
    save_rank_checkpoint(f"{folder}/tp", model)
    return whole


def test_rows_come_back_in_order_under_tensor_parallelism(threads: Ranks, tmp_path: Path) -> None:
    whole = threads(_save_tensor_parallel, 4, tmp_path)[0]

    model, _ = consolidate_sharded_model_checkpoints(f"{tmp_path}/tp")

    for name, value in whole.items():
        assert torch.equal(model[name], value), name


@on_threads(2)
def test_the_same_ranks_go_on_from_their_own_files(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    for last_dim in (False, True):
        setup = Setup("llama-tied", (world_size,), last_dim=last_dim)
        prefix = f"{tmp_path}/llama{last_dim}"
        model, optimizer = filled(setup)
        save_rank_checkpoint(prefix, model, optimizer)
        again, new = build(setup, seed=7)
        load_rank_checkpoint(prefix, again, new)
        assert not wrong(again, new)
        with pytest.raises(ValueError, match="exists"):
            save_rank_checkpoint(prefix, model, optimizer)
        save_rank_checkpoint(prefix, model, force=True)
        with pytest.raises(CheckpointError, match="contains no optimizer"):
            load_rank_checkpoint(prefix, again, new)
        other, _ = build(Setup("llama-tied", (world_size,), last_dim=not last_dim), seed=7)
        with pytest.raises(CheckpointError, match="consolidate the files"):
            load_rank_checkpoint(prefix, other)
        with pytest.raises(CheckpointError, match="is missing"):
            load_rank_checkpoint(f"{prefix}-none", other)


# ---- the command, and files that do not fit ----


def _save_mlp(rank: int, world_size: int, prefix: str) -> None:
    model, optimizer = build(Setup("mlp", (world_size,)), seed=0)
    fill(model, optimizer)
    save_rank_checkpoint(prefix, model, optimizer)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files ``mlp`` of three ranks, and ``two`` of two."""

    folder = tmp_path_factory.mktemp("ranks")
    run_threads(_save_mlp, 3, f"{folder}/mlp")
    run_threads(_save_mlp, 2, f"{folder}/two")
    return folder


@pytest.fixture
def mine(files: Path, tmp_path: Path) -> Path:
    """A copy of these files to spoil."""
    return Path(shutil.copytree(files, tmp_path / "copy"))


def test_the_command_makes_one_file(
    mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine)
    arguments = ["--ckpt_prefix", "mlp", "--ckpt_suffix", "_rank-*-of-*.pth"]

    assert consolidate.main(arguments) == 0

    shown = capsys.readouterr()
    assert shown.out.startswith("saved 6 tensors, ")
    assert shown.out.rstrip().endswith("to mlp_consolidated.pth")
    assert set(torch.load("mlp_consolidated.pth", weights_only=True)) == {"model", "optimizer"}
    assert consolidate.main(arguments) == 2
    assert "mlp_consolidated.pth exists" in capsys.readouterr().err
    assert consolidate.main([*arguments, "--force", "--ckpt_suffix", "*.pth"]) == 0
    assert consolidate.main(["--ckpt_prefix", "nothing"]) == 1
    assert capsys.readouterr().err == "error: nothing_rank-*-of-*.pth: found no files that match\n"
    with pytest.raises(SystemExit):
        consolidate.main(["--help"])
    assert "Example: python -m shardwise.checkpoint.consolidate" in capsys.readouterr().out


def _change(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def _shape(state: dict[str, Any], **fields: Any) -> None:
    state["shard_metadata"]["shard_info"]["layers.0.weight"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model"), "a dict with model and shard_metadata"),
        (lambda s: s["shard_metadata"].pop("format"), "has no 'format'"),
        (lambda s: s["shard_metadata"].update(version=9), "shardwise.rank 1"),
        (lambda s: s["shard_metadata"].update(rank=0), "expected the file of rank 1"),
        (lambda s: s["shard_metadata"].update(world_size=2), "a world of 2 ranks"),
        (lambda s: s["shard_metadata"].update(world_size=10**9), "world_size"),
        (lambda s: s["model"].pop("layers.0.weight"), "found other keys"),
        (lambda s: s["model"].update({"layers.0.weight": 1}), "a tensor, as on other ranks"),
        (lambda s: s["model"].update({"layers.0.weight": torch.ones(3, 7)}), "with sizes"),
        (lambda s: s["model"].update({"layers.0.weight": torch.ones(2, 7).half()}), "with sizes"),
        (lambda s: _shape(s, shape=[50, 7]), "a part of"),
        (lambda s: _shape(s, shape=[2**62, 2**62]), "bytes of shape"),
        (lambda s: _shape(s, offsets=[0, 0]), "gaps or overlaps|fill"),
        (lambda s: _shape(s, offsets=[9, 0]), "a part of"),
        (lambda s: _shape(s, offsets=[-1, 0]), "expected an integer from 0"),
        (lambda s: _shape(s, sizes=[2]), "a part of"),
        (lambda s: s["shard_metadata"]["shard_info"].clear(), "of .* as on other ranks|part"),
        (lambda s: s["shard_metadata"].update(shard_info=[]), "an object"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    mine: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    _change(rank_file(f"{mine}/mlp", 1, 3), change)

    with pytest.raises(CheckpointError, match=message):
        consolidate_sharded_model_checkpoints(f"{mine}/mlp")

    assert not (mine / "mlp_consolidated.pth").exists()
    assert not list(mine.glob(".*")), "nothing is left beside"


def test_a_missing_rank_is_named(mine: Path) -> None:
    rank_file(f"{mine}/mlp", 2, 3).unlink()
    with pytest.raises(CheckpointError, match="files of 2 ranks, expected 3; the file of rank 2"):
        consolidate_sharded_model_checkpoints(f"{mine}/mlp")
    rank_file(f"{mine}/mlp", 0, 3).unlink()
    with pytest.raises(CheckpointError, match="expected the file of rank 0"):
        consolidate_sharded_model_checkpoints(f"{mine}/mlp")


def test_the_brackets_in_a_folders_name_are_no_pattern(files: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(files, tmp_path / "run[1]"))
    model, _ = consolidate_sharded_model_checkpoints(f"{folder}/two")
    assert len(model) == 6


# ---- loading a rank's own file ----


def _saved_alone(folder: Path) -> tuple[str, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    save_rank_checkpoint(f"{folder}/x", model, optimizer)
    return f"{folder}/x", model, optimizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model"), "a dict with model and shard_metadata"),
        (lambda s: s.pop("shard_metadata"), "a dict with model and shard_metadata"),
        (lambda s: s["shard_metadata"].pop("shard_info"), "has no 'shard_info'"),
        (lambda s: s["shard_metadata"]["shard_info"].update(weight=1), "an object"),
        (lambda s: s["shard_metadata"].update(optimizer_info=[]), "an object"),
        (lambda s: s.update(model=[]), "model: found .list., expected a dict"),
        (lambda s: s["model"].pop("weight"), "cannot be loaded.*weight"),
        (lambda s: s["model"].update(weight=torch.ones(7)), "cannot be loaded.*weight"),
        (lambda s: s["model"].update(weight="text"), "cannot be loaded"),
        (lambda s: s["model"].update({"w\x00\x1b[2J": torch.ones(1)}), "cannot be loaded.*w��"),
        (lambda s: s.pop("optimizer"), "contains no optimizer"),
        (lambda s: s.update(optimizer=[]), "optimizer: found .list., expected a dict"),
        (lambda s: s["optimizer"].update(state=None), "optimizer, state: found .NoneType"),
        (lambda s: s["optimizer"]["state"].update(x={}), "the name of a parameter"),
        (lambda s: s["optimizer"]["state"].update(weight=1), "expected a dict"),
        (lambda s: s["optimizer"].pop("param_groups"), "found no param_groups"),
        (lambda s: s["optimizer"].update(param_groups=[{"params": [["weight"]]}]), "no list of"),
        (lambda s: s["optimizer"].update(param_groups=[]), "found no group among the 0 saved ones"),
    ],
)
def test_a_damaged_file_of_a_rank_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    prefix, model, optimizer = _saved_alone(tmp_path)
    load_rank_checkpoint(prefix, model, optimizer)
    path = rank_file(prefix, 0, 1)
    _change(path, change)

    with pytest.raises(CheckpointError, match=message) as caught:
        load_rank_checkpoint(prefix, model, optimizer)
    assert path.name in str(caught.value)
    assert str(caught.value).isprintable()


def test_two_tensors_of_one_name_are_not_taken_for_one(tmp_path: Path) -> None:
    prefix, _, _ = _saved_alone(tmp_path)
    two = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    _change(rank_file(prefix, 0, 1), lambda s: s.update(model=two))
    with pytest.raises(CheckpointError, match=r"found model\.a\.b twice"):
        consolidate_sharded_model_checkpoints(prefix)
