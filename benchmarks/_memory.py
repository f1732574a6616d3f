"""How to see the memory that a rank takes, and the formula of how much it should.

- **RSS** is what the kernel counts, and it keeps the peak itself (``VmHWM``), so that no sample is
  missed. It includes pages that an allocator keeps after a free, hence :data:`PROMPT_MALLOC`.
- **PSS** is sampled from outside; a page that k processes share counts 1/k in each.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

PROMPT_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
}
"""Environment under which glibc gives freed memory back at once, so that RSS tells what is live."""

_SAMPLES_PER_WALK = 10

STATES = 2  # AdamW keeps two tensors for each parameter
STORED = 4  # bytes of an element of parameters, gradients and states at rest: fp32


def formula(
    groups: Sequence[Sequence[torch.Size]],
    ranks: int,
    zero: int,
    compute_dtype: torch.dtype,
    activations: int,
) -> dict[str, int]:
    """Predict what a rank should hold at its peak: shards, two groups unsharded, activations.

    Args:
        groups: the shapes of the parameters of each group, in the order of forward.
        ranks: over which ``Shard(0)`` deals the rows, the first rank getting no fewer than others.
        zero: 3 frees parameters after forward, 2 keeps them until backward.
        compute_dtype: of full parameters and their gradients.
        activations: the most that forward and backward hold beside parameters and their
            gradients, rehearsed with the unsharded model.

    Returns:
        The bytes of shards of parameters, gradients and optimizer state; of full parameters of the
        largest two consecutive groups (one computes while its neighbor is gathered), or of all
        groups where they are kept; of full gradients of two such groups (one is computed while its
        neighbor's are reduced); and of activations.
    """
    shard = sum(
        math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for group in groups for shape in group
    )
    full = [sum(shape.numel() for shape in group) * compute_dtype.itemsize for group in groups]
    two = max((a + b for a, b in pairwise(full)), default=sum(full))
    return {
        "shards": shard * STORED * (2 + STATES),
        "unsharded": two if zero == 3 else sum(full),
        "gradients": two,
        "activations": activations,
    }


def malloc_promptly() -> None:
    """Have glibc do in this process, from now on, what :data:`PROMPT_MALLOC` does from the start.

    Not for threads: those that have a heap of their own keep it.
    """
    threshold, trim = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    with suppress(OSError, AttributeError):  # glibc only
        libc = ctypes.CDLL(None)
        libc.mallopt(threshold, int(PROMPT_MALLOC["MALLOC_MMAP_THRESHOLD_"]))
        libc.mallopt(trim, int(PROMPT_MALLOC["MALLOC_TRIM_THRESHOLD_"]))


def give_back() -> None:
    """Free what is free."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of this rank's states."""
    return sum(_nbytes(value) for state in optimizer.state.values() for value in state.values())


def _nbytes(value: Any) -> int:
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if hasattr(local, "codes"):  # torchao's
        return int(local.codes.nbytes + local.scale.nbytes + local.qmap.nbytes)
    return local.nbytes if isinstance(local, torch.Tensor) else 0


def reset_peak_rss() -> None:
    """Let the kernel's record of this process's highest RSS start anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Return the highest RSS of this process since the reset, in bytes."""
    return _kib(Path("/proc/self/status").read_text(), "VmHWM") * 1024


def rss() -> int:
    """Return the RSS of this process now, in bytes."""
    return _kib(Path("/proc/self/status").read_text(), "VmRSS") * 1024


def pss(pid: int | str = "self") -> int:
    """Return a process's share of memory in bytes, libraries and other mapped files left out."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return (_kib(rollup, "Pss_Anon") + _kib(rollup, "Pss_Shmem")) * 1024


def pss_shared(pid: int | str = "self") -> int:
    """Return the part of :func:`pss` that other processes may share, in bytes."""
    return _kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss_Shmem") * 1024


def _kib(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"no {name} in {text!r}")


def _beside_anonymous(pid: int) -> int:
    """Return the PSS of a process in bytes, less its anonymous pages."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    signs = (("Pss_Anon", 1), ("Pss_Shmem", 1), ("Anonymous", -1))
    return sum(sign * _kib(rollup, name) * 1024 for name, sign in signs)


class PssSampler:
    """Keeps the highest PSS of some processes while the context is open.

    The kernel walks through all pages to tell a PSS, milliseconds for each gigabyte, in which a
    short peak is missed. How many anonymous pages a process has is a counter. So most samples read
    that, and take everything else from the last walk. Before they count as a new peak, there is
    another walk: shared pages that have gone since the last one do not add to anonymous ones.
    """

    def __init__(self, pids: Sequence[int], every: float = 0.002) -> None:
        self._every = every
        self._stop = threading.Event()
        self._peaks = dict.fromkeys(pids, 0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def peaks(self) -> list[int]:
        """The highest PSS of each process, in bytes."""
        return list(self._peaks.values())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        beside = dict.fromkeys(self._peaks, 0)  # PSS less anonymous pages
        for at in itertools.count():  # once at least, however short the context is
            for pid in self._peaks:
                with suppress(OSError):  # the process has ended
                    if at % _SAMPLES_PER_WALK == 0:
                        beside[pid] = _beside_anonymous(pid)
                    anonymous = _kib(Path(f"/proc/{pid}/status").read_text(), "RssAnon") * 1024
                    if beside[pid] + anonymous > self._peaks[pid]:
                        beside[pid] = _beside_anonymous(pid)
                        self._peaks[pid] = max(self._peaks[pid], beside[pid] + anonymous)
            if self._stop.wait(self._every):
                return
