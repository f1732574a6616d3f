"""Memory and time to load a published model into shards: ours, and how others do it.

    python benchmarks/loading.py --params 150m --ranks 2,4

A Llama is saved as Hugging Face saves it. Each contender loads it on all ranks and shards it:

    ours         shardwise.from_pretrained
    full         from_pretrained of transformers on every rank, then torch's fully_shard
    efficient    Accelerate's efficient loading: rank 0 loads, and broadcasts weight after weight
    floor        one process reads the files by the safetensors library, and shards nothing

The memory of a rank is the highest proportional set size (PSS) while it loads, less that of before,
when everything was imported and a small model had been loaded. Pages of mapped files count, each
divided by the processes that map it. The files are in the page cache. The exit code is 1 if ours
takes more than 1.10 times its shards and 32 MiB.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise
from _loading_tables import CONTENDERS, loading_tables, too_high
from _memory import PROMPT_MALLOC, PssSampler, give_back, pss
from _models import PRESETS, build
from _options import one_of, positive_int, positive_ints
from _report import announce, publish_each
from _worlds import World, stop_server

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EFFICIENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_VERSION": "2",
}
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class LoadingWorker:
    """One rank of a contender. It has loaded a small model, so that everything is imported."""

    def __init__(self, name: str, small: Path, shards: str | None) -> None:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._name = name
        self._dtype = None if shards is None else DTYPES[shards]
        self._model: Any = None
        self.load(small)
        self.drop()

    def load(self, folder: Path) -> tuple[float, int]:
        """Load and shard; return the seconds, and the bytes that this rank asked files for."""
        ways = {
            "ours": self._load_ours,
            "full": self._load_full,
            "efficient": self._load_efficiently,
            "floor": self._read,
        }
        dist.barrier()
        read, start = _bytes_read(), time.perf_counter()
        self._model = ways[self._name](folder)
        return time.perf_counter() - start, _bytes_read() - read

    def nbytes(self) -> int:
        """Return the bytes of this rank's shards."""
        return sum(each.nbytes for each in self._locals())

    def digest(self) -> float:
        """Return the sum of this rank's shards."""
        return sum(float(each.double().sum()) for each in self._locals())

    def _locals(self) -> list[torch.Tensor]:
        return [
            each.to_local() if isinstance(each, DTensor) else each
            for each in map(torch.Tensor.detach, self._model.parameters())
        ]

    def drop(self) -> int:
        """Free the model; return the PSS after that."""
        self._model = None
        give_back()
        dist.barrier()
        return pss("self")

    def _load_ours(self, folder: Path) -> nn.Module:
        return shardwise.from_pretrained(folder, dtype=self._dtype)

    def _load_full(self, folder: Path) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype)
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    def _load_efficiently(self, folder: Path) -> nn.Module:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedType
        from transformers import AutoModelForCausalLM

        # As on GPUs: it goes the way of FSDP2 only where it has found several of them.
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=True,
            )
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype)
        # It prepares no model without an optimizer. One without momentum holds nothing.
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        return prepared

    def _read(self, folder: Path) -> nn.Module:
        from safetensors.torch import load_file

        model = nn.ParameterDict()
        for file in sorted(folder.glob("*.safetensors")):
            for name, mapped in load_file(file).items():
                # Copied: else nothing has been read yet.
                model[name.replace(".", "/")] = mapped.to(self._dtype, copy=True)
        return model


def _bytes_read() -> int:
    """The bytes that this process has read by system calls; mapped files are not counted."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def save_model(folder: Path, params: str, dtype: str, files: int, seed: int) -> int:
    """Save a model in so many files, or about as many; return the bytes of its weights."""
    model = build(params, seed).to(DTYPES[dtype])
    nbytes = sum(each.nbytes for each in model.parameters())
    model.save_pretrained(folder, max_shard_size=-(-nbytes // files) + (1 << 20))
    return nbytes


def measure(
    name: str, ranks: int, folders: dict[str, Path], options: argparse.Namespace
) -> dict[str, Any]:
    """Let a contender load several times; return figures of all ranks."""
    env = QUIET | PROMPT_MALLOC | (EFFICIENT if name == "efficient" else {})
    turns = []
    arguments = (name, folders["small"], options.shards)
    with World(name, ranks, LoadingWorker, *arguments, env=env, exec_each=True) as world:
        for _ in range(options.rounds):
            base = world.call("drop")
            with PssSampler(world.pids) as sampler:
                loaded = world.call("load", folders["model"])
            turns.append(
                {
                    "seconds": [seconds for seconds, _ in loaded],
                    "read": [read for _, read in loaded],
                    "pss": [top - low for top, low in zip(sampler.peaks, base, strict=True)],
                }
            )
        return {
            "turns": turns,
            "shards": world.call("nbytes"),
            "digest": sum(world.call("digest")),
        }


def play(ranks: int, dtype: str, files: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders on one model.

    Raises:
        ValueError: two contenders did not load the same.
    """
    params = options.params[0]
    with tempfile.TemporaryDirectory(prefix="loading-", dir=options.folder) as root:
        folders = {"small": Path(root, "small"), "model": Path(root, "model")}
        save_model(folders["small"], "tiny", dtype, 1, options.seed)
        nbytes = save_model(folders["model"], params, dtype, files, options.seed)
        os.sync()
        contenders = {
            name: measure(name, 1 if name == "floor" else ranks, folders, options)
            for name in CONTENDERS
        }
    digests = [each["digest"] for each in contenders.values()]
    if any(abs(each - digests[0]) > 1e-6 * abs(digests[0]) + 1e-3 for each in digests):
        raise ValueError(
            f"they did not load the same: {dict(zip(contenders, digests, strict=True))}"
        )
    return {
        "ranks": ranks,
        "params": params,
        "dtype": dtype,
        "files": files,
        "nbytes": nbytes,
        "shards": options.shards or dtype,
        "contenders": contenders,
    }


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--ranks", type=positive_ints, default=[2], help="world sizes, e.g. 2 or 2,4")
    add("--params", type=one_of(*PRESETS), default=["150m"], help=f"model: {', '.join(PRESETS)}")
    add("--dtype", type=one_of(*DTYPES), default=["fp32"], help="of the files: fp32, bf16 (fp32)")
    add("--shards", choices=tuple(DTYPES), help="dtype of the shards (that of the files)")
    add("--files", type=positive_ints, default=[1], help="numbers of files, e.g. 1,8 (1)")
    add("--rounds", type=positive_int, default=3, help="turns of a contender (3)")
    add("--folder", type=Path, help="where the model is saved (with temporary files)")
    add("--seed", type=int, default=0, help="of weights (0)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    each = product(options.ranks, options.dtype, options.files)
    played = (play(ranks, dtype, files, options) for ranks, dtype, files in each)
    measured = publish_each(console, "loading", played, loading_tables, options.json)
    return 1 if any(too_high(case) for case in measured) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
