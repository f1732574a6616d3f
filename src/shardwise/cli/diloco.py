"""The options of ``--strategy diloco``, as a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from shardwise.diloco.settings import OuterSGD, Streaming, WireFormat
from shardwise.frontends.strategies import Strategy
from shardwise.recipes.core.config import DilocoConfig, OptionError, require

PANEL = "DiLoCo"

LocalSteps = Annotated[
    int | None,
    Option(
        help="Steps of each replica between two exchanges.",
        rich_help_panel=PANEL,
        show_default="500",
    ),
]
OuterLr = Annotated[
    float | None,
    Option(help="Learning rate of the outer step.", rich_help_panel=PANEL, show_default="0.7"),
]
OuterMomentum = Annotated[
    float | None,
    Option(help="Its Nesterov momentum.", rich_help_panel=PANEL, show_default="0.9"),
]
OuterWarmup = Annotated[
    int | None,
    Option(
        help="Rounds over which that momentum rises from 0.",
        rich_help_panel=PANEL,
        show_default="0",
    ),
]
Wire = Annotated[
    WireFormat | None,
    Option(
        metavar="NAME",
        help=f"What is sent: {', '.join(w.value for w in WireFormat)}.",
        rich_help_panel=PANEL,
        show_default="fp32",
    ),
]
ErrorFeedback = Annotated[
    bool,
    Option(
        "--diloco-error-feedback",
        help="Send what rounding has lost with the next exchange.",
        rich_help_panel=PANEL,
    ),
]
Fragments = Annotated[
    int | None,
    Option(
        help="Parts of the model, exchanged one after another.",
        rich_help_panel=PANEL,
        show_default="1",
    ),
]
Overlap = Annotated[
    int | None,
    Option(
        help="Steps that an exchange may take while training goes on.",
        rich_help_panel=PANEL,
        show_default="0",
    ),
]
Alpha = Annotated[
    float | None,
    Option(
        help="What a replica keeps of its own parameters at an exchange, 0 to 1.",
        rich_help_panel=PANEL,
        show_default="0",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Diloco:
    """The options; ``None`` where not given."""

    local_steps: LocalSteps = None
    outer_lr: OuterLr = None
    outer_momentum: OuterMomentum = None
    outer_warmup: OuterWarmup = None
    diloco_wire: Wire = None
    diloco_error_feedback: ErrorFeedback = False
    diloco_fragments: Fragments = None
    diloco_overlap: Overlap = None
    diloco_alpha: Alpha = None

    def config(self, strategy: Strategy) -> DilocoConfig | None:
        """The configuration; ``None`` for other strategies.

        Raises:
            OptionError: a number out of range, or an option that ``strategy`` would ignore.
        """
        given = {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False  # 0 is equal to False
        }
        if strategy is Strategy.DILOCO:
            return _config_of(given)
        for name in given:
            option = "--" + name.replace("_", "-")
            raise OptionError(option, f"strategy {strategy.value}", "--strategy diloco with it")
        return None


def _config_of(given: dict[str, Any]) -> DilocoConfig:
    take = given.pop
    steps, lr = take("local_steps", 500), take("outer_lr", OuterSGD.lr)
    momentum, alpha = take("outer_momentum", OuterSGD.momentum), take("diloco_alpha", 0.0)
    warmup = take("outer_warmup", OuterSGD.warmup)
    fragments, overlap = take("diloco_fragments", 1), take("diloco_overlap", 0)
    # Written so that NaN fails every one of them.
    require(steps >= 1, "--local-steps", steps, "1 or more")
    require(0 < lr < math.inf, "--outer-lr", lr, "a number above 0")
    require(0 <= momentum < 1, "--outer-momentum", momentum, "0 to 1, without 1")
    require(warmup >= 0, "--outer-warmup", warmup, "0 or more rounds")
    require(0 <= alpha < 1, "--diloco-alpha", alpha, "0 to 1, without 1")
    require(
        1 <= fragments <= steps, "--diloco-fragments", fragments, f"1 to {steps}, the local steps"
    )
    require(
        0 <= overlap < steps, "--diloco-overlap", overlap, f"0 or more, less than {steps} steps"
    )
    return DilocoConfig(
        local_steps=steps,
        outer_lr=lr,
        outer_momentum=momentum,
        outer_warmup=warmup,
        streaming=Streaming(fragments=fragments, overlap=overlap, alpha=alpha),
        **{name.removeprefix("diloco_"): value for name, value in given.items()},
    )
