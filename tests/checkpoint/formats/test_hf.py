"""Weights in the layout of Hugging Face: out of sharded models, into them, and from strangers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise import checkpoint
from shardwise.base.boxes import Box
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.formats.hf import INDEX, SINGLE, HfSource, plan_files
from shardwise.checkpoint.formats.source import LEAST_BUFFER, ReadWindow
from shardwise.checkpoint.ranks.hf import save_hf
from shardwise.checkpoint.ranks.loading import load_weights
from shardwise.checkpoint.tools.convert import convert
from tests.checkpoint.meshes import Setup, build, expected, fill, wrong
from tests.corpus.gathering import in_full
from tests.corpus.models import make_model
from tests.worlds import Ranks

LLAMA = "llama-tied"


# ---- out of a sharded model ----


def _save(rank: int, world_size: int, setups: dict[str, Setup], folder: Path) -> None:
    for name, setup in setups.items():
        model, optimizer = build(setup, seed=0)
        fill(model, optimizer)
        model.generation_config.eos_token_id = 5
        save_hf(folder / name, model, max_shard_size=3000, buffer=LEAST_BUFFER)
        checkpoint.save(folder / f"{name}-ours", model, optimizer)


def test_transformers_loads_what_a_sharded_model_saved(threads: Ranks, tmp_path: Path) -> None:
    setups = {
        "rows": Setup(LLAMA, (4,)),
        "columns": Setup(LLAMA, (4,), last_dim=True),
        "hybrid": Setup(LLAMA, (2, 2)),
        "replicated": Setup(LLAMA, (4, 1)),
    }

    threads(_save, 4, setups, tmp_path)

    for name in setups:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["architectures"] == [type(make_model(LLAMA)).__name__]
        assert config["dtype"] == "float32"
        assert loaded.generation_config.eos_token_id == 5, "not the default of a Llama, 2"
        assert not wrong(loaded, torch.optim.SGD(loaded.parameters())), name
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        index = json.loads((tmp_path / name / INDEX).read_text())
        assert "lm_head.weight" not in index["weight_map"], "a tied parameter is saved once"
        assert len(set(index["weight_map"].values())) > 2
        sizes = [tensor.nbytes for tensor in loaded.parameters()]
        assert index["metadata"]["total_size"] == sum(sizes)

        # The same of a whole checkpoint, which says what model it is, and what is tied.
        converted = tmp_path / f"{name}-converted"
        convert(tmp_path / f"{name}-ours", converted, Format.HF)
        assert "lm_head.weight" not in load_file(converted / SINGLE)
        again, told = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
        assert not any(told.values()), told
        assert not wrong(again, torch.optim.SGD(again.parameters())), name
        assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_file_is_filled_before_the_next_is_begun() -> None:
    infos = {
        name: TensorInfo("F32", (size,)) for name, size in zip("abcd", (1, 2, 9, 1), strict=True)
    }

    assert [list(tensors) for tensors in plan_files(infos, 12).values()] == [
        ["a", "b"],
        ["c"],
        ["d"],
    ]
    assert list(plan_files(infos, 1000)) == ["model.safetensors"]


def _save_twice(rank: int, world_size: int, folder: Path) -> None:
    model, _ = build(Setup("mlp", (world_size,)), seed=0)
    save_hf(folder, model)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"rank 0: .*exists"):
        save_hf(folder, model)
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(CheckpointError, match=r"rank 0: .*no folder"):
        save_hf(folder / "no" / "such", model)


def test_a_folder_that_is_there_is_left_alone_and_every_rank_is_told(
    threads: Ranks, tmp_path: Path
) -> None:
    threads(_save_twice, 2, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---- into a sharded model ----


def _load(rank: int, world_size: int, setups: list[Setup], folder: Path) -> list[list[str]]:
    damage = []
    for setup in setups:
        model, optimizer = build(setup, seed=7)
        load_weights(folder, model, buffer=LEAST_BUFFER)
        damage.append(wrong(model, optimizer))
    return damage


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_transformers_saved_loads_straight_into_shards(
    threads: Ranks, tmp_path: Path, world_size: int
) -> None:
    model = make_model(LLAMA)
    assert isinstance(model, PreTrainedModel)
    fill(model, torch.optim.SGD(model.parameters()))
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    assert (tmp_path / INDEX).exists()
    setups = [
        Setup(LLAMA, (world_size,)),
        Setup(LLAMA, (world_size,), last_dim=True),
        Setup(LLAMA, (world_size, 1)),
        Setup(LLAMA, None),
    ]

    for damage in threads(_load, world_size, setups, tmp_path):
        assert damage == [[]] * len(setups)


def _wrong_within(model: nn.Module, tolerance: float) -> list[str]:
    """Names of parameters that are further than ``tolerance`` from what the name asks for."""
    return [
        name
        for name, param in model.named_parameters()
        if (in_full(param) - expected(name, param)).abs().max() > tolerance
    ]


def _load_others(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = build(Setup("mlp", (world_size,)), seed=7)
    load_weights(folder / "half.safetensors", model)
    for param in model.parameters():
        assert param.dtype == torch.float32
    assert not _wrong_within(model, 1e-2)
    fill(model, optimizer)
    for name, message in {
        "less": r"of another model: layers.2.bias is not in the checkpoint",
        "more": r"of another model: extra is not in the model",
        "shape": r"layers.0.weight: found shape \[5, 6\], expected \[5, 7\]",
    }.items():
        with pytest.raises(CheckpointError, match=f"rank 0: .*{name}.safetensors.*{message}"):
            load_weights(folder / f"{name}.safetensors", model)
    load_weights(folder / "less.safetensors", model, strict=False)
    load_weights(folder / "more.safetensors", model, strict=False)
    assert not wrong(model, optimizer)
    with torch.device("meta"):
        meta = make_model("mlp")
    load_weights(folder / "half.safetensors", meta)  # it gets memory
    assert not _wrong_within(meta, 1e-2)


def test_weights_are_converted_and_those_of_another_model_refused(
    threads: Ranks, tmp_path: Path
) -> None:
    model = make_model("mlp")
    fill(model, torch.optim.SGD(model.parameters()))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    save_file({k: v.to(torch.bfloat16) for k, v in state.items()}, tmp_path / "half.safetensors")
    save_file(
        {k: v for k, v in state.items() if k != "layers.2.bias"}, tmp_path / "less.safetensors"
    )
    save_file({**state, "extra": torch.ones(1)}, tmp_path / "more.safetensors")
    shape = {**state, "layers.0.weight": torch.ones(5, 6)}
    save_file(shape, tmp_path / "shape.safetensors")

    threads(_load_others, 2, tmp_path)


def test_links_are_followed_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.arange(6.0)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")

    with HfSource(tmp_path / "snapshot") as source:
        into = torch.empty(2)
        source.read(("model", "a"), Box((3,), (2,)), into)

    assert into.tolist() == [3.0, 4.0]


# ---- from strangers ----


def _file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def _entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (_entry(), bytes(4), None, "as its header says"),
        (_entry(), bytes(12), None, "as its header says"),
        (_entry(shape=[2**40, 2**40]), bytes(8), None, "bytes of shape"),
        (_entry(shape=[2**60], data_offsets=[0, 2**62]), bytes(8), None, "as its header says"),
        (_entry(shape=[-1]), bytes(8), None, "expected an integer from 0"),
        (_entry(shape=[2.0]), bytes(8), None, "expected an integer"),
        (_entry(shape=[1] * 100), bytes(8), None, "at most 64"),
        (_entry(dtype="F4"), bytes(8), None, "'dtype'.*found 'F4'"),
        (_entry(data_offsets=[8, 0]), bytes(8), None, "8 bytes apart"),
        (_entry(data_offsets=[4, 12]), bytes(12), None, "first byte: found '?4'?, expected '?0'?"),
        (_entry(data_offsets=[0]), bytes(8), None, "8 bytes apart"),
        ({"a\u001b[2J": _entry()["a"]}, bytes(8), None, "printable"),
        ({**_entry(), "b": _entry()["a"]}, bytes(16), None, "first byte"),
        (b'{"a": 1, "a": 2}', b"", None, "twice"),
        (b"[" * 100_000, b"", None, "nested too deeply|no JSON"),
        (b"[]", b"", None, "an object"),
        (b"\xff\xfe", b"", None, "not valid JSON"),
        (b"{}", b"", 2**63, "header, length"),
        (b"{}", b"", 3, "header, length"),
    ],
)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    _file(path, header, data, length)

    with pytest.raises(CheckpointError, match=message) as raised:
        HfSource(path)

    assert "model.safetensors" in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "beside the index"),
        ({"weight_map": {"a": "/etc/passwd"}}, "beside the index"),
        ({"weight_map": {"a": "sub/model.safetensors"}}, "beside the index"),
        ({"weight_map": {"a": ".safetensors"}}, "beside the index"),
        ({"weight_map": {"a": "model.bin"}}, "beside the index"),
        ({"weight_map": {"a": 3}}, "beside the index"),
        ({"weight_map": {"a": "x\u0000.safetensors"}}, "beside the index"),
        ({"weight_map": {"a": "missing.safetensors"}}, "cannot be opened"),
        ({"weight_map": {"b": "one.safetensors"}}, "says that 'b' is in one.safetensors"),
        ({"weight_map": {}}, "found 'nothing'"),
        ({"weight_map": []}, "an object"),
        ({}, "has no 'weight_map'"),
        ([], "an object"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match=message):
        HfSource(folder)


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    with HfSource(path) as source:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match=r"model.safetensors: ends at byte"):
            list(ReadWindow().parts(source, ("model", "a")))


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")

    with pytest.raises(CheckpointError, match=f"2 safetensors files and no {INDEX}"):
        HfSource(tmp_path)
