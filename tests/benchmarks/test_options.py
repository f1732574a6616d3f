"""Options of benchmarks that cannot be meant are refused before anything is measured."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import call_script


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("goodput --contenders sync", "'sync' is none of sync:STEPS"),
        ("goodput --rates=-1", "'-1' is not a number of kills"),
        ("goodput --seconds soon", "'soon' is not a number of seconds"),
        ("optimizers --ranks 3 --tokens 512", "--tokens: expected a multiple of 768, 256 a rank"),
        ("step_time --params 7b", "'7b' is not one of tiny, 5m, 34m, 93m, 150m"),
        ("step_time --ranks 2,0", "'0' is not an integer of at least 1"),
        ("step_time --contenders ours,horovod", "'horovod' is not one of ours, ours-ahead"),
        ("step_time --steps none", "'none' is not an integer of at least 1"),
        ("strategies --gbit 0", "'0' is not a speed"),
        ("strategies --ranks 3", "3 is not even"),
    ],
)
def test_bad_options_are_refused_at_once(command: str, complaint: str) -> None:
    script, *arguments = command.split()
    done = call_script(f"{script}.py", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
