"""What differs between devices, and between backends of ``torch.distributed``.

This is the only file that names an accelerator or a backend, and the only one that asks torch for
streams, events, pinned memory, memory figures and random states of a device. The rest of the
package handles a ``torch.device`` and asks here. ``tests/test_layers.py`` checks that.

An *accelerator* is torch's word for the one type of device that this process computes on beside the
CPU: CUDA, XPU, MPS, MTIA, or a backend that registered itself as PrivateUse1 (NPU, TPU, HPU, ...).
Torch knows at most one. Its module (``torch.cuda``, ``torch.npu``, ...) has functions by the same
names on all of them, and not every module has every function. Where one is missing:

    streams, events     operations run one after the other, so there is nothing to order
    pinned memory       copies between host and device block the host
    memory figures      the memory of the process
    random states       none; the host's generator alone is saved
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.base.errors import NotPossibleError
from shardwise.base.libc import libc

CPU = torch.device("cpu")


# -- which device ---------------------------------------------------------------------------------


def accelerator() -> torch.device | None:
    """Return the accelerator of this process, without an index; ``None`` if it has none."""
    return torch.accelerator.current_accelerator(check_available=True)


def default_type() -> str:
    """Return the type of device that ranks compute on by default: the accelerator, else CPU."""
    found = accelerator()
    return CPU.type if found is None else found.type


def current(kind: str) -> torch.device:
    """Return the current device of a type; the CPU has no index."""
    return CPU if kind == CPU.type else torch.device(kind, torch.accelerator.current_device_index())


def count() -> int:
    """Return the number of accelerators that this process sees."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def type_for(ranks: int) -> str:
    """Return the type of device for the ranks of one host: accelerators, if each can have one."""
    return default_type() if count() >= ranks else CPU.type


def take(kind: str, index: int) -> torch.device:
    """Make an accelerator the current device of this thread, and return the current device.

    It has another index in a process that is bound to a device from its start, as on TPUs.
    """
    with contextlib.suppress(ValueError):
        torch.accelerator.set_device_index(torch.device(kind, index))
    return current(kind)


def of_rank() -> torch.device:
    """Take the accelerator of this rank, which its launcher has numbered; the CPU without one."""
    found = accelerator()
    return CPU if found is None else take(found.type, int(os.environ["LOCAL_RANK"]))


def _is_type(kind: str) -> bool:
    """Return whether torch knows a type of device, of this host or any other."""
    with contextlib.suppress(RuntimeError):
        return bool(torch.device(kind).type)
    return False


#: Types of devices of other packages -> what to install. Torch loads it by itself.
_PACKAGES = {
    "hpu": "habana_frameworks",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "npu": "torch_npu",
    "tpu": "torch_tpu",
}


def check_type(kind: str) -> None:
    """Check that this process can compute on devices of a type.

    Args:
        kind: the type as torch names it, such as ``"cuda"``, ``"xpu"`` or ``"mps"``.

    Raises:
        NotPossibleError: it cannot.
    """
    found = accelerator()
    usable = [CPU.type] if found is None else [found.type, CPU.type]
    if kind in usable:
        return
    has = "no accelerator" if found is None else f"the accelerator {found.type}"
    expected = " or ".join(usable)
    if ":" in kind:
        expected += ", without an index: each rank takes the device of its number on its host"
    elif kind in _PACKAGES:
        package = _PACKAGES[kind]
        is_there = importlib.util.find_spec(package) is not None
        expected += (
            f"; the package {package} is installed, and finds no {kind} device"
            if is_there
            else f"; {kind} devices come with the package {package}, beside torch"
        )
    elif kind == "xla":
        expected += "; TPUs are of type tpu and come with torch_tpu, in place of torch_xla"
    elif not _is_type(kind):
        expected += (
            "; an accelerator is named by its type, such as cuda: `shardwise plan --device` "
        )
        expected += "alone takes its model, such as h100"
    raise NotPossibleError("", f"{kind} where torch {torch.__version__} has {has}", expected)


# -- streams and events ---------------------------------------------------------------------------


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether work on a device is ordered by streams and events.

    If not, as on the CPU, operations run one after the other.
    """
    if device.type == CPU.type:
        return False
    # Backends that lack them raise; there is no other way to ask.
    try:
        torch.accelerator.current_stream(current(device.type)).record_event()
    except (RuntimeError, ValueError, AttributeError):
        return False
    return True


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of a device that has streams."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Make another stream on a device that has streams. Enter it with ``with``."""
    return torch.Stream(device)


#: What :func:`timed_event` records.
TimedEvent = torch.Event


@functools.cache
def times_events(device: torch.device) -> bool:
    """Whether events on a device say how much time lies between them."""
    if not has_streams(device):
        return False
    try:
        first, last = timed_event(device), timed_event(device)
        last.synchronize()
        return elapsed(first, last) >= 0
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False


def timed_event(device: torch.device) -> torch.Event:
    """Record an event on the current stream of a device, for :func:`elapsed`."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def elapsed(first: torch.Event, last: torch.Event) -> float:
    """Return the seconds between two timed events that the device has come to."""
    return first.elapsed_time(last) / 1e3


def synchronize(device: torch.device) -> None:
    """Block the host until all work on a device is over. Only an accelerator has such work."""
    found = accelerator()
    if found is not None and found.type == device.type:
        torch.accelerator.synchronize(device)


# -- host memory ----------------------------------------------------------------------------------


@functools.cache
def pins(device: torch.device) -> bool:
    """Whether host memory can be pinned, so that copies from and to ``device`` run beside the host.

    Events have to say when such a copy is over, so this takes a device that has them.
    """
    found = accelerator()
    # Torch pins for the accelerator.
    if not has_streams(device) or found is None or found.type != device.type:
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes on the host, pinned where that makes copies from and to ``device`` faster."""
    return torch.empty(nbytes, dtype=torch.uint8, device=CPU, pin_memory=pins(device))


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor in pinned memory: itself, or a copy."""
    return tensor if tensor.is_pinned() else tensor.pin_memory()


class Copy(enum.Enum):
    """How values of a device come to the host."""

    PAGEABLE = "into pageable memory; the host waits"
    PINNED = "into pinned memory; the host waits"
    STARTED = "into pinned memory; the host does not wait"


def copy_to_host(tensor: torch.Tensor, how: Copy) -> torch.Tensor:
    """Copy a tensor of an accelerator to the host.

    Args:
        tensor: on a device that :func:`pins`, unless the copy is pageable.
        how: what memory to copy to, and whether to wait. A copy that is only started is over once
            an event that was recorded after it is. The memory of ``tensor`` may be freed at once:
            it is reused on the current stream only, so after the copy.

    Returns:
        A contiguous tensor on the host.
    """
    host = torch.empty_like(
        tensor,
        device=CPU,
        pin_memory=how is not Copy.PAGEABLE,
        memory_format=torch.contiguous_format,
    )
    return host.copy_(tensor, non_blocking=how is Copy.STARTED)


# Of mallopt(3): numbers of the two settings, and the largest value that the first one takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_IN_HEAP = 32 * 1024 * 1024
_NEVER = 2**31 - 1

#: A user who has set one of these wants something else.
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have this process keep freed memory, except for allocations above 32 MiB.

    At the end of a step nearly all memory is freed: activations, full gradients. glibc then returns
    the top of its heap to the kernel, which has to clear and map each page again for the next step.
    Measured on 2 ranks with 2 cores, a Llama with 5 million parameters, 1,024 tokens per rank and
    step: 16,000 page faults per step and 4 to 9% of its CPU time, against 190 faults. A process
    that trains reaches its peak in every step, so returning memory gains nothing. glibc's own
    variables do the same for other programs (https://man7.org/linux/man-pages/man3/mallopt.3.html).

    Returns:
        Whether it does now: not where the C library is another, or the user has set one of
        ``MALLOC_VARIABLES``.
    """
    # Setting either ends glibc's own adjustments, so both are needed.
    return _set_allocator({_MMAP_THRESHOLD: _MOST_IN_HEAP, _TRIM_THRESHOLD: _NEVER})


def return_freed_memory() -> bool:
    """Have this process return freed memory of 1 MiB or more to the kernel at once.

    Large tensors that come and go leave holes in the heap that others do not fit into. Where memory
    is short, that counts more than the time to clear pages. Measured on a Llama with 168 million
    parameters in bf16, whose states are on a disk and whose groups step in backward: 0.9 GiB of
    resident memory instead of 1.7.

    Returns:
        Whether it does now: not where the C library is another, or the user has set one of
        ``MALLOC_VARIABLES``.
    """
    return _set_allocator({_MMAP_THRESHOLD: 1024 * 1024, _TRIM_THRESHOLD: 1024 * 1024})


def _set_allocator(settings: dict[int, int]) -> bool:
    """Set parameters of glibc's allocator, unless the user has; return whether that worked."""
    if any(name in os.environ for name in MALLOC_VARIABLES) or not hasattr(libc(), "mallopt"):
        return False
    worked = [bool(libc().mallopt(name, value)) for name, value in settings.items()]
    return all(worked)


# -- figures and random states --------------------------------------------------------------------


def name(device: torch.device) -> str:
    """Return what the maker calls a device, or its type."""
    get = _function(device, "get_device_name")
    return device.type if get is None else str(get(device))


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes.

    Allocated memory on an accelerator that counts it; else resident memory of the process.
    """
    get = _function(device, "max_memory_allocated")
    if get is not None:
        return int(get(device))
    # Bytes on macOS, KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Let :func:`peak_memory` begin anew, on an accelerator that counts it."""
    if (reset := _function(device, "reset_peak_memory_stats")) is not None:
        reset(device)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device, for all processes together.

    On CPUs, what the kernel says is available.
    """
    get = _function(device, "mem_get_info")
    if get is not None:
        return int(get(device)[0])
    if device.type != CPU.type:
        return 0
    import psutil  # here: few ask

    return int(psutil.virtual_memory().available)


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the random generator of a device; ``None`` if it does not give one."""
    generator = _generator(device)
    if generator is not None:
        return generator.get_state()
    get = _function(device, "get_rng_state")
    return None if get is None else get(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the random generator of a device.

    Raises:
        RuntimeError: it is no such state.
    """
    generator = _generator(device)
    if generator is not None:
        generator.set_state(state)
        return
    put = _function(device, "set_rng_state")
    if put is not None:
        put(state, device)


def _generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a device, if its module shows it.

    That is what the functions for random states use. TorchTPU keeps those to torch itself.
    """
    if device.type == CPU.type:
        return torch.default_generator
    generators: Sequence[torch.Generator] = _function(device, "default_generators") or ()
    index = current(device.type).index if device.index is None else device.index
    return generators[index] if index < len(generators) else None


def _function(device: torch.device, name: str) -> Any:
    """Look up a function of torch's module for an accelerator, such as ``torch.cuda``.

    ``None`` if it has none by that name, and on the CPU.
    """
    is_host = device.type == CPU.type
    return None if is_host else getattr(torch.get_device_module(device), name, None)


# -- what a host has ------------------------------------------------------------------------------

#: Where the kernel shows the version of a driver, and how it is written there.
_NVIDIA = Path("/proc/driver/nvidia/version"), re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)")
_AMD = Path("/sys/module/amdgpu/version"), re.compile(r"(\S+)")
#: Libraries of collectives, as the loader knows them. Both have ``ncclGetVersion``.
_COLLECTIVES = {"NCCL": "libnccl.so.2", "RCCL": "librccl.so.1"}


def models() -> list[tuple[str, int]]:
    """Return all accelerators that this process sees, by index.

    Returns:
        What the maker calls each, such as ``"NVIDIA H100 80GB HBM3"``, and the bytes of its memory;
        0 if torch cannot tell.
    """
    every = [torch.device(default_type(), at) for at in range(count())]
    return [(name(at), int(getattr(_properties(at), "total_memory", 0))) for at in every]


def _properties(device: torch.device) -> Any:
    get = _function(device, "get_device_properties")
    return None if get is None else get(device)


def versions() -> dict[str, str]:
    """Return the versions of what torch reaches the accelerators through, by name.

    The driver; what torch was built for (CUDA, ROCm or SYCL); and the library of collectives that
    is loaded, which need not be the one that torch was built with. What is not there is missing.
    """
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "SYCL": torch.version.xpu}
    found = {"driver": _driver(), **built, **_collectives()}
    return {name: version for name, version in found.items() if version}


def _driver() -> str:
    """Return the version of the driver; empty if there is none, or it is unknown.

    CUDA and ROCm have no function for it that torch shows. The kernel's own files need no other
    program or package, and need no wait, as ``nvidia-smi`` when a GPU hangs.
    """
    device = accelerator()
    if device is not None:
        version = getattr(_properties(current(device.type)), "driver_version", "")  # XPU
        if version:
            return str(version)
    path, written = _AMD if torch.version.hip else _NVIDIA
    try:
        match = written.search(path.read_text())
    except (OSError, UnicodeDecodeError):
        return ""
    return match[1] if match else ""


def _collectives() -> dict[str, str]:
    found = {name: _loaded(library) for name, library in _COLLECTIVES.items()}
    if not any(found.values()) and dist.is_nccl_available():  # linked into torch itself
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _loaded(library: str) -> str:
    """Return the version of a library of collectives; empty if this process has not loaded it."""
    number = ctypes.c_int()
    try:
        handle = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        handle.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    # NCCL_VERSION_CODE of nccl.h, as it is since version 2.9.
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def why_none() -> str:
    """Return why torch finds no accelerator where the host has a driver for one.

    Empty if it finds some, or if the host has no driver: then nothing was expected.
    """
    driver = _driver()
    if accelerator() is not None or not driver:
        return ""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is built for CPUs, and the driver is {driver}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return ""


# -- backends -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """What a backend of ``torch.distributed`` can do with tensors on one type of device.

    The defaults fit a backend that nothing is known of: what every backend can do.

    Attributes:
        name: its name in ``torch.distributed``.
        sends_messages: tensors are sent between two ranks, with tags and in any order, by a thread
            of the backend; and a closed connection can be noticed.
        shares_memory: ranks of one host may share memory in place of messages.
        averages: ``ReduceOp.AVG`` works; if not, a sum is divided.
        coalesces: many collectives of one kind can be launched as one.
        gathers_in_place: the input of an all-gather may be this rank's place in the output.
        progresses: bytes move without a wait (asynchronous progress).
    """

    name: str
    sends_messages: bool = False
    shares_memory: bool = False
    averages: bool = False
    coalesces: bool = False
    gathers_in_place: bool = True
    progresses: bool = True


#: The backend of host memory, which every world has for small messages.
GLOO = Backend("gloo", sends_messages=True, shares_memory=True)
NCCL = Backend("nccl", averages=True, coalesces=True)

#: The type of the devices that are known by their data sheets: ROCm's go by the same name.
KNOWN = "cuda"

_BACKENDS = {
    (CPU.type, GLOO.name): GLOO,
    (KNOWN, NCCL.name): NCCL,  # and so does RCCL
    # MPI forbids that the buffers of a collective overlap.
    (CPU.type, "mpi"): Backend("mpi", gathers_in_place=False),
}


def backend_of(name: str, device: torch.device) -> Backend:
    """Return what the backend called ``name`` can do with tensors on ``device``."""
    return _BACKENDS.get((device.type, name)) or Backend(name)


def backends_for(device: torch.device) -> str:
    """Return what to pass to ``init_process_group``, to compute on ``device``.

    Gloo carries small messages from host memory, whatever the device.

    Raises:
        ValueError: torch knows no default backend for the device.
    """
    if device.type == CPU.type:
        return GLOO.name
    own = dist.get_default_backend_for_device(device)
    return f"{CPU.type}:{GLOO.name},{device.type}:{own}"
