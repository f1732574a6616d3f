"""Damage checkpoints of every format, and see that each is read, or refused by one clear error.

    python -m tests.fuzz.readers --mutants 100000 --seed 0
    python -m tests.fuzz.readers --mutants 1 --seed 0 --reader dcp --first 4711    # one of those

What has to hold of every mutant:

- It is read, or ``CheckpointError`` is raised, with a message of one line. Where there are
  checksums, it is read only if it holds what the original does.
- That takes no more than 64 MiB of memory and a second of the processor's time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from shardwise.base.errors import CheckpointError
from tests.fuzz.corpus import READERS, Content, Reader
from tests.fuzz.mutations import BLIND, Mutation

MEMORY = 64 << 20  # bytes that reading may take
SECONDS = 1.0  # of the processor
_GIVE_UP = 10.0  # seconds after which a mutant that is still being read is stopped
_MOST_MESSAGE = 2000
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h; set, it does not grow with what is freed
_PAGE = resource.getpagesize()


class Stopped(BaseException):
    """Reading has taken too long; no reader catches it."""


@dataclass(frozen=True)
class Find:
    """A mutant that breaks a promise.

    Attributes:
        number: of the mutant, which makes it again.
        how: what was done to which file.
        what: what happened.
    """

    number: int
    how: str
    what: str


@dataclass
class Result:
    """What became of the mutants of one reader."""

    name: str
    mutants: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    finds: list[Find] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.name:12} {self.mutants:9,} mutants  {self.read:8,} read  "
            f"{self.refused:8,} refused  {len(self.finds):4} finds  "
            f"{self.mutants / max(self.seconds, 1e-9):7,.0f}/s  slowest {self.slowest:.3f} s"
        )


def fuzz(name: str, mutants: int, seed: int, first: int = 0) -> Result:
    """Read mutants of one format.

    Args:
        name: of the reader.
        mutants: how many.
        seed: with the number of a mutant, it decides what that is.
        first: the number of the first.
    """
    reader, result = READERS[name], Result(name)
    with _folder() as folder:
        reader.make(folder)
        files = {file: (folder / file).read_bytes() for file in reader.mutations}
        original = reader.read(folder)
        began = time.perf_counter()
        for number in range(first, first + mutants):
            rng = random.Random(f"{seed}/{name}/{number}")
            file, mutation = _choose(rng, reader)
            data = mutation(rng, files[file])
            (folder / file).write_bytes(data)
            sealed = data == files[file] or reader.sealed(file, data)
            what = _try(reader, folder, original if sealed else None, result)
            if what:
                result.finds.append(Find(number, f"{mutation.__name__} of {file}", what))
            (folder / file).write_bytes(files[file])
        result.seconds = time.perf_counter() - began
    return result


def _choose(rng: random.Random, reader: Reader) -> tuple[str, Mutation]:
    file = rng.choice(list(reader.mutations))
    return file, rng.choice((*BLIND, *reader.mutations[file]))


def _try(reader: Reader, folder: Path, expected: Content | None, result: Result) -> str:
    """Read a mutant; what is wrong with how that went, or nothing."""
    result.mutants += 1
    what = ""
    began = time.process_time()
    try:
        with _bounded():
            found = reader.read(folder)
        result.read += 1
        if expected is not None and found != expected:
            what = "was read, and holds other than the original"
    except CheckpointError as error:
        result.refused += 1
        message = str(error)
        if not message.isprintable() or len(message) > _MOST_MESSAGE:
            what = f"message of {len(message)} characters, or of several lines: {message[:300]!r}"
    except Stopped:
        what = f"takes more than {_GIVE_UP} s"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        what = "".join(traceback.format_exception(error)[-4:])
    seconds = time.process_time() - began
    result.slowest = max(result.slowest, seconds)
    if seconds > SECONDS and not what:
        what = f"takes {seconds:.2f} s"
    return what


@contextmanager
def _bounded() -> Iterator[None]:
    """Let allocations of more than :data:`MEMORY` fail, and stop what takes too long."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split(None, 1)[0]) * _PAGE
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, _GIVE_UP)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder in memory, where there is room for one."""
    _keep_no_memory()
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="shardwise-fuzz-", dir=parent))
    before = signal.signal(signal.SIGVTALRM, _stop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # what is there already need not be looked at for each mutant
    try:
        folder = root / "checkpoint"
        folder.mkdir()
        yield folder
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
        signal.signal(signal.SIGVTALRM, before)
        shutil.rmtree(root)


def _keep_no_memory() -> None:
    """Have the C library give back large memory at once, or a leak would go into what it keeps."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 1 << 17)
        libc.malloc_trim(0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def main() -> int:
    """The command line; its exit code: 1 if a mutant breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.readers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--mutants", type=int, default=10_000, help="over all readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=[*READERS], help="this one alone")
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = [options.reader] if options.reader else [*READERS]
    found = 0
    for name in names:
        result = fuzz(name, -(-options.mutants // len(names)), options.seed, options.first)
        print(result, flush=True)
        kinds = Counter(find.what for find in result.finds)
        examples = {find.what: find for find in result.finds}
        for what, count in kinds.most_common(8):
            find = examples[what]
            print(f"  {count} times, last --first {find.number}: {find.how}\n    {what}")
        found += len(result.finds)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
