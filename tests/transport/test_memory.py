"""Ordinary memory: full buffers that keep their tensors, huge pages, and scratch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest
import torch

from shardwise.transport import memory
from shardwise.transport.memory import (
    LARGE_BYTES,
    HeapBuffers,
    Scratch,
    give_back,
    prefer_huge_pages,
)

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


def test_elements_that_are_given_back_take_their_neighbors_along_in_no_case() -> None:
    tensor = torch.ones(10_000)
    give_back(tensor, 1_000, 9_000)
    assert torch.equal(tensor[:1_000], torch.ones(1_000))
    assert torch.equal(tensor[9_000:], torch.ones(1_000))
    assert int((tensor == 0).sum()) >= 8_000 - 2 * 1024, "whole pages of 1024 elements"
    tensor.fill_(2)
    assert tensor.sum() == 20_000


def test_fewer_elements_than_a_page_has_are_not_given_back() -> None:
    tensor = torch.ones(3_000)
    give_back(tensor, 100, 1_000)
    assert torch.equal(tensor, torch.ones(3_000))


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
def test_small_storages_are_not_put_on_huge_pages() -> None:
    size = 64 * 1024 * 1024  # a mapping of its own, of which a small part is offered
    whole = torch.empty(size, dtype=torch.uint8)
    small = torch.empty(LARGE_BYTES - 1, dtype=torch.uint8)
    prefer_huge_pages(small.untyped_storage())
    assert "hg" not in _flags(whole.data_ptr() + size // 2)
    assert "hg" not in _flags(small.data_ptr() + LARGE_BYTES // 2)


# -- scratch ---------------------------------------------------------------------------------------


def _addresses(scratch: Scratch, *numels: int) -> list[int]:
    loan = scratch.borrow()
    taken = [loan.take(numel, torch.float32) for numel in numels]
    for tensor, numel in zip(taken, numels, strict=True):
        assert tensor.shape == (numel,)
        tensor.fill_(numel)
    for tensor, numel in zip(taken, numels, strict=True):
        assert bool((tensor == numel).all()), "loans of one borrower overlap"
    loan.end()
    return [tensor.data_ptr() for tensor in taken]


def test_the_second_loan_of_a_size_gets_the_memory_of_the_first() -> None:
    scratch = Scratch()
    _addresses(scratch, 1000, 3, 70)  # learns how much is needed
    first = _addresses(scratch, 1000, 3, 70)
    assert _addresses(scratch, 1000, 3, 70) == first
    assert _addresses(scratch, 500)[0] == first[0], "a smaller need is served from the same block"
    assert all(address % 64 == 0 for address in first)


def test_two_borrowers_at_once_never_share() -> None:
    scratch = Scratch()
    _addresses(scratch, 100)
    one, other = scratch.borrow(), scratch.borrow()
    ours, theirs = one.take(100, torch.float32).fill_(1), other.take(100, torch.float32).fill_(2)
    assert ours.sum() == 100
    assert theirs.sum() == 200
    one.end()
    other.end()


def test_no_more_is_kept_than_one_borrower_needed() -> None:
    scratch = Scratch()
    loans = [scratch.borrow() for _ in range(5)]
    for loan in loans:
        loan.take(100, torch.uint8)
    for loan in loans:
        loan.end()
    kept = scratch.borrow().take(128, torch.uint8)
    assert kept.untyped_storage().nbytes() == 128, "100 bytes, rounded up to 64"


def test_large_blocks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_BYTES", 1024)
    scratch = Scratch()
    _addresses(scratch, 100)  # 400 bytes: kept
    _addresses(scratch, 1000)
    kept = scratch.borrow().take(1, torch.uint8)
    assert kept.untyped_storage().nbytes() == 448


def test_dtypes_mix_in_one_loan() -> None:
    scratch = Scratch()
    for _ in range(2):
        loan = scratch.borrow()
        assert loan.take(3, torch.bfloat16).dtype == torch.bfloat16
        assert loan.take(5, torch.complex64).dtype == torch.complex64
        assert loan.take(0, torch.float32).numel() == 0
        loan.end()
