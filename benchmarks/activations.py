"""How much memory activations take: kept, recomputed, and recomputed from inputs on a disk.

    python benchmarks/activations.py --folder /scratch

A transformer of 12 layers trains on one sequence of 8,192 tokens in float32, on one process. The
loss is a mean, without logits. Attention and MLP are checkpointed apart, so that inputs, and not
what one block computes again, are most of the peak. *floor* is the same model with one layer that
is recomputed: what no place for inputs can save.

Each measurement is a process of its own; the ways take turns. What counts is the highest resident
memory (RSS) of a step, as the kernel saw it, less what the process held before it. The exit code is
1 if losses or gradients differ in a bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from _memory import PROMPT_MALLOC, give_back, peak_rss, reset_peak_rss, rss
from shardwise import DiskOffloadPolicy, checkpoint_module, offload_activations

WAYS = ("kept", "recomputed", "on a disk", "floor")
HEADS = 4


class Attention(nn.Module):
    """Causal attention beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Two layers beside their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Take two steps in this process; return the figures of the second."""
    torch.manual_seed(0)
    layers = 1 if way == "floor" else options.layers
    parts = [kind(options.width) for _ in range(layers) for kind in (Attention, Mlp)]
    model = nn.Sequential(*parts)
    for part in parts:
        if way != "kept":
            checkpoint_module(part)
        if way == "on a disk":
            offload_activations(part, DiskOffloadPolicy(options.folder))
    for _ in range(2):
        model.zero_grad()
        x = torch.randn(1, options.tokens, options.width).requires_grad_()
        give_back()
        before, began = rss(), time.perf_counter()
        reset_peak_rss()
        loss = model(x * 1).square().mean()
        loss.backward()
        found = {"peak": peak_rss() - before, "seconds": time.perf_counter() - began}
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for p in model.parameters():
        assert p.grad is not None
        digest.update(p.grad.numpy().tobytes())
    return {**found, "bits": digest.hexdigest()}


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--folder", default=tempfile.gettempdir(), help="of a local disk")
    for name, usual in (("layers", 12), ("width", 256), ("tokens", 8192), ("rounds", 3)):
        made.add_argument(f"--{name}", type=int, default=usual)
    made.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options)))
        return 0
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for way in WAYS * options.rounds:
        command = [sys.executable, *sys.argv, "--way", way]
        done = subprocess.run(command, env={**os.environ, **PROMPT_MALLOC}, stdout=subprocess.PIPE)
        found[way].append(json.loads(done.stdout))
    usual = statistics.median(each["peak"] for each in found["recomputed"])
    print("way          peak MiB  x recomputed  seconds")
    for way, each in found.items():
        peak = statistics.median(one["peak"] for one in each)
        seconds = statistics.median(one["seconds"] for one in each)
        print(f"{way:<12} {peak / 2**20:>8.0f}  {peak / usual:>12.2f}  {seconds:>7.1f}")
    bits = {one["bits"] for way in WAYS[:3] for one in found[way]}
    print("losses and gradients:", "the same bits" if len(bits) == 1 else "DIFFERENT")
    return int(len(bits) > 1)


if __name__ == "__main__":
    sys.exit(main())
