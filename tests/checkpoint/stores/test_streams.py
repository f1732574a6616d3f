"""Models that ranks save to an object store: as in a folder, with one rank sending each file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import checkpoint, fully_shard
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk import safetensors, store_commit
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.disk.filenames import INDEX, SHARD
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.ranks import contents, streams
from shardwise.checkpoint.ranks.contents import Contents, Conversion
from shardwise.checkpoint.ranks.hf import SavedModel, write_model
from shardwise.checkpoint.tools.survey import delete_leftovers, list_leftovers
from tests.checkpoint.meshes import Setup, filled
from tests.checkpoint.small import make, same
from tests.threads import run_threads
from tests.worlds import Ranks

pytest.importorskip("obstore", reason="needs obstore: install .[test]")

Save = Callable[..., None]


@pytest.fixture(autouse=True)
def _small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of some kilobytes take many rounds."""
    monkeypatch.setattr(streams, "_AT_ONCE", 256)
    monkeypatch.setattr(streams, "_ROUNDS", 4)


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    place = place_of(f"{request.param}://{tmp_path}/bucket")
    assert isinstance(place, StorePath)
    return place


def files_of(folder: Path | StorePath) -> dict[str, bytes]:
    """All files by the names that they have in a folder, the index with those."""
    if isinstance(folder, Path):
        return {each.name: each.read_bytes() for each in folder.iterdir()}
    found = {name: (folder / name).read_small(1 << 24) for name in folder.below()}
    named = {name: name.replace(_nonce(name), "") for name in found}
    text = found[INDEX].decode()
    for name, short in named.items():
        text = text.replace(name, short)
    return {short: found[name] for name, short in named.items()} | {INDEX: text.encode()}


def _nonce(name: str) -> str:
    match = SHARD.fullmatch(name)
    return f"-{match['nonce']}" if match and match["nonce"] else "\0"


def assert_same(stored: StorePath, folder: Path) -> None:
    found, expected = files_of(stored), files_of(folder)
    found = found if INDEX in expected else {n: d for n, d in found.items() if n != INDEX}
    assert found.keys() == expected.keys()
    assert found == expected


def save_to(place: Path | StorePath, saved: Contents, size: int = 1000) -> None:
    def configs(folder: Path) -> None:
        (folder / "config.json").write_bytes(b"{}")

    write_model(place, SavedModel(lambda: saved, configs), max_shard_size=size)


# -- the same files --------------------------------------------------------------------------------


def _saves_model(rank: int, world_size: int, root: StorePath, tmp_path: Path, setup: Setup) -> None:
    model, _ = filled(setup)
    for size in (300, 10**9):
        checkpoint.save_hf(str(root / f"hf{size}"), model, max_shard_size=size)
        checkpoint.save_hf(tmp_path / f"hf{size}", model, max_shard_size=size)


@pytest.mark.parametrize(
    ("setup", "world_size"),
    [
        (Setup("mlp", (1,)), 1),
        (Setup("mlp", (3,)), 3),
        (Setup("mlp", (4,), last_dim=True), 4),
        (Setup("mlp", (2, 2)), 4),
        (Setup("tied", (2,)), 2),
    ],
)
def test_files_are_those_of_a_folder(
    root: StorePath, tmp_path: Path, setup: Setup, world_size: int
) -> None:
    run_threads(_saves_model, world_size, root, tmp_path, setup)
    for size in (300, 10**9):
        assert_same(root / f"hf{size}", tmp_path / f"hf{size}")
    assert not [each for each in root.below() if each.startswith(".partial")]


def _tensors(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, of which two are sharded and one is empty."""
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            "large": nn.Parameter(torch.randn(37, 11)),
            "small": nn.Parameter(torch.randn(world_size + 1)),
            "none": nn.Parameter(torch.empty(0, 4)),
        }
    )
    fully_shard(model)
    more = {"flags": torch.tensor([True, False, True]), "half": torch.randn(5, 5).bfloat16()}
    return {**dict(model.named_parameters()), **more, "z": torch.randn(())}


def _conversions(tensors: Mapping[str, torch.Tensor]) -> list[Conversion]:
    """Rows of a tensor, one by one; a sum of two tensors in another dtype; and one renamed."""

    def rows(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"row{i}": row.clone() for i, row in enumerate(full["large"])}

    def merged(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": full["small"].sum().double().repeat(99), "half2": full["half"] * 2}

    renamed = Conversion(
        {"half": tensors["half"]}, {"half": TensorInfo("BF16", (5, 5))}, lambda full: full
    ).renamed({"half": "other"})
    shape = tuple(tensors["large"].shape)
    return [
        Conversion(
            {"large": tensors["large"]},
            {f"row{i}": TensorInfo("F32", shape[1:]) for i in range(shape[0])},
            rows,
        ),
        renamed,
        Conversion(
            {"small": tensors["small"], "half": tensors["half"]},
            {"half2": TensorInfo("BF16", (5, 5)), "sum": TensorInfo("F64", (99,))},
            merged,
        ),
    ]


def _saves_contents(
    rank: int, world_size: int, root: StorePath, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    tensors = _tensors(rank, world_size)
    saved = Contents(tensors, _conversions(tensors), dtype)
    for size in (100, 700, 10**9):
        save_to(root / f"hf{size}", saved, size)
        save_to(tmp_path / f"hf{size}", saved, size)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_converted_is_too(
    root: StorePath, tmp_path: Path, world_size: int, dtype: torch.dtype | None
) -> None:
    """Also where the results of one conversion are in several files, or apart in one."""
    run_threads(_saves_contents, world_size, root, tmp_path, dtype)
    for size in (100, 700, 10**9):
        assert_same(root / f"hf{size}", tmp_path / f"hf{size}")


def _saves_on_both(rank: int, world_size: int, root: StorePath, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(9, 13), mesh=mesh)
    checkpoint.save_hf(str(root / "hf"), model, max_shard_size=100)
    checkpoint.save_hf(tmp_path / "hf", model, max_shard_size=100)


def test_of_replicas_one_writes(root: StorePath, tmp_path: Path) -> None:
    run_threads(_saves_on_both, 4, root, tmp_path)
    assert_same(root / "hf", tmp_path / "hf")


def test_files_are_dealt_evenly_by_bytes() -> None:
    sizes = {"a": 5, "b": 9, "c": 4, "d": 1, "e": 9}
    files = {name: {"t": TensorInfo("U8", (size,))} for name, size in sizes.items()}
    dealt = streams._deal(files, 3)
    assert sorted(sum(sizes[each] for each in mine) for mine in dealt) == [9, 9, 10]
    assert sorted(each for mine in dealt for each in mine) == sorted(sizes)


def test_rounds_are_bounded_for_each_rank(
    root: StorePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    send = streams.RowExchange.send

    def note(self: Any, rows: Any) -> None:
        for rank in range(3):
            leaving = sum(each.nbytes for each in rows if each.source == rank and each.travels)
            landing = sum(each.nbytes for each in rows if each.target == rank)
            sent.append((leaving, landing))
        send(self, rows)

    monkeypatch.setattr(streams.RowExchange, "send", note)
    run_threads(_saves_contents, 3, root, tmp_path, None)
    assert max(max(each) for each in sent) <= 256 + 3 * 16  # with what aligns a tensor of 3 ranks


# -- failures --------------------------------------------------------------------------------------


def _fails(
    rank: int, world_size: int, root: StorePath, failing: int, stage: str
) -> tuple[str, str]:
    tensors = _tensors(rank, world_size)
    conversions = _conversions(tensors)
    saved = Contents(tensors, conversions)

    def read() -> Contents:
        if stage == "read" and rank == failing:
            raise ValueError("planted")
        return saved

    def configs(folder: Path) -> None:
        if stage == "configs":
            raise ValueError("planted")

    try:
        write_model(root / "hf", SavedModel(read, configs), max_shard_size=100)
    except CheckpointError as error:
        said = str(error)
    save_to(root / "next", saved)  # the ranks are in step
    return said, stage


STAGES: dict[str, tuple[Any, str]] = {
    "read": (None, ""),
    "configs": (None, ""),
    "rows": (contents, "own_part"),
    "write": (StorePath, "write"),
    "chunks": (safetensors, "as_bytes"),
    "send": (streams.RowExchange, "_out_of"),
    "arrive": (streams.RowExchange, "_into"),
    "convert": (streams, "converted"),
    "commit": (store_commit.StoreCommit, "publish"),
}


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_at_any_stage_fails_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, failing: int
) -> None:
    root = place_of(f"memory://{tmp_path}/bucket")
    assert isinstance(root, StorePath)
    where, name = STAGES[stage]
    failing = {"configs": 0, "commit": 0, "convert": failing or 1}.get(stage, failing)
    if where is not None:
        original, left = getattr(where, name), [True]

        def fail(*given: Any, **options: Any) -> Any:
            if left[0] and torch.distributed.get_rank() == failing:
                left[0] = False
                if stage == "write":
                    next(iter(given[1]))  # some has been sent
                raise CheckpointError("planted") if stage == "commit" else ValueError("planted")
            return original(*given, **options)

        monkeypatch.setattr(where, name, fail)
    found = run_threads(_fails, 3, root, failing, stage)
    for said, _ in found:
        assert said.startswith(f"saving {root}/hf: rank {failing}: ")
        assert said.endswith("planted")
    assert not [each for each in root.below() if not each.startswith("next/")]


def test_two_that_save_under_one_name(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    create = StorePath.create

    def be_late(self: StorePath, data: bytes) -> bool:
        monkeypatch.setattr(StorePath, "create", create)
        checkpoint.save_hf(str(root / "hf"), make(seed=2)[0])
        return create(self, data)

    monkeypatch.setattr(StorePath, "create", be_late)
    with pytest.raises(CheckpointError, match="hf: was made by another process"):
        checkpoint.save_hf(str(root / "hf"), make(seed=1)[0])
    assert len(root.below()) == 2
    with pytest.raises(CheckpointError, match="hf exists; give another name"):
        checkpoint.save_hf(str(root / "hf"), make(seed=1)[0])
    loaded, _ = make(seed=3)
    checkpoint.load_weights(str(root / "hf"), loaded)
    assert same(loaded, make(seed=2)[0])


def test_what_a_killed_save_left_is_found_and_deleted(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store_commit.StoreCommit, "publish", killed)
        patch.setattr(store_commit.StoreCommit, "abandon", lambda self: None)
        with pytest.raises(CheckpointError, match="killed"):
            checkpoint.save_hf(str(root / "hf"), make()[0], max_shard_size=100)
    assert [each.path.name for each in list_leftovers(root)] == ["hf"]
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    checkpoint.save_hf(str(root / "other"), make()[0])
    assert {each.partition("/")[0] for each in root.below()} == {"other"}
    delete_leftovers(root)


def test_a_save_that_stopped_before_its_commit_can_be_tried_again(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the small files that it left; but not beside those of another model."""
    linear = {"weight": torch.ones(2, 3)}

    def stop(*_: Any) -> None:
        raise CheckpointError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(store_commit.StoreCommit, "_put", stop)
        with pytest.raises(CheckpointError, match="planted"):
            save_to(root / "hf", Contents(linear))
    assert [*(root / "hf").below()] == ["config.json"]
    with pytest.raises(CheckpointError, match=r"config.json: found one of another model"):
        checkpoint.save_hf(str(root / "hf"), make()[0])
    assert [*root.below()] == ["hf/config.json"]
    save_to(root / "hf", Contents(linear))
    assert INDEX in (root / "hf").below()
    with pytest.raises(CheckpointError, match="hf exists; give another name"):
        save_to(root / "hf", Contents(linear))


def test_one_file_of_several_is_no_model(root: StorePath, tmp_path: Path) -> None:
    """As a save that was killed leaves it, or a copy that was."""
    tensors = {name: torch.ones(30) for name in "ab"}
    save_to(root / "hf", Contents(tensors), 150)
    (root / "hf" / INDEX).remove()
    first, second = sorted(each for each in (root / "hf").below() if each.startswith("model"))
    (root / "hf" / second).remove()
    save_to(tmp_path / "hf", Contents(tensors), 150)
    (tmp_path / "hf" / INDEX).unlink()
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    for folder in (root / "hf", tmp_path / "hf"):
        with pytest.raises(CheckpointError, match="expected the index, without which it may be"):
            open_source(folder)
    for file in (root / "hf" / first, tmp_path / "hf" / "model-00001-of-00002.safetensors"):
        with open_source(file) as source:
            assert [*source.tensors] == [("model", "a")]


def test_an_index_is_there_for_one_file_too(root: StorePath) -> None:
    checkpoint.save_hf(str(root / "hf"), make()[0])
    index = json.loads((root / "hf" / INDEX).read_small(1 << 20))
    (file,) = set(index["weight_map"].values())
    assert {file, INDEX} == set((root / "hf").below())


# -- processes -------------------------------------------------------------------------------------


def _peak(rank: int, world_size: int, root: str) -> tuple[int, bool]:
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))  # 134 MB
    fully_shard(model)
    checkpoint.save_hf(f"{root}/warm", fully_shard(nn.Linear(2, 2)))
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    checkpoint.save_hf(f"{root}/hf", model, max_shard_size=40 << 20)
    grown = _status("VmHWM") - before
    loaded = fully_shard(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))))
    checkpoint.load_weights(f"{root}/hf", loaded)
    pairs = zip(model.parameters(), loaded.parameters(), strict=True)
    return grown, all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.usefixtures("new_ranks")
def test_processes_hold_little_beside_their_shards(ranks: Ranks, tmp_path: Path) -> None:
    for grown, is_same in ranks(_peak, 2, f"file://{tmp_path}/bucket"):
        assert is_same
        assert grown < 64 << 20, f"{grown >> 20} MiB"
    assert os.listdir(tmp_path / "bucket" / "hf")
