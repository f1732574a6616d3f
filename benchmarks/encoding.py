"""How fast values are encoded for wires, and decoded, beside a copy in memory.

    python benchmarks/encoding.py

One thread encodes and decodes 16 MB of fp32 in turn with a copy of them, and the best pass of each
counts, in processor time: that of other programs does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from shardwise.transport.codecs import Noise, Room, codec_of, decode, encode
from shardwise.transport.wire import WireFormat

NUMEL = 4_000_000
ROUNDS = 25


def main() -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    values, out, error = torch.randn(NUMEL), torch.empty(NUMEL), torch.zeros(NUMEL)
    room = Room(device)
    passes: dict[str, Callable[[], object]] = {"copy": partial(out.copy_, values)}
    for name in ("bf16", "fp8", "int8"):
        codec = codec_of(WireFormat(name))
        raw = torch.empty(codec.nbytes(NUMEL), dtype=torch.uint8)
        piece = codec.piece(raw, NUMEL)
        start = partial(encode, codec, values, piece, room)
        passes[f"{name}, encode"] = start
        passes[f"{name}, encode with error feedback"] = partial(start, error=error)
        if name == "int8":
            noise = Noise(0, device)
            passes[f"{name}, encode at random"] = partial(start, noise=noise, place=(1,))
        passes[f"{name}, decode"] = partial(decode, codec, piece, out, room)
    best = dict.fromkeys(passes, float("inf"))
    for _ in range(ROUNDS):
        for name, run in passes.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
    for name, seconds in best.items():
        print(f"{name:34}{4 * NUMEL / seconds / 1e9:6.2f} GB of fp32 per second")


if __name__ == "__main__":
    main()
