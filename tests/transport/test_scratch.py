"""Memory that reductions use again and again."""

from __future__ import annotations

import pytest
import torch

from shardwise.transport import memory
from shardwise.transport.memory import Scratch


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
