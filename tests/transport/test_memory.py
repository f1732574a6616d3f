"""Full buffers: memory that comes and goes under tensors that stay."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest
import torch

from shardwise.transport.memory import LARGE_BYTES, HeapBuffers, prefer_huge_pages

CPU = torch.device("cpu")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    sys.platform != "linux" or not THP.exists() or "[never]" in THP.read_text(),
    reason="no transparent huge pages here",
)


def _sizes(buffers: HeapBuffers) -> list[int]:
    return [tensor.untyped_storage().size() for tensor in buffers.tensors]


def test_tensors_have_memory_between_allocate_and_free_only() -> None:
    buffers = HeapBuffers([3, 0, 5], [torch.float32, torch.float32, torch.bfloat16], CPU)
    assert _sizes(buffers) == [0, 0, 0]
    for _ in range(2):
        buffers.allocate()
        assert _sizes(buffers) == [12, 0, 10]
        buffers.free()
        assert _sizes(buffers) == [0, 0, 0]


def test_allocating_twice_keeps_the_contents() -> None:
    buffers = HeapBuffers([4], [torch.float32], CPU)
    buffers.allocate()
    buffers.tensors[0].fill_(7)
    buffers.allocate()
    assert buffers.tensors[0].tolist() == [7] * 4
    buffers.free()
    buffers.free()


def test_a_view_that_autograd_saved_sees_the_memory_of_the_next_allocation() -> None:
    buffers = HeapBuffers([6], [torch.float32], CPU)
    buffers.allocate()
    weight = buffers.tensors[0].view(2, 3)
    with torch.no_grad():
        weight.copy_(torch.arange(6.0).view(2, 3))
    inputs = torch.ones(1, 3, requires_grad=True)
    outputs = torch.nn.functional.linear(inputs, weight)
    buffers.free()
    buffers.allocate()
    # Filled through .data: the caller sees to it that autograd takes the contents for the same.
    buffers.tensors[0].data.copy_(torch.arange(6.0))
    outputs.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [[3.0, 5.0, 7.0]]


def test_freed_memory_goes_back_to_the_system() -> None:
    process, mib = psutil.Process(), 1024 * 1024
    buffers = HeapBuffers([16 * mib] * 2, [torch.float32] * 2, CPU)
    before = process.memory_info().rss
    for _ in range(3):
        buffers.allocate()
        for tensor in buffers.tensors:
            tensor.fill_(1)
        held = process.memory_info().rss - before
        assert abs(held - 128 * mib) < 16 * mib, "rounding to huge pages, no more"
        buffers.free()
        assert process.memory_info().rss - before < 16 * mib


def test_works_on_the_meta_device() -> None:
    buffers = HeapBuffers([4], [torch.float32], torch.device("meta"))
    buffers.allocate()
    buffers.free()
    assert buffers.tensors[0].shape == (4,)


def _flags(address: int) -> set[str]:
    """The kernel's flags of the mapping around an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(bound, 16) for bound in bounds.groups())
            inside = start <= address < end
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping holds {address:#x}")


@needs_huge_pages
def test_large_storages_lie_on_huge_pages() -> None:
    buffers = HeapBuffers([64 * 1024 * 1024], [torch.uint8], CPU)
    buffers.allocate()
    middle = buffers.tensors[0].data_ptr() + 32 * 1024 * 1024
    assert "hg" in _flags(middle)


@needs_huge_pages
def test_small_storages_are_left_alone() -> None:
    size = 64 * 1024 * 1024  # a mapping of its own, of which a small part is offered
    whole = torch.empty(size, dtype=torch.uint8)
    small = torch.empty(LARGE_BYTES - 1, dtype=torch.uint8)
    prefer_huge_pages(small.untyped_storage())
    assert "hg" not in _flags(whole.data_ptr() + size // 2)
    assert "hg" not in _flags(small.data_ptr() + LARGE_BYTES // 2)
