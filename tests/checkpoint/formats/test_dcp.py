"""Torch's own checkpoints: into our format and models, and ours into torch's; none runs code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise import checkpoint, fully_shard
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.formats.dcp import DcpSource
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.formats.source import LEAST_BUFFER, ReadWindow
from shardwise.checkpoint.ranks.loading import load_weights
from shardwise.checkpoint.tools.convert import convert
from tests.checkpoint.meshes import Setup, build, fill, filled, give_state, wrong
from tests.checkpoint.small import Runs
from tests.corpus.models import MODELS, make_model
from tests.worlds import Ranks

NAMES = ("mlp", "frozen", "llama-tied")
# Loading in one process, which torch remarks upon.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _torchs(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under torch's own FSDP2, and an optimizer."""
    model = make_model(name, seed=seed)
    for block in MODELS[name].blocks(model):
        torch_fully_shard(block)
    torch_fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.25, fused=True)


# ---- from torch's FSDP2 to ours ----


def _torch_saves(rank: int, world_size: int, folder: Path) -> None:
    for name in NAMES:
        model, optimizer = _torchs(name, seed=0)
        give_state(optimizer)
        fill(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": 5}
        dcp.save(state, checkpoint_id=folder / name)


def _we_load(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        model = make_model(name, seed=7)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        extra = checkpoint.load(folder / f"{name}-ours", model, optimizer, buffer=LEAST_BUFFER)
        found[name] = (wrong(model, optimizer), optimizer.param_groups[0]["lr"], extra)
        weights = make_model(name, seed=7)
        load_weights(folder / name, fully_shard(weights))
        assert not wrong(weights, torch.optim.SGD(weights.parameters())), f"{name}: weights alone"
    return found


def test_a_checkpoint_of_torchs_fsdp2_trains_on_under_ours(threads: Ranks, tmp_path: Path) -> None:
    threads(_torch_saves, 2, tmp_path)
    for name in NAMES:
        convert(tmp_path / name, tmp_path / f"{name}-ours", Format.SHARDWISE, buffer=LEAST_BUFFER)

    for found in threads(_we_load, 3, tmp_path):
        for name in NAMES:
            assert found[name] == ([], 0.25, {"step": 5}), name


# ---- from ours to torch's FSDP2 ----


def _we_save(rank: int, world_size: int, folder: Path) -> None:
    for name in NAMES:
        model, optimizer = filled(Setup(name, (world_size,), last_dim=True))
        checkpoint.save(folder / f"{name}-ours", model, optimizer, {"rows": [1, {"a": 2}]})


def _torch_loads(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    found = {}
    for name in NAMES:
        model, _ = _torchs(name, seed=7)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices}, {"params": others}]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / name)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert optimizer.param_groups[0]["lr"] == 0.5
        found[name] = wrong(model, optimizer)
    return found


def test_a_checkpoint_of_ours_trains_on_under_torchs_fsdp2(threads: Ranks, tmp_path: Path) -> None:
    threads(_we_save, 3, tmp_path)
    for name in NAMES:
        convert(tmp_path / f"{name}-ours", tmp_path / name, Format.DCP, buffer=LEAST_BUFFER)

    for found in threads(_torch_loads, 2, tmp_path):
        assert found == {name: [] for name in NAMES}


@ALONE
def test_plain_dcp_reads_values_and_tensors_that_we_wrote(tmp_path: Path) -> None:
    model, optimizer = build(Setup("mlp", None), seed=0)
    checkpoint.save(tmp_path / "ours", model, optimizer, {"step": 3, "names": ["a", "b"]})

    convert(tmp_path / "ours", tmp_path / "dcp", Format.DCP)

    blank = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state: dict[str, Any] = {"model": blank, "extra": {"step": 0, "names": []}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state["extra"] == {"step": 3, "names": ["a", "b"]}
    for name, value in model.state_dict().items():
        assert torch.equal(blank[name], value), name


# ---- what torch's users save ----


def _odd(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7.0 * 6 * 2).view(7, 6, 2)
    pieces = {
        "grid": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "last": distribute_tensor(whole, mesh, [Shard(2), Shard(2)]),
        "transposed": whole.permute(2, 1, 0),
        "narrow": whole[2:5],
    }
    dcp.save(pieces, checkpoint_id=folder / "alone")
    dcp.save({"app": {"model": pieces, "optim": {"state": whole}}}, checkpoint_id=folder / "app")


def test_chunks_of_any_cut_and_stride_are_read(threads: Ranks, tmp_path: Path) -> None:
    threads(_odd, 4, tmp_path)
    whole = torch.arange(7.0 * 6 * 2).view(7, 6, 2)
    expected = {
        "grid": whole,
        "last": whole,
        "transposed": whole.permute(2, 1, 0),
        "narrow": whole[2:5],
    }

    for folder, others in (("alone", set()), ("app", {("optimizer", "state")})):
        with DcpSource(tmp_path / folder) as source:
            assert source.tensors.keys() == {("model", name) for name in expected} | others
            for name, value in expected.items():
                data = b"".join(
                    map(bytes, ReadWindow(LEAST_BUFFER).chunks(source, ("model", name)))
                )
                assert data == value.contiguous().numpy().tobytes(), f"{folder}: {name}"


# ---- strangers ----


def _metadata(**changes: Any) -> Metadata:
    """Metadata of one tensor and one value; ``changes`` are what lies in it."""
    info = _StorageInfo("__0_0.distcp", 0, changes.get("length", 1500))
    for name in ("relative_path", "offset", "transform_descriptors"):
        if name in changes:
            setattr(info, name, changes[name])
    chunk = ChunkStorageMetadata(
        torch.Size(changes.get("offsets", (0,))), torch.Size(changes.get("sizes", (4,)))
    )
    entry = TensorStorageMetadata(
        TensorProperties(dtype=changes.get("dtype", torch.float32)),
        changes.get("size", torch.Size((4,))),
        [chunk] * changes.get("chunks", 1),
    )
    return Metadata(
        {"a": entry},
        planner_data=changes.get("planner_data", {"a": ("model", "a")}),
        storage_data={MetadataIndex("a", chunk.offsets): info},
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with one chunk and no metadata."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    torch.save(torch.arange(4.0), folder / "__0_0.distcp")
    return folder


def _length(folder: Path) -> int:
    return (folder / "__0_0.distcp").stat().st_size


def _write(folder: Path, metadata: Any, protocol: int = 4) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))


def test_a_folder_that_tells_the_truth_is_read(saved: Path) -> None:
    _write(saved, _metadata(length=_length(saved)))
    with DcpSource(saved) as source:
        ((_, part),) = ReadWindow().parts(source, ("model", "a"))
        assert part.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_path": "../elsewhere"}, "the name of a file in the folder"),
        ({"relative_path": "/etc/passwd"}, "the name of a file in the folder"),
        ({"relative_path": ".."}, "the name of a file in the folder"),
        ({"relative_path": 7}, "the name of a file in the folder"),
        ({"relative_path": "missing"}, "missing: cannot be opened"),
        ({"offset": 10**6}, "bytes in __0_0.distcp"),
        ({"offset": -1}, "offset.*expected an integer from 0"),
        ({"length": 10**12}, "bytes in __0_0.distcp"),
        ({"length": 700}, "is not a file of torch.save"),
        ({"transform_descriptors": ["zstd"]}, "chunks without transforms"),
        ({"size": torch.Size((2**40, 2**40))}, "bytes of shape"),
        ({"size": torch.Size((8,))}, "cover the shape"),
        ({"size": (4,)}, "size: found"),
        ({"sizes": (8,), "size": torch.Size((8,))}, "expected .*8.* as the metadata says"),
        ({"offsets": (1,)}, "expected one inside the shape"),
        ({"offsets": (0, 0)}, "different length"),
        ({"chunks": 2}, "gaps or overlaps"),
        ({"chunks": 0}, "gaps or overlaps"),
        ({"dtype": torch.int32}, "expected .*I32.* as the metadata says"),
        ({"planner_data": {"a": ("model", object)}}, "without running code|path"),
        ({"planner_data": {"a": "model"}}, "a tuple of keys"),
        ({"planner_data": {"a": ()}}, "a tuple of keys"),
        ({"planner_data": {"a": ("model", "a\n")}}, "printable"),
    ],
)
def test_metadata_that_lies_is_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    _write(saved, _metadata(**{"length": _length(saved), **changes}))

    with pytest.raises(CheckpointError, match=message), DcpSource(saved) as source:
        list(ReadWindow().parts(source, next(iter(source.tensors))))


def test_no_code_is_run_from_metadata_chunks_or_values(saved: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    _write(saved, _metadata(length=_length(saved), planner_data={"a": Runs(evidence)}))
    with pytest.raises(CheckpointError, match="without running code"):
        DcpSource(saved)

    torch.save({"a": torch.ones(4), "b": Runs(evidence)}, saved / "__0_0.distcp")
    _write(saved, _metadata(length=_length(saved)))
    with (
        pytest.raises(CheckpointError, match="without running code"),
        DcpSource(saved) as source,
    ):
        list(ReadWindow().parts(source, ("model", "a")))

    metadata = _metadata(length=_length(saved))
    metadata.state_dict_metadata = {"v": BytesStorageMetadata()}
    metadata.storage_data = {MetadataIndex("v"): _StorageInfo("__0_0.distcp", 0, _length(saved))}
    _write(saved, metadata)
    with (
        pytest.raises(CheckpointError, match="without running code"),
        DcpSource(saved) as source,
    ):
        assert source.values["extra", "v"]
    assert not evidence.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "without running code"),
        (b"\x80\x04", "without running code"),
        (b"\x80\x04r\xff\xff\xff\x7f.", "BININT|LONG_BINPUT|without running code"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "without running code"),
        (pickle.dumps({"a": 1}), "expected Metadata"),
        (pickle.dumps([1, 2, 3], protocol=0), "without running code"),
    ],
)
def test_a_pickle_that_is_no_metadata_is_refused(saved: Path, data: bytes, message: str) -> None:
    (saved / ".metadata").write_bytes(data)

    with pytest.raises(CheckpointError, match=message):
        DcpSource(saved)


def test_a_chunk_that_many_tensors_claim_is_not_read_for_each(saved: Path) -> None:
    metadata = _metadata(length=_length(saved))
    (index,) = metadata.storage_data
    for number in range(3):
        metadata.state_dict_metadata[f"b{number}"] = metadata.state_dict_metadata["a"]
        other = MetadataIndex(f"b{number}", index.offset)
        metadata.storage_data[other] = metadata.storage_data[index]
    _write(saved, metadata)
    with pytest.raises(CheckpointError, match=r"bytes in all.*expected at most .* in its files"):
        DcpSource(saved)
