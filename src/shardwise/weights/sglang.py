"""SGLang and published weights: a version is sent to a server or an engine by SGLang's own calls.

Source: ``entrypoints/`` and ``managers/io_struct.py`` in ``python/sglang/srt`` of SGLang 0.5.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import urllib.error
import urllib.request
from typing import Any

import torch

from shardwise.base.arguments import check_seconds
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.place import folder_of
from shardwise.weights.folder import newest_in_folder
from shardwise.weights.subscribe import Subscription

_Named = list[tuple[str, torch.Tensor]]


class SGLangServer:
    """A running server of SGLang, with two calls of its ``Engine``.

    Args:
        url: where it listens, such as ``"http://localhost:30000"``.
        tp_size: its number of tensor parallel ranks, each of which gets all tensors.
        api_key: its key, if it has one.
        timeout: longest time that it may take to answer, in seconds.
    """

    def __init__(
        self, url: str, *, tp_size: int = 1, api_key: str = "", timeout: float = 600.0
    ) -> None:
        self._url = url.rstrip("/")
        self._tp_size = tp_size
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        check_seconds("timeout", timeout)
        self._timeout = timeout

    def update_weights_from_disk(self, model_path: str) -> tuple[bool, str]:
        """Have it load a folder of ``save_pretrained``, which it sees under the same path."""
        return self._post("update_weights_from_disk", {"model_path": model_path})

    def update_weights_from_tensor(
        self, named_tensors: _Named, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Send it tensors, inside the request. They are on the CPU."""
        text = base64.b64encode(pickle.dumps(named_tensors)).decode()
        fields = {"serialized_named_tensors": [text] * self._tp_size, "flush_cache": flush_cache}
        return self._post("update_weights_from_tensor", fields)

    def _post(self, call: str, fields: dict[str, Any]) -> tuple[bool, str]:
        url, data = f"{self._url}/{call}", json.dumps(fields).encode()
        request = urllib.request.Request(url, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                found = json.load(answer)
            return found["success"], found["message"]
        except urllib.error.HTTPError as error:
            return False, f"{url}: {error.code}: {error.read(4096).decode(errors='replace')}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return False, f"{url}: {error!r}"


def send_tensors(weights: Subscription, engine: Any, *, most: int = 1 << 30) -> int:
    """Send the newest version of published weights as tensors. Pause generation meanwhile.

    Args:
        weights: the weights.
        engine: an ``Engine`` of SGLang in this process, or an :class:`SGLangServer`.
        most: bytes that are sent at a time; a larger tensor is sent alone.

    Returns:
        The number of the version.

    Raises:
        CheckpointError: the engine has refused them; it may have taken some.
    """
    part: _Named = []
    for name, tensor in weights:
        if part and sum(each.nbytes for _, each in part) + tensor.nbytes > most:
            _check(engine.update_weights_from_tensor(part, flush_cache=False))
            part = []
        part.append((name, tensor))
    _check(engine.update_weights_from_tensor(part, flush_cache=True))
    return weights.version


def send_folder(name: str, engine: Any, *, at: str | os.PathLike[str]) -> int:
    """Have the newest version that is in a folder read from there.

    Args:
        name: what the weights are published as.
        engine: an ``Engine`` of SGLang in this process, or an :class:`SGLangServer`.
        at: the folder that they are published to, which the engine sees under the same path.

    Returns:
        The number of the version.

    Raises:
        CheckpointError: there is none, it is of an earlier release, or the engine has refused it.
    """
    number, folder = newest_in_folder(name, folder_of("at", at))
    _check(engine.update_weights_from_disk(model_path=str(folder)))
    return number


def _check(result: Any) -> None:
    success, message, *_ = result
    if not success:
        raise CheckpointError(f"SGLang: {message}")
