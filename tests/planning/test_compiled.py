"""Logs as a compiler, and as float8, would change them."""

from __future__ import annotations

from dataclasses import replace

from shardwise.base.observe import Memory
from shardwise.insight.planning.clock import fused, in_float8
from shardwise.insight.planning.events import Change, Event, Op, StepPhase

BLOCK = "model.layers.3.mlp"
PRODUCT = Op(
    name="aten.mm.default",
    module=BLOCK,
    phase=StepPhase.FORWARD,
    flops=2 * 4 * 8 * 16,
    nbytes=2 * (32 + 128 + 64),
    shapes=((4, 8), (8, 16), (4, 16)),
    dtype="bfloat16",
    runtime=False,
)
WIDE = Op("aten.mul.Tensor", BLOCK, StepPhase.FORWARD, 0, 1200, ((10, 10),) * 3, "float32", False)
NARROW = replace(WIDE, name="aten._to_copy.default", nbytes=600, shapes=((10, 10),) * 2)
LEAVES = replace(NARROW, dtype="bfloat16")


def names(*events: Event) -> list[tuple[str, int]]:
    return [(e.name, e.nbytes) for e in fused(events) if isinstance(e, Op)]


def test_what_stands_between_products_is_one_kernel_of_the_largest() -> None:
    assert names(PRODUCT, NARROW, WIDE, LEAVES, PRODUCT) == [
        (PRODUCT.name, PRODUCT.nbytes),
        ("fused", 2 * 300),  # three tensors of 100 elements, in the dtype of what is left
        (PRODUCT.name, PRODUCT.nbytes),
    ]


def test_a_kernel_never_moves_more_than_its_operations() -> None:
    assert names(replace(LEAVES, nbytes=10)) == [("fused", 10)]


def test_allocations_do_not_part_a_kernel_and_phases_do() -> None:
    change = Change(Memory.OTHER, 10, BLOCK, "")
    assert len(names(WIDE, change, WIDE)) == 1
    assert change in list(fused([WIDE, change, WIDE]))
    assert len(names(WIDE, replace(WIDE, phase=StepPhase.BACKWARD))) == 2


def test_outside_blocks_and_in_the_runtime_nothing_is_fused() -> None:
    for op in (
        replace(WIDE, module="lm_head"),
        replace(WIDE, runtime=True),
        replace(WIDE, phase=StepPhase.OPTIMIZER),
    ):
        assert names(op, op) == [(op.name, op.nbytes)] * 2


def test_float8_products_of_blocks_read_bytes_that_were_cast() -> None:
    cast, product = in_float8([PRODUCT])
    assert isinstance(cast, Op)
    assert isinstance(product, Op)
    assert (cast.flops, cast.nbytes) == (0, 3 * (32 + 128))
    assert product.dtype == "float8_e4m3fn"
    assert product.flops == PRODUCT.flops
    assert product.nbytes == 32 + 128 + 2 * 64


def test_the_head_and_attention_stay_as_they_are_in_float8() -> None:
    head = replace(PRODUCT, module="lm_head")
    attention = replace(PRODUCT, name="aten._scaled_dot_product_flash_attention.default")
    assert list(in_float8([head, attention, WIDE])) == [head, attention, WIDE]
