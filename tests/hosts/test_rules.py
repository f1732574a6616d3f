"""One run over hosts for each rule of a job that only hosts can show; ranks are small scripts.

The rules themselves are in ``tests/elastic/test_membership.py``, and how hosts meet in
``tests/elastic/test_rendezvous.py``. Mostly these jobs wait until it is certain that a host is
gone. So all run at once, each over hosts of its own, and the tests look at their results.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.hosts.network import needs_hosts
from tests.hosts.scripted import WHERE, Job

pytestmark = needs_hosts

SILENCE = 5.0  # seconds, where hosts are silent
Ended = list[tuple[int, str]]  # exit codes and standard errors


def killed(folder: Path) -> Ended:
    """Kill host 0."""
    with Job.over(3, folder, "3", ends=[1]) as job:
        job.commands[0].kill()
        job.wait_for(1, 2)
        return job.ended()


def paused(folder: Path) -> Ended:
    """Suspend host 0, and wake it once the others have continued."""
    with Job.over(3, folder, "3", ends=[1], silence=SILENCE) as job:
        job.commands[0].signal_all(signal.SIGSTOP)
        job.wait_for(1, 2)
        job.commands[0].signal_all(signal.SIGCONT)
        return job.ended()


def cut_off(folder: Path) -> Ended:
    """Cut the link of host 0."""
    with Job.over(3, folder, "3", ends=[1], silence=SILENCE) as job:
        job.hosts[0].ip("link", "set", "eth0", "down")
        return job.ended()


def cut_off_from_one_other(folder: Path) -> Ended:
    """Cut the link between two hosts."""
    with Job.over(2, folder, "2", ends=[1], silence=SILENCE) as job:
        job.hosts[0].ip("link", "set", "eth0", "down")
        return job.ended()


def stopped(folder: Path) -> Ended:
    """Interrupt one host of two."""
    with Job.over(2, folder, "2") as job:
        job.commands[1].program.send_signal(signal.SIGINT)
        return job.ended()


JOBS = (
    killed,
    paused,
    cut_off,
    cut_off_from_one_other,
    stopped,
)

Jobs = Mapping[Callable[[Path], Ended], Future[Ended]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """All jobs, running."""
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor() as pool:
        yield {job: pool.submit(job, folder / job.__name__) for job in JOBS}


CLOSED = "the connection was closed"
SILENT = f"no sign of life for {SILENCE:.0f} s"
AGAIN = "Start it again on all hosts with --auto-resume\n"


def assert_continue(ended: Ended, loss: str) -> None:
    """Check that hosts name the loss, and continue to a good end."""
    for code, told in ended:
        assert (code, told) == (0, f"restart    {loss}\n")


def assert_ends(ended: tuple[int, str], loss: str) -> None:
    """Check that a host ends with one line that says how to go on."""
    assert ended == (1, f"error: host 0 ({WHERE}) was lost: {loss}; the job ends here. {AGAIN}")


def assert_outnumbered(ended: tuple[int, str]) -> None:
    """Check that host 0 ends, since the others may have continued."""
    code, told = ended
    assert code == 1
    for number in (1, 2):  # both at once, or one after the other
        assert f"host {number} (10.77.0.{number + 1}) was lost: " in told
    assert told.endswith(
        "the hosts that are silent are more than those that are left, and may continue. Start the "
        "job again with --auto-resume\n"
    )


def test_the_others_continue_if_host_0_is_killed(jobs: Jobs) -> None:
    _, *others = jobs[killed].result()
    assert_continue(others, f"host 0 (10.77.0.1) was lost: {CLOSED}; continuing with 2 hosts")


def test_a_host_0_that_wakes_finds_a_majority_gone_and_ends(jobs: Jobs) -> None:
    zero, *others = jobs[paused].result()
    assert_continue(others, f"host 0 (10.77.0.1) was lost: {SILENT}; continuing with 2 hosts")
    assert_outnumbered(zero)


def test_a_majority_continues_without_a_host_0_that_is_cut_off(jobs: Jobs) -> None:
    zero, *others = jobs[cut_off].result()
    assert_continue(others, f"host 0 (10.77.0.1) was lost: {SILENT}; continuing with 2 hosts")
    assert_outnumbered(zero)


def test_of_two_hosts_that_cannot_reach_each_other_only_host_0_continues(jobs: Jobs) -> None:
    zero, other = jobs[cut_off_from_one_other].result()
    assert_continue([zero], f"host 1 (10.77.0.2) was lost: {SILENT}; continuing with 1 host")
    assert_ends(other, SILENT)


def test_ctrl_c_on_one_host_stops_all_and_is_no_reason_to_begin_again(jobs: Jobs) -> None:
    zero, other = jobs[stopped].result()
    assert (zero[0], other[0]) == (128 + signal.SIGTERM, 128 + signal.SIGINT)
    for _, told in (zero, other):
        assert told == "Stopped in round 0.\n"
