"""What a step in backward saves, and what it costs: ours with and without it, and torch's FSDP2.

    python benchmarks/in_backward.py --params 215m --time-params 150m

Memory is measured as by ``memory.py``, each contender alone, and time as by ``step_time.py``, all
contenders taking turns. The exit code is 1 if the step in backward takes over 0.80 x the peak PSS
of FSDP2, or more than its time, or if losses differ.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

from _in_backward_tables import in_backward_tables, too_much
from _models import PRESETS
from _options import cases, parser, positive_int
from _report import announce, document, save
from _worlds import stop_server
from memory import measure, predict
from step_time import Match

CONTENDERS = "ours-in-backward,ours,fsdp2,fsdp2-in-backward"


def _options() -> argparse.Namespace:
    made = parser(__doc__.splitlines()[0], CONTENDERS)
    made.add_argument("--time-params", choices=list(PRESETS), help="model to time (as --params)")
    made.add_argument("--rounds", type=positive_int, default=5, help="turns of a contender (5)")
    made.add_argument("--steps", type=positive_int, default=3, help="steps in a turn (3)")
    made.add_argument("--warmup", type=positive_int, default=3, help="steps before these (3)")
    options = made.parse_args()
    options.malloc, options.worlds = "prompt", "resident"
    return options


def main() -> int:
    options = _options()
    console = announce()
    measured: list[dict[str, Any]] = []
    for case in cases(options):
        timed = replace(case, params=options.time_params or case.params)
        memory = {
            **asdict(case),
            "transport": options.transport,
            "malloc": options.malloc,
            "formula": asdict(predict(case)),
            "contenders": {name: measure(case, name, options) for name in options.contenders},
        }
        measured.append({"memory": memory, "time": Match(timed, options, console).play()})
        content = document("in_backward", measured)
        for table in in_backward_tables(content)[-2:]:
            table.show(console)
        if options.json:
            save(options.json, content)
    console.print(content["command"], highlight=False, soft_wrap=True)
    wrong = [found for case in measured if (found := too_much(case))]
    console.print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
