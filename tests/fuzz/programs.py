"""Random programs on torch's FSDP2, on ours and on nothing: ``python -m tests.fuzz.programs``.

    python -m tests.fuzz.programs --programs 1000 --seed 1
    python -m tests.fuzz.programs --programs 1000 --device cuda --transports c10d collectives
    python -m tests.fuzz.programs --replay "Program(blocks=(Block(),), steps=(Forward(),))"

Prints how many programs ran and how fast, what was in them, what became of them, and every find as
a line that can be replayed. The exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import sabotage
from tests.fuzz.campaign import (
    Judged,
    Tally,
    distinct,
    run_all,
    run_campaign,
    smallest,
    tally,
)
from tests.fuzz.generator import generate
from tests.fuzz.pool import Pool
from tests.fuzz.program import parse
from tests.fuzz.runtimes import TRANSPORTS
from tests.fuzz.shrink import size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, or one program again."""
    options = _parser().parse_args(arguments)
    if options.replay:
        return _replay(options)
    programs = generate(options.programs, options.seed, options.world)
    starts: list[int] = []
    judged = run_campaign(
        programs,
        options.world,
        options.transports,
        options.pools,
        options.sabotage,
        options.device,
        options.hosts,
        starts.append,
    )
    counted = tally(judged, _print_progress)
    print(f"{sum(starts)} worlds of {options.world} ranks were started")
    _print_tally(counted)
    if counted.finds:
        _print_finds(counted, options)
    return 1 if counted.finds else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.programs")
    parser.add_argument("--programs", type=int, default=300, help="how many to generate")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same programs")
    parser.add_argument("--world", type=int, choices=(1, 2, 3, 4), default=2, help="ranks")
    parser.add_argument(
        "--transports", nargs="+", choices=(*TRANSPORTS, "auto"), default=list(TRANSPORTS)
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks")
    parser.add_argument("--hosts", type=int, default=1, help="act as if ranks were on so many")
    parser.add_argument("--pools", type=int, default=2, help="worlds of ranks at once")
    parser.add_argument("--shrink", type=int, default=10, help="how many finds to shrink")
    parser.add_argument("--sabotage", choices=list(sabotage.WAYS), default="", help="break ours")
    parser.add_argument("--replay", help="a printed program, or a file with one on every line")
    parser.add_argument("--times", type=int, default=1, help="how often to replay it")
    return parser


def _pool(world: int, options: argparse.Namespace) -> Pool:
    return Pool(world, options.sabotage, device=options.device, hosts=options.hosts)


def _replay(options: argparse.Namespace) -> int:
    text = options.replay
    if not text.lstrip().startswith("Program("):
        path = Path(text)
        if not path.is_file():
            print(f"--replay: expected a printed Program(...) or a file, found {text!r}")
            return 2
        text = path.read_text()
    lines = [line for line in text.splitlines() if line.lstrip().startswith("Program(")]
    try:
        programs = [parse(line.strip()) for line in lines]
    except ValueError as error:
        print(f"--replay: {error}")
        return 2
    found = False
    for program in programs:
        with _pool(program.world, options) as pool:
            for judged in run_all(pool, [program] * options.times, options.transports):
                _print_judged(judged)
                found = found or bool(judged.finds)
    return 1 if found else 0


def _print_progress(counted: Tally, judged: Judged) -> None:
    """Print finds as they come, as they are, in case that nobody waits for the end."""
    if judged.finds:
        kinds = ", ".join(f"{name} {verdict.kind}" for name, verdict in judged.finds.items())
        print(f"found in program {counted.programs}: {kinds}\n{judged.program}", file=sys.stderr)
    if counted.programs % 100 == 0:
        rate = counted.programs / counted.seconds
        print(f"{counted.programs} programs, {rate:.1f} a second", file=sys.stderr)


def _print_tally(counted: Tally) -> None:
    rate = counted.programs / max(counted.seconds, 1e-9)
    print(f"{counted.programs} programs in {counted.seconds:.0f} s, {rate:.1f} a second")
    each = counted.processor_seconds / max(counted.programs, 1)
    print(f"{each:.2f} s of processors for each\n")
    for title, counts in (
        ("in so many programs", counted.features),
        ("verdicts", counted.kinds),
        ("raised by ours", counted.raised),
        ("raised by torch", counted.raised_by_torch),
    ):
        print(f"{title}:")
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            print(f"  {count:6}  {name}")
        print()
    print("different as torch's is, the shortest:")
    for program in sorted(set(counted.as_torch), key=size)[:5]:
        print(f"  {program}")
    print()


def _print_finds(counted: Tally, options: argparse.Namespace) -> None:
    """Shrink the finds that differ in kind, several at once, and print them."""
    print(f"{len(counted.finds)} finds; the smallest programs that show them:\n")
    shrunk: list[Judged] = []
    left = list(counted.finds)
    with concurrent.futures.ThreadPoolExecutor(options.pools) as threads:
        while left and len(shrunk) < options.shrink:
            some: list[Judged] = []
            for find in left:
                if len(some) < options.pools and list(
                    distinct([find], [each.program for each in some])
                ):
                    some.append(find)
            small = list(threads.map(lambda find: _shrunk(find, options), some))
            for find, smaller in zip(some, small, strict=True):
                if not smaller.finds:
                    print("not seen again:")
                    smaller = find
                if smaller.program not in [each.program for each in shrunk]:
                    shrunk.append(smaller)
                    _print_judged(smaller)
            left = list(
                distinct(
                    [each for each in left if each not in some], [each.program for each in shrunk]
                )
            )


def _shrunk(find: Judged, options: argparse.Namespace) -> Judged:
    with _pool(options.world, options) as pool:
        return smallest(pool, find)


def _print_judged(judged: Judged) -> None:
    print(judged.program)
    print(f"  torch: {judged.torch}")
    for name, verdict in judged.verdicts.items():
        print(f"  {name}: {verdict.kind}")
        if verdict.detail:
            print("\n".join(f"  {line}" for line in verdict.detail.splitlines()))
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
