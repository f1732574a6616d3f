"""Policies choose the modules that they promise."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

import shardwise
from shardwise.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    apply_wrap,
    chosen_modules,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.sharding.nets import Block, Net
from tests.worlds import Ranks

# Parameters: a block has 91 (49 and 42), the head 35, the scalar 1.
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
EVERY = [name for block in BLOCKS for name in (f"{block}.up", f"{block}.down", block)] + ["head"]


def _chosen(policy: Any, model: nn.Module | None = None, **options: Any) -> list[str]:
    model = Net() if model is None else model
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in chosen_modules(model, policy, **options)]


def _is_head(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 5


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (size_based_auto_wrap_policy, []),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=90), BLOCKS),
        (size_based_auto_wrap_policy(min_num_params=49), [f"{block}.up" for block in BLOCKS]),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), BLOCKS),
        (transformer_auto_wrap_policy(transformer_layer_cls={Block}), BLOCKS),
        (ModuleWrapPolicy([Block]), BLOCKS),
        (functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_head), ["head"]),
        (
            ModuleWrapPolicy([Block]) | lambda_auto_wrap_policy(lambda_fn=_is_head),
            [*BLOCKS, "head"],
        ),
        (or_policy([ModuleWrapPolicy([Block]), lambda **_: False]), BLOCKS),
        ((lambda **_: False) | ModuleWrapPolicy([Block]), BLOCKS),
        (always_wrap_policy, EVERY),
        (CustomPolicy(_is_head), ["head"]),
        ("auto", BLOCKS),
        ({"blocks.*": "free_full_weight", "head": "keep_full_weight"}, [*BLOCKS, "head"]),
        (torch_wrap.ModuleWrapPolicy({Block}), BLOCKS),
        (torch_wrap.CustomPolicy(_is_head), ["head"]),
        (functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=90), BLOCKS),
        (torch_wrap.always_wrap_policy, EVERY),
    ],
)
def test_policies_choose(policy: Any, expected: list[str]) -> None:
    assert _chosen(policy) == expected


def test_sizes_count_what_no_group_has_yet() -> None:
    # Left for the net: the head and the scalar, 36 in all. The list itself is never a group.
    assert _chosen(size_based_auto_wrap_policy(min_num_params=36), nn.Sequential(Net())) == [
        *[name for block in BLOCKS for name in (f"0.{block}.up", f"0.{block}.down")],
        "0",
    ]
    assert nn.MultiheadAttention in size_based_auto_wrap_policy.FORCE_LEAF_MODULES
    attention = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    assert _chosen(size_based_auto_wrap_policy(min_num_params=1), attention) == ["1"]
    layers = size_based_auto_wrap_policy(min_num_params=1, exclude_wrap_modules={nn.Linear})
    assert _chosen(layers, attention) == []
    parts = size_based_auto_wrap_policy(min_num_params=1, force_leaf_modules={})
    assert _chosen(parts, attention) == ["0.out_proj", "0", "1"]


def test_what_is_ignored_is_not_chosen() -> None:
    net = Net()

    assert _chosen(always_wrap_policy, net, ignored_modules=[net.blocks]) == ["head"]
    assert _chosen("auto", net, ignored_modules=[net.blocks[0]]) == BLOCKS[1:]


def test_a_plan_says_what_is_kept() -> None:
    net = Net()
    plan = {"blocks.1": "keep_full_weight", "blocks.*": "free_full_weight"}

    assert chosen_modules(net, plan) == {
        net.blocks[0]: {},
        net.blocks[1]: {"reshard_after_forward": False},
        net.blocks[2]: {},
    }


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"blocks.*": "free"}, "expected 'free_full_weight' or 'keep_full_weight' as values"),
        ({"layers.*": "free_full_weight"}, r"none of \['layers.\*'\] matches a module of Net"),
        ("blocks", "expected 'auto', the only one with a name, found 'blocks'"),
        (3, "expected a function, a policy, a dict of name patterns or 'auto', found int 3"),
    ],
)
def test_policies_that_are_none(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen_modules(Net(), policy)


def test_a_pattern_that_matches_nothing_is_reported() -> None:
    plan = {"blocks.*": "free_full_weight", "norm": "keep_full_weight"}
    with pytest.warns(UserWarning, match=r"\['norm'\] match no module of Net"):
        chosen_modules(Net(), plan)


def test_a_custom_policy_has_to_answer() -> None:
    with pytest.raises(TypeError, match="expected the function to return True, False or a dict"):
        chosen_modules(Net(), CustomPolicy(lambda module: None))  # type: ignore[arg-type,return-value]


def test_the_package_is_an_attribute() -> None:
    assert shardwise.wrap.wrap is wrap


def _applied(rank: int, world_size: int) -> list[str]:
    net = Net()
    apply_wrap(
        net, {"blocks.*": "free_full_weight", "head": "keep_full_weight"}, shardwise.fully_shard
    )
    shardwise.fully_shard(net)
    return [name for name, m in net.named_modules() if isinstance(m, shardwise.FSDPModule)]


def test_policies_apply_fully_shard(threads: Ranks) -> None:
    assert threads(_applied, 2) == [["", *BLOCKS, "head"]] * 2
