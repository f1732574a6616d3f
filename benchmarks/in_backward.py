"""What a step in backward saves, and what it costs: ours with and without it, and torch's FSDP2.

    python benchmarks/in_backward.py --params 215m --time-params 150m

Memory is measured as by ``memory.py``, each contender alone, and time as by ``step_time.py``, all
contenders taking turns. The exit code is 1 if the step in backward takes over 0.80 x the peak PSS
of FSDP2, or more than its time, or if losses differ.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from _contenders import Case
from _in_backward_tables import in_backward_tables, too_much
from _models import PRESETS
from _options import cases, parser, positive_int
from _report import announce, publish_each
from _worlds import stop_server
from memory import measure_all
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

    def play(case: Case) -> dict[str, Any]:
        timed = replace(case, params=options.time_params or case.params)
        memory = measure_all(case, options)
        return {"memory": memory, "time": Match(timed, options, console).play()}

    played = map(play, cases(options))
    measured = publish_each(console, "in_backward", played, in_backward_tables, options.json)
    wrong = [found for case in measured if (found := too_much(case))]
    console.print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
