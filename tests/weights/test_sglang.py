"""SGLang gets published weights by its own calls; what stands for it is written from its source.

Its servers take JSON: ``UpdateWeightFromDiskReqInput`` and ``UpdateWeightsFromTensorReqInput``.
Each text of ``serialized_named_tensors``, one for each tensor parallel rank, is a pickle of names
and tensors in base64, from which the unpickler takes no globals but those of a few modules.
"""

from __future__ import annotations

import base64
import http.server
import io
import json
import pickle
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardwise
from shardwise.base.errors import CheckpointError
from shardwise.weights.sglang import SGLangServer, send_folder, send_tensors

transformers = pytest.importorskip("transformers")

_DISK = {"model_path", "load_format", "abort_all_requests", "weight_version", "flush_cache"}
_TENSOR = {"serialized_named_tensors", "load_format", "flush_cache", "abort_all_requests"}
_TOKENS = torch.tensor([[1, 2, 3, 5]])


def _model(seed: int) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(_TOKENS).logits
    return logits


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = ("builtins.", "collections.", "torch.", "multiprocessing.re")
        if not f"{module}.".startswith(allowed) or name in ("eval", "exec"):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class _Engine:
    """An ``Engine`` of two tensor parallel ranks, which loads what it gets into a model."""

    tp_size = 2

    def __init__(self) -> None:
        self.model = _model(99)
        self.flushed: list[bool] = []

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        known = self.model.state_dict()
        for name, tensor in named:
            known[name].copy_(tensor)

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None
    ) -> tuple[bool, str, int]:
        files = sorted(Path(model_path).glob("*.safetensors"))
        if not files:
            return False, f"Failed to get weights iterator: {model_path}.", 0
        for file in files:
            self.load(list(load_file(file).items()))
        self.flushed.append(True)
        return True, "Succeeded to update model weights.", 0

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        for _ in range(self.tp_size):
            into = io.BytesIO()
            ForkingPickler(into).dump(named_tensors)
            into.seek(0)
            self.load(_Unpickler(into).load())
        self.flushed.append(flush_cache)
        return True, "Success"


class _Server(http.server.HTTPServer):
    engine: _Engine
    key = "secret"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._answer(401, {"error": "Unauthorized"})
            return
        engine = self.server.engine
        if self.path == "/update_weights_from_disk":
            assert "model_path" in fields and fields.keys() <= _DISK
            success, message, paused = engine.update_weights_from_disk(fields["model_path"])
            content = {"success": success, "message": message, "num_paused_requests": paused}
        else:
            assert self.path == "/update_weights_from_tensor"
            assert "serialized_named_tensors" in fields and fields.keys() <= _TENSOR
            texts = fields["serialized_named_tensors"]
            success, message = len(texts) == engine.tp_size, f"found {len(texts)} payloads"
            for text in texts:
                data = base64.b64decode(text, validate=True)
                engine.load(_Unpickler(io.BytesIO(data)).load())
            engine.flushed.append(fields.get("flush_cache", True))
            content = {"success": success, "message": message}
        self._answer(200 if success else 400, content)

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    """A server that answers on this host."""
    found = _Server(("127.0.0.1", 0), _Handler)
    found.engine = _Engine()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def _client(server: _Server, **options: Any) -> SGLangServer:
    options = {"tp_size": 2, "api_key": server.key} | options
    return SGLangServer(f"http://127.0.0.1:{server.server_port}/", **options)


@pytest.mark.parametrize("kind", ["engine", "server"])
@pytest.mark.parametrize("to", [None, "folder"])
def test_it_computes_with_every_version_that_is_sent_as_tensors(
    server: _Server, kind: str, to: str | None, tmp_path: Path
) -> None:
    engine = server.engine if kind == "engine" else _client(server)
    place = None if to is None else str(tmp_path / to)
    trained = _model(1)
    with shardwise.publish(trained, "policy", to=place) as weights:
        subscription = shardwise.subscribe("policy", at=place)
        for version in range(1, 4):
            assert send_tensors(subscription, engine, most=2000) == version
            assert torch.equal(_logits(server.engine.model), _logits(trained))
            with torch.no_grad():
                trained.model.norm.weight.mul_(1.5)
            weights.update()
    # Many parts for each version, and the cache is flushed after the last one.
    assert len(server.engine.flushed) > 3 * 2
    assert server.engine.flushed.count(True) == 3
    assert server.engine.flushed[-1]


@pytest.mark.parametrize("kind", ["engine", "server"])
def test_it_reads_the_newest_version_of_a_folder(
    server: _Server, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.engine if kind == "engine" else _client(server)
    trained = _model(1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="policy: found no version"):
        send_folder("policy", engine, at="folder")
    with shardwise.publish(trained, "policy", to="folder") as weights:
        with torch.no_grad():
            trained.model.norm.weight.mul_(1.5)
        weights.update()
        assert send_folder("policy", engine, at="folder") == 2
        assert torch.equal(_logits(server.engine.model), _logits(trained))


def test_what_it_refuses_is_an_error_with_its_message(server: _Server, tmp_path: Path) -> None:
    with shardwise.publish(_model(1), "policy", to=tmp_path):
        subscription = shardwise.subscribe("policy", at=tmp_path)
        with pytest.raises(CheckpointError, match=r"SGLang: .*: 400: .*found 1 payloads"):
            send_tensors(subscription, _client(server, tp_size=1))
        with pytest.raises(CheckpointError, match=r"SGLang: .*: 401: .*Unauthorized"):
            send_folder("policy", _client(server, api_key=""), at=tmp_path)
        (tmp_path / "policy/version-00000001/model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"SGLang: .*: 400: .*weights iterator"):
            send_folder("policy", _client(server), at=tmp_path)


def test_a_server_that_is_not_there_is_named() -> None:
    with (
        shardwise.publish(_model(1), "policy"),
        pytest.raises(CheckpointError, match=r"127\.0\.0\.1:9/update.*refused"),
    ):
        send_tensors(shardwise.subscribe("policy"), SGLangServer("http://127.0.0.1:9"))
