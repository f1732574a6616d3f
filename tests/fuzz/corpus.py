"""One small checkpoint of each format, what can be done to its files, and how all of it is read."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from shardwise import checkpoint
from shardwise.base.boxes import full_box
from shardwise.checkpoint.disk import manifest
from shardwise.checkpoint.disk.entries import torch_dtype
from shardwise.checkpoint.formats.dcp import DcpSource
from shardwise.checkpoint.formats.detect import open_rank_files
from shardwise.checkpoint.formats.hf import HfSource, find_config
from shardwise.checkpoint.formats.native import ShardwiseSource
from shardwise.checkpoint.formats.source import ReadWindow, Source
from shardwise.checkpoint.formats.torchfile import TorchSource
from shardwise.checkpoint.ranks.xla import load_rank_checkpoint, rank_file, save_rank_checkpoint
from tests.checkpoint.small import SHARD, make, save_small
from tests.fuzz import mutations as m

#: What a checkpoint holds: dtypes, shapes and values, by name.
Content = Mapping[str, object]
_BUFFER = 1 << 16
_XLA = Path(__file__).parents[1] / "checkpoint" / "formats" / "torch_xla"


@dataclass(frozen=True)
class Reader:
    """A way to read a checkpoint.

    Attributes:
        make: writes one into an empty folder.
        read: reads all of it.
        mutations: what is done to which file, beside blind damage.
        sealed: whether a mutant of a file, if it is read, has to hold what the original does.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], Content]
    mutations: Mapping[str, tuple[m.Mutation, ...]]
    sealed: Callable[[str, bytes], bool] = lambda name, data: False


def _content(source: Source) -> Content:
    """Everything that a source says, all tensors read."""
    found: dict[str, object] = {}
    window = ReadWindow(_BUFFER)
    for path, info in source.tensors.items():
        digest = hashlib.blake2b(digest_size=8)
        for chunk in window.chunks(source, path):
            digest.update(chunk)
        found[str(path)] = (info, digest.digest())
    for path, value in source.values.items():
        found[f"value {path}"] = repr(value)
    return found


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7, generator=generator),
        "a.bias": torch.randn(5, generator=generator).bfloat16(),
        "b.steps": torch.tensor(3),
        "b.empty": torch.empty(0, 4),
        "b.mask": torch.randn(9, generator=generator) > 0,
    }


def _read_ours(folder: Path) -> Content:
    with ShardwiseSource(folder) as source:
        return _content(source)


def _load_ours(folder: Path) -> Content:
    """What a model and an optimizer have after loading."""
    model, optimizer = make(steps=0)
    extra = checkpoint.load(folder, model, optimizer)
    return {"model": repr(model.state_dict()), "optimizer": repr(optimizer.state_dict()), **extra}


def _is_sealed(name: str, data: bytes) -> bool:
    """Shards have checksums in the manifest; and so has the manifest, unless that was cut out."""
    return name != "manifest.json" or b'"of_all_above"' in data


def _edit_manifest(rng: Any, data: bytes) -> bytes:
    """Edit a manifest as someone who takes its checksum out."""
    content = json.loads(data)
    del content["of_all_above"]
    return json.dumps(m.edit_json(rng, content)).encode()


def _save_in_columns(folder: Path) -> None:
    with patch.object(manifest, "MANY", 1):
        _save_ours(folder)


def _edit_column(rng: Any, data: bytes) -> bytes:
    """Edit a number of a column, or pack it in place of one that all pieces have."""
    content = json.loads(data)
    del content["of_all_above"]
    columns = rng.choice([each["pieces"] for each in content["tensors"] if each["pieces"]])
    places = [columns, *(columns[name] for name in ("offsets", "sizes") if columns[name])]
    place: Any = rng.choice(places)
    at = rng.choice(["file", "offset"]) if place is columns else rng.randrange(len(place))
    number = rng.choice([0, 1, 2**31, 2**62, 2**63 - 1, -1, -(2**63), place[at] + 1])
    packed = zlib.compress(struct.pack("<q", number) * rng.choice([1, 1, 1, 2, 10**6]))
    place[at] = rng.choice([number, base64.b64encode(packed).decode()])
    return json.dumps(content).encode()


def _make_safetensors(folder: Path) -> None:
    save_file(_state(), folder / "model.safetensors", {"format": "pt"})


def _make_hf(folder: Path) -> None:
    state = _state()
    files = {"model-00001-of-00002.safetensors": list(state)[:2]}
    files["model-00002-of-00002.safetensors"] = list(state)[2:]
    for file, names in files.items():
        save_file({name: state[name] for name in names}, folder / file, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {n: file for file, names in files.items() for n in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "hidden_size": 7, "rope": {"theta": 1e4, "factors": [1, 2]}}
    (folder / "config.json").write_text(json.dumps(config))


def _read_hf(folder: Path) -> Content:
    with HfSource(folder) as source:
        return {**_content(source), "config": repr(find_config(source))}


def _read_safetensors(folder: Path) -> Content:
    with HfSource(folder / "model.safetensors") as source:
        return _content(source)


def _make_dcp(folder: Path) -> None:
    state = {"model": _state(), "step": 5, "names": ["a", {"b": (1, 2.5)}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks that there is no process group
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def _read_dcp(folder: Path) -> Content:
    with DcpSource(folder) as source:
        return _content(source)


def _make_torch(folder: Path) -> None:
    linear = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(4)).sum().backward()
    optimizer.step()
    model = {**_state(), **linear.state_dict(), "view": torch.arange(12.0).view(3, 4).t()[1:]}
    extra = {"rng": torch.get_rng_state()[:64], "bytes": b"x", "set": {1, 2}}
    torch.save({"model": model, "optimizer": optimizer.state_dict(), **extra}, folder / "x.pt")


def _read_torch(folder: Path) -> Content:
    with TorchSource(folder / "x.pt") as source:
        return _content(source)


def _make_ranks(folder: Path) -> None:
    """What two ranks save: the rows of each, and state of an optimizer."""
    weight = _state()["a.weight"]
    for rank, (first, count) in enumerate(((0, 3), (3, 2))):
        own = weight[first : first + count].clone()
        part = {"shape": [5, 7], "offsets": [first, 0], "sizes": [count, 7]}
        metadata = {
            "format": "shardwise.rank",
            "version": 1,
            "rank": rank,
            "world_size": 2,
            "shard_info": {"w": part},
            "optimizer_info": {"state.w.exp_avg": part},
        }
        state = {"w": {"exp_avg": own * 2, "step": torch.tensor(1.0)}}
        groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]}]
        tree = {"model": {"w": own, "b": torch.ones(2)}, "shard_metadata": metadata}
        tree["optimizer"] = {"state": state, "param_groups": groups}
        torch.save(tree, rank_file(f"{folder}/x", rank, 2))


def _read_ranks(folder: Path) -> Content:
    files = sorted(folder.glob("x_rank-*.pth"))
    with open_rank_files(files) as source:
        found = _content(source)
        for path, info in source.tensors.items():
            into = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
            source.read(path, full_box(info.shape), into)
        return {**found, "tree": repr(source.tree)}


def _make_xla(folder: Path) -> None:
    """What PyTorch/XLA's FSDP saved on two ranks."""
    for rank in range(2):
        shutil.copyfile(_XLA / f"flat{_RANK.format(rank, 2)[1:]}", folder / _RANK.format(rank, 2))


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _make_own_rank(folder: Path) -> None:
    save_rank_checkpoint(f"{folder}/x", *_small())


def _read_own_rank(folder: Path) -> Content:
    model, optimizer = _small()
    load_rank_checkpoint(f"{folder}/x", model, optimizer)
    return {"model": repr(model.state_dict()), "optimizer": repr(optimizer.state_dict())}


def _save_ours(folder: Path) -> None:
    folder.rmdir()
    save_small(folder)


_RANK = "x_rank-0000000{}-of-0000000{}.pth"
READERS: Mapping[str, Reader] = {
    "columns": Reader(
        _save_in_columns,
        _read_ours,
        {"manifest.json": (_edit_manifest, _edit_column, _edit_column)},
        _is_sealed,
    ),
    "shardwise": Reader(
        _save_ours,
        _read_ours,
        {"manifest.json": (_edit_manifest, _edit_manifest), SHARD: (m.safetensors_header,)},
        _is_sealed,
    ),
    "loaded": Reader(_save_ours, _load_ours, {"manifest.json": (_edit_manifest,) * 12}, _is_sealed),
    "safetensors": Reader(
        _make_safetensors, _read_safetensors, {"model.safetensors": (m.safetensors_header,) * 3}
    ),
    "hf": Reader(
        _make_hf,
        _read_hf,
        {
            "model.safetensors.index.json": (m.json_file,) * 3,
            "model-00001-of-00002.safetensors": (m.safetensors_header,),
            "config.json": (m.json_file,),
        },
    ),
    "dcp": Reader(_make_dcp, _read_dcp, {".metadata": (m.edit_pickle,) * 4, "__0_0.distcp": ()}),
    "torch": Reader(_make_torch, _read_torch, {"x.pt": m.ARCHIVE}),
    "ranks": Reader(
        _make_ranks,
        _read_ranks,
        {_RANK.format(0, 2): m.ARCHIVE, _RANK.format(1, 2): m.ARCHIVE},
    ),
    "torch-xla": Reader(
        _make_xla,
        _read_ranks,
        {_RANK.format(0, 2): m.ARCHIVE, _RANK.format(1, 2): m.ARCHIVE},
    ),
    "own-rank": Reader(_make_own_rank, _read_own_rank, {_RANK.format(0, 1): m.ARCHIVE}),
}
