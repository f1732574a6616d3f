"""Compare the plans of random trainings with what their ranks count, until told to stop.

    python -m tests.fuzz.plans --trainings 200 --seed 1

``tests/planning/test_bytes.py`` does so for a few fixed ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.planning.counted import Training
from tests.planning.test_bytes import check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if any plan was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.plans")
    parser.add_argument("--trainings", type=int, default=50, help="how many to draw")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first one; the next has the next"
    )
    options = parser.parse_args(arguments)
    wrong = []
    for seed in range(options.seed, options.seed + options.trainings):
        training = Training.draw(seed)
        try:
            check(training)
        except Exception as error:  # of the ranks, too: each is a find
            wrong.append(seed)
            print(f"seed {seed}: {training}\n{error}\n", flush=True)
    print(f"{options.trainings - len(wrong)} of {options.trainings} plans are exact")
    if wrong:
        print(f"others: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
