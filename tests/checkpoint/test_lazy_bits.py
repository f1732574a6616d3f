"""Tensors whose memory has other elements than they: conjugated or negated when they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardwise import checkpoint, publish, subscribe
from shardwise.checkpoint import CheckpointError
from tests.cli.shell import call


class _Held(nn.Module):
    def __init__(self, turned: Tensor, negative: Tensor) -> None:
        super().__init__()
        self.register_buffer("turned", turned)
        self.register_buffer("negative", negative)


_TURNED, _NEGATIVE = [1 - 2j, 3 + 4j], [-2.0, 4.0]


def _lazy() -> _Held:
    """Buffers with the bits of torch."""
    turned, other = (torch.tensor([1 + 2j, 3 - 4j]).conj() for _ in range(2))
    model = _Held(turned, other.imag)
    assert model.turned.is_conj()
    assert model.negative.is_neg()
    return model


def _is_right(model: nn.Module) -> bool:
    return (model.turned.tolist(), model.negative.tolist()) == (_TURNED, _NEGATIVE)


def _saves_dcp(model: nn.Module, path: Path) -> None:
    with pytest.warns(UserWarning, match="save in a single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)


_FORMATS: dict[str, Callable[[nn.Module, Path], object]] = {
    "a.pt": lambda model, path: torch.save(model.state_dict(), path),
    "dcp": _saves_dcp,
    "ours": lambda model, path: checkpoint.save(path, model),
    "hf": lambda model, path: checkpoint.save_hf(path, model),
}


@pytest.mark.parametrize("name", _FORMATS)
def test_every_format_is_read_as_it_was_meant(tmp_path: Path, name: str) -> None:
    _FORMATS[name](_lazy(), tmp_path / name)
    plain = _Held(torch.zeros(2, dtype=torch.complex64), torch.zeros(2))
    checkpoint.load_weights(tmp_path / name, plain)
    assert _is_right(plain)
    other = torch.zeros(2, dtype=torch.complex64).conj()
    into = _Held(other, torch.zeros(2, dtype=torch.complex64).conj().imag)
    checkpoint.load_weights(tmp_path / name, into)  # into such buffers
    assert _is_right(into)
    for to in ("shardwise", "dcp", "hf"):
        if f"{name}-{to}" in ("ours-shardwise", "hf-hf"):
            continue
        made = tmp_path / f"as-{to}"
        assert call("checkpoint", "convert", str(tmp_path / name), str(made), "--to", to) == 0
        plain = _Held(torch.zeros(2, dtype=torch.complex64), torch.zeros(2))
        checkpoint.load_weights(made, plain)
        assert _is_right(plain), to


def test_a_checkpoint_loads_into_the_model_that_saved_it(tmp_path: Path) -> None:
    model = _lazy()
    checkpoint.save(tmp_path / "a", model)
    model.turned.zero_()
    checkpoint.load(tmp_path / "a", model)
    assert _is_right(model)


def test_files_of_ranks_and_published_weights_have_them_too(tmp_path: Path) -> None:
    model = _lazy()
    checkpoint.save_rank_checkpoint(f"{tmp_path}/each", model)
    full, _ = checkpoint.consolidate_sharded_model_checkpoints(f"{tmp_path}/each")
    assert (full["turned"].tolist(), full["negative"].tolist()) == (_TURNED, _NEGATIVE)
    for at in (tmp_path, None):
        weights = publish(model, f"bits-{tmp_path.name}", to=at)
        found = dict(subscribe(f"bits-{tmp_path.name}", at=at))
        assert (found["turned"].tolist(), found["negative"].tolist()) == (_TURNED, _NEGATIVE)
        weights.close()


@pytest.mark.parametrize("metadata", [{"conj": True}, {"neg": True, "other": 1}, [1]])
def test_metadata_that_torch_does_not_write_is_refused(tmp_path: Path, metadata: object) -> None:
    class Forged:
        def __reduce__(self) -> tuple[object, ...]:
            args = (storage, 0, (2,), (1,), False, {}, metadata)
            return torch._utils._rebuild_tensor_v2, args

    storage = torch.tensor([1.0, 2.0])._typed_storage()
    torch.save({"a": Forged()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"is not a file of torch.save that can be read"):
        checkpoint.load_weights(tmp_path / "a.pt", nn.Linear(2, 2))
