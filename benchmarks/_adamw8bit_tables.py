"""Tables of an ``adamw8bit`` document."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table

TITLES = {
    "adamw": "torch AdamW, fused",
    "ours": "shardwise AdamW8bit",
    "torchao": "torchao AdamW8bit",
    "adamw-foreach": "torch AdamW, foreach",
}
PEER = "adamw"
WINDOW = 50  # steps whose mean loss counts


def adamw8bit_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table of steps and states, and one of losses, where they were measured."""
    steps = [case for case in content["cases"] if case["part"] == "steps"]
    models = curves(content)
    return [*([_steps(steps)] if steps else []), *([_losses(models)] if models else [])]


def _steps(cases: list[dict[str, Any]]) -> Table:
    table = Table(
        "A step of the optimizer, and its states",
        [
            *("optimizer", "parameters", "ms", "quartiles", "x fused AdamW", "x torchao"),
            *("bytes of states a parameter", "x fp32"),
        ],
    )
    for case in cases:
        seconds, held = case["seconds"], case["state_bytes"]
        for name, turns in seconds.items():
            low, middle, high = (1e3 * each for each in statistics.quantiles(turns, n=4))
            table.rows.append(
                [
                    TITLES[name],
                    f"{case['numel'] / 1e6:.1f} M",
                    f"{middle:.0f}",
                    f"{low:.0f} to {high:.0f}",
                    _ratio(turns, seconds["adamw"]),
                    _ratio(turns, seconds["torchao"]) if "torchao" in seconds else "",
                    f"{held[name] / case['numel']:.2f}",
                    f"{held[name] / held['adamw']:.3f}",
                ]
            )
    return table


def _ratio(mine: list[float], theirs: list[float]) -> str:
    return f"{statistics.median(m / t for m, t in zip(mine, theirs, strict=True)):.2f}"


def curves(content: dict[str, Any]) -> list[Curves]:
    """Put the losses of each model together, of all seeds."""
    found: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for case in content["cases"]:
        if case["part"] == "loss":
            found.setdefault((case["params"], case["tokens"], case["lr"]), []).append(case)
    return [Curves(cases) for cases in found.values()]


class Curves:
    """The losses of one model with several optimizers, for each seed.

    Args:
        cases: of a document, one for each seed.

    Attributes:
        case: the first of them.
        names: the optimizers.
        title: of the model.
    """

    def __init__(self, cases: list[dict[str, Any]]) -> None:
        self._cases = cases
        self.case = cases[0]
        self.names = list(self.case["losses"])
        self.title = f"{self.case['numel'] / 1e6:.1f} M parameters"

    def smooth(self, name: str) -> list[list[float]]:
        """The mean of each :data:`WINDOW` steps that follow each other, for each seed."""
        return [_smooth(case["losses"][name]) for case in self._cases]

    def apart(self, name: str) -> list[list[float]]:
        """How much larger these means are than with fp32, as a fraction, for each seed.

        None where fp32 was not trained.
        """
        if PEER not in self.names:
            return []
        return [
            [mine / theirs - 1 for mine, theirs in zip(*pair, strict=True)]
            for pair in zip(self.smooth(name), self.smooth(PEER), strict=True)
        ]


def _smooth(losses: list[float]) -> list[float]:
    width = min(WINDOW, len(losses))
    return [statistics.mean(losses[end - width : end]) for end in range(width, len(losses) + 1)]


def _losses(models: list[Curves]) -> Table:
    steps = len(next(iter(models[0].case["losses"].values())))
    table = Table(
        f"Loss of {steps} steps, trained on the standard library",
        [
            *("optimizer", "parameters", "tokens a step", "lr"),
            *(f"loss of the last {WINDOW}", "against fp32", "furthest"),
        ],
    )
    for model in models:
        for name in model.names:
            last = [each[-1] for each in model.smooth(name)]
            apart = model.apart(name) if name != PEER else []
            furthest = [max(each, key=abs) for each in apart]
            table.rows.append(
                [
                    TITLES[name],
                    f"{model.case['numel'] / 1e6:.1f} M",
                    str(model.case["tokens"]),
                    f"{model.case['lr']:g}",
                    ", ".join(f"{each:.4f}" for each in last),
                    _percents([each[-1] for each in apart]),
                    _percents(furthest),
                ]
            )
    table.notes.append(
        f"Losses are means of {WINDOW} steps; the last column is the largest difference between "
        "two such means that end at the same step. Several figures in a cell are of several seeds."
    )
    return table


def _percents(fractions: list[float]) -> str:
    return ", ".join(f"{each:+.2%}" for each in fractions)
