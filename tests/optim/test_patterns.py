"""``param_groups``: settings of an optimizer by patterns of names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import FullyShardedDataParallel, checkpoint_module
from shardwise.optim import Muon, muon_groups, param_groups
from tests.worlds import on_threads


class Net(nn.Module):
    """An embedding that is tied to the head, blocks with norms, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x) * self.scale
        return out


def _by_name(groups: list[dict[str, Any]], *settings: str) -> dict[str, Any]:
    """The settings of each parameter; a single one as it is."""
    found = {}
    for group in groups:
        values = tuple(group.get(each) for each in settings)
        for name, _ in group["params"]:
            assert name not in found
            found[name] = values[0] if len(settings) == 1 else values
    return found


RULES: dict[str, dict[str, Any]] = {
    "embed*": {"lr": 0.5},
    "blocks.?.1.*": {"weight_decay": 0.0},
    "blocks.1.*": {"lr": 0.25},
}
EXPECTED = {
    "embed.weight": (0.5, None),
    **{f"blocks.0.0.{each}": (None, None) for each in ("weight", "bias")},
    **{f"blocks.0.1.{each}": (None, 0.0) for each in ("weight", "bias")},
    **{f"blocks.1.0.{each}": (0.25, None) for each in ("weight", "bias")},
    **{f"blocks.1.1.{each}": (0.25, 0.0) for each in ("weight", "bias")},
}


def test_settings_go_to_the_parameters_whose_names_match() -> None:
    groups = param_groups(Net(), RULES)
    assert _by_name(groups, "lr", "weight_decay") == EXPECTED
    assert len(groups) == 5  # the parameters that no pattern matches are the first
    assert [name for name, _ in groups[0]["params"]] == ["blocks.0.0.weight", "blocks.0.0.bias"]


def test_an_optimizer_takes_its_own_settings_where_no_pattern_says_others() -> None:
    adamw = torch.optim.AdamW(param_groups(Net(), RULES), lr=1.0, weight_decay=0.125)
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in adamw.param_groups
        for name in group["param_names"]
    }
    assert found["blocks.0.0.bias"] == (1.0, 0.125)
    assert found["blocks.1.1.weight"] == (0.25, 0.0)


@pytest.mark.parametrize("pattern", ["embed.weight", "head.*", "head*"])
def test_a_tied_parameter_is_matched_by_any_of_its_names(pattern: str) -> None:
    groups = param_groups(Net(), {pattern: {"lr": 0.5}})
    assert _by_name(groups, "lr")["embed.weight"] == 0.5


def test_no_rules_are_one_group_of_what_is_trained() -> None:
    (group,) = param_groups(Net(), {})
    assert [name for name, _ in group["params"]] == list(EXPECTED)


def test_groups_of_muon_are_divided_further() -> None:
    net = Net()
    base = muon_groups(net, muon={"lr": 0.02}, adamw={"lr": 3e-4})
    rules: dict[str, dict[str, Any]] = {
        "blocks.1.*": {"lr": 0.01},
        "blocks.0.0.weight": {"algorithm": "adamw"},
    }
    groups = param_groups(net, rules, groups=base)
    assert _by_name(groups, "algorithm", "lr") == {
        "embed.weight": ("adamw", 3e-4),
        "blocks.0.0.weight": ("adamw", 0.02),
        "blocks.1.0.weight": ("muon", 0.01),
        **{f"blocks.0.{each}": ("adamw", 3e-4) for each in ("0.bias", "1.weight", "1.bias")},
        **{f"blocks.1.{each}": ("adamw", 0.01) for each in ("0.bias", "1.weight", "1.bias")},
    }
    assert len(Muon(groups).param_groups) == 5


def test_groups_of_an_optimizer_can_be_divided_too() -> None:
    net = Net()
    adamw = torch.optim.AdamW(param_groups(net, {"embed*": {"lr": 0.5}}), lr=1.0)
    groups = param_groups(net, {"*bias": {"weight_decay": 0.0}}, groups=adamw.param_groups)
    again = torch.optim.AdamW(groups)
    assert [group["lr"] for group in again.param_groups] == [1.0, 1.0, 0.5]
    assert again.param_groups[1]["param_names"] == [name for name in EXPECTED if "bias" in name]


# -- names that wrappers change --------------------------------------------------------------------


@on_threads(2)
def test_names_are_those_of_state_dicts(rank: int, world_size: int) -> None:
    compiled: Any = torch.compile(Net(), backend="eager")
    assert _by_name(param_groups(compiled, RULES), "lr", "weight_decay") == EXPECTED
    net = Net()
    for block in net.blocks:
        checkpoint_module(block)
    assert _by_name(param_groups(net, RULES), "lr", "weight_decay") == EXPECTED
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = Net()
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    assert _by_name(param_groups(net, RULES), "lr", "weight_decay") == EXPECTED
    wrapper = FullyShardedDataParallel(net, use_orig_params=True)
    assert _by_name(param_groups(wrapper, RULES), "lr", "weight_decay") == EXPECTED
    assert _by_name(param_groups(wrapper.module, RULES), "lr", "weight_decay") == EXPECTED


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"embd*": {"lr": 1.0}},
            "pattern 'embd*': found no parameter of Net that it matches, expected at least one of "
            "11, such as embed.weight",
        ),
        (
            {"scale": {"lr": 1.0}},
            "pattern 'scale': found that it matches only parameters that are not trained, such as "
            "scale",
        ),
        (
            {"*norm*": {"lr": 1.0}},
            "pattern '*norm*': found no parameter of Net that it matches",
        ),
        (
            {"embed*": {"lr": 1.0}, "head*": {"lr": 2.0}},
            "embed.weight: found that both 'embed*' and 'head*' match it, with lr 1.0 and 2.0, "
            "expected one value",
        ),
        (
            {"embed*": {"weight_deacy": 0.0}},
            "pattern 'embed*': found the setting 'weight_deacy', expected an argument of an "
            "optimizer of torch.optim or shardwise.optim, such as lr or weight_decay; did you mean "
            "weight_decay?",
        ),
        ({"embed*": {"params": []}}, "found the setting 'params', expected an argument"),
        ({"embed*": {}}, "pattern 'embed*': found no settings, expected at least one"),
        ({"embed*": {"lr": -1}}, "pattern 'embed*': lr: found -1, expected a number, 0 or more"),
        ({"embed*": {"lr": "1e-4"}}, "lr: found '1e-4', expected a number, 0 or more"),
        ({"embed*": {"lr": float("nan")}}, "lr: found nan, expected a number, 0 or more"),
        ({"embed*": {"weight_decay": True}}, "weight_decay: found True, expected a number"),
    ],
)
def test_mistakes_are_named(rules: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        param_groups(Net(), rules)


def test_equal_settings_of_two_patterns_are_no_contradiction() -> None:
    groups = param_groups(Net(), {"embed*": {"lr": 1.0}, "head*": {"lr": 1.0}})
    assert _by_name(groups, "lr")["embed.weight"] == 1.0


def test_groups_of_another_model_are_refused() -> None:
    groups = [{"params": list(Net().embed.parameters())}]
    message = r"found a parameter of shape \[8, 4\] in groups, which the model does not have"
    with pytest.raises(ValueError, match=message):
        param_groups(Net(), {}, groups=groups)
