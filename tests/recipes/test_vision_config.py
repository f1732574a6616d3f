"""Vision models by name: their settings go together, and the names say what they are."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.insight.planning.presets import RESNETS, VIT_PRESETS, vit_settings

CONVOLUTIONS = {"basic": 2, "bottleneck": 3}  # in each layer of a residual net


@pytest.mark.parametrize("name", VIT_PRESETS)
def test_heads_and_patches_divide_what_they_share(name: str) -> None:
    settings = VIT_PRESETS[name]
    assert settings["model_type"] == "vit"
    assert settings["hidden_size"] % settings["num_attention_heads"] == 0
    assert settings["image_size"] % settings["patch_size"] == 0
    assert settings["intermediate_size"] >= settings["hidden_size"]


def test_the_mlp_is_four_times_as_wide_unless_its_width_is_given() -> None:
    assert vit_settings(hidden=96, layers=1, heads=3)["intermediate_size"] == 384
    settings = vit_settings(hidden=96, layers=1, heads=3, intermediate=100)
    assert settings["intermediate_size"] == 100


def test_presets_come_in_the_order_of_their_sizes() -> None:
    """As ``--help`` lists them. Most parameters of a block are in its MLP and its attention."""

    def weights(settings: dict[str, Any]) -> int:
        hidden, intermediate = settings["hidden_size"], settings["intermediate_size"]
        block: int = 4 * hidden**2 + 2 * hidden * intermediate
        return block * settings["num_hidden_layers"]

    sizes = [weights(settings) for settings in VIT_PRESETS.values()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("name", [name for name in RESNETS if name.startswith("resnet")])
def test_the_number_in_a_name_counts_the_layers_with_weights(name: str) -> None:
    """He et al., "Deep Residual Learning": the first convolution and the head count as well."""
    settings = RESNETS[name]
    layers = CONVOLUTIONS[settings["layer_type"]] * sum(settings["depths"])
    assert layers + 2 == int(name.removeprefix("resnet"))


@pytest.mark.parametrize("name", RESNETS)
def test_every_stage_of_a_residual_net_has_a_width(name: str) -> None:
    settings = RESNETS[name]
    widths = settings["hidden_sizes"]
    assert len(settings["depths"]) == len(widths)
    assert [2 * width for width in widths[:-1]] == widths[1:], "each stage doubles the width"
