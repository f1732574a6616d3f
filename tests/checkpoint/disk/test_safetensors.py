"""Safetensors files: the library reads what is written here, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise.base.boxes import full_box
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import safetensors
from shardwise.checkpoint.disk.entries import TensorInfo, dtype_name
from shardwise.checkpoint.disk.safetensors import (
    PT_METADATA,
    PieceData,
    lay_out,
    read_header,
    write_safetensors,
    write_shard,
)
from tests.checkpoint.tilings import QUICK

_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


@st.composite
def _tensors(draw: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name in draw(st.lists(st.text("ab.é/ ", min_size=1), unique=True, max_size=5)):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        values = torch.arange(math.prod(shape)).view(shape)
        found[name] = values.to(draw(st.sampled_from(_DTYPES)))
    return found


def _info(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))


def _data(name: str, tensor: torch.Tensor, load: Callable[[], torch.Tensor]) -> PieceData:
    return PieceData(name, _info(tensor), full_box(tuple(tensor.shape)), load)


def _bytes(tensor: torch.Tensor) -> bytes:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return copy.view(-1).view(torch.uint8).numpy().tobytes()


@QUICK
@given(tensors=_tensors())
def test_the_library_reads_what_is_written(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    file = tmp_path / "x.safetensors"
    file.unlink(missing_ok=True)
    infos = {name: _info(tensor) for name, tensor in tensors.items()}
    offsets = write_safetensors(file, infos, lambda name: iter([memoryview(_bytes(tensors[name]))]))
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert {name: place.start for name, place in read_header(file).items()} == offsets
    for name, tensor in tensors.items():
        assert offsets[name] % tensor.itemsize == 0, "elements are aligned"


@QUICK
@given(tensors=_tensors())
def test_what_the_library_writes_is_found(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, {"format": "pt"})
    places, data = read_header(file), file.read_bytes()
    assert places.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert places[name].info == _info(tensor)
        assert data[places[name].start :][: tensor.nbytes] == _bytes(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).view(4, 6),
        lambda: torch.arange(24.0).view(4, 6).T,
        lambda: torch.arange(48.0).view(4, 12)[:, ::2],
        lambda: torch.arange(24.0).view(4, 6).requires_grad_(),
        lambda: torch.randn(3, 3, dtype=torch.complex64).conj(),
        lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0, 5),
        lambda: torch.arange(2.0).expand(3, 2),
        lambda: torch.arange(4.0)[::2][1:],
    ],
    ids=[
        "plain",
        "transposed",
        "strided",
        "leaf",
        "conj",
        "neg",
        "scalar",
        "empty",
        "expanded",
        "single",
    ],
)
def test_a_shard_is_written_from_any_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setattr(safetensors, "_COPY", 16)  # several copies for each tensor
    tensor = make()
    [written] = write_shard(tmp_path / "x", [_data("w", tensor, lambda: tensor)], block=32)
    plain = tensor.detach().resolve_conj().resolve_neg()
    assert torch.equal(load_file(tmp_path / "x")["w"], plain)
    stored = _bytes(plain)
    blocks = [stored[at : at + 32] for at in range(0, len(stored), 32)]
    assert written.checksums == tuple(xxhash.xxh3_64(block).hexdigest() for block in blocks)
    assert (tmp_path / "x").read_bytes()[written.offset :] == stored


def test_a_shard_is_loaded_when_its_turn_comes(tmp_path: Path) -> None:
    """Large elements first; never two tensors at a time."""
    asked: list[str] = []

    def load(key: str, tensor: torch.Tensor) -> torch.Tensor:
        asked.append(key)
        return tensor

    tensors = {"b": torch.ones(3, dtype=torch.uint8), "d": torch.ones(2, dtype=torch.float64)}
    data = [_data(k, t, lambda k=k, t=t: load(k, t)) for k, t in tensors.items()]
    b, d = write_shard(tmp_path / "x", data)
    assert asked == ["d", "b"]
    assert d.offset < b.offset
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() is None


@pytest.mark.parametrize("count", [1, 3])
def test_a_tensor_of_another_size_than_announced_is_named(tmp_path: Path, count: int) -> None:
    data = _data("w", torch.ones(2), lambda: torch.ones(count))
    with pytest.raises(ValueError, match=rf"w: wrote {4 * count} bytes, expected 8"):
        write_shard(tmp_path / "x", [data])


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a thesis")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "x", [])
    assert (tmp_path / "x").read_text() == "a thesis"


def test_a_header_is_as_long_as_it_says_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = {f"layers.{i}.weight": TensorInfo("BF16", (i, 3)) for i in range(20)}
    header, _ = lay_out(infos, PT_METADATA)
    assert int.from_bytes(header[:8], "little") + 8 == len(header)
    assert len(header) % 64 == 0
    monkeypatch.setattr(safetensors, "MAX_HEADER", 200)
    with pytest.raises(CheckpointError, match=r"found 20 tensors, more than fit .*max-shard-size"):
        lay_out(infos, {})
