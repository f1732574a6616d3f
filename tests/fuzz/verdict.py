"""What the runs of a program say about the library.

Ours has to compute what the unsharded program does wherever torch's FSDP2 does. Elsewhere it has
to compute that, or raise. A module computes with what was gathered when its turn came, so a hook of
a block that writes to that block is too late in both: there ours has to be as the unsharded program
with values as gathered, or as torch's. And nothing may hang, or die.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tests.fuzz.program import (
    Program,
    freezes_ahead,
    loosens_ties,
    returns_views_in_objects,
    returns_views_twice,
    runs_copies_on_parted_ranks,
    writes_before_a_use_on_one_rank,
)
from tests.fuzz.worker import Report

#: Not as the unsharded program, but as torch's FSDP2.
AS_TORCH = "differs as torch does"

_REFUSED_TIES = "was tied to it, but is another parameter now"
_REFUSED_STALE = (
    "was unsharded, so its full parameter is out of date",
    "were replaced (by load_state_dict(assign=True), to() or swap_tensors) between a forward",
    "load_state_dict() would have replaced values that its running forward or backward needs",
    # An optimizer that has none of the model's parameters trains nothing, as torch's in silence.
    "This step would not change the model",
    # Modules hold full parameters after an exception in backward: docs/torch-compatibility.md.
    "both its full parameter, which its module holds while it runs, and its shard were written to",
)

#: There a view of what is freed cannot be replaced. Torch's module returns it, and a program that
#: raises before it reads the view never notices.
_REFUSED_VIEW = "returns a view of its own parameter inside an object"

#: docs/torch-compatibility.md has it under "Not detected".
_DIVERGED = "RanksDivergedError"

# What is frozen after its gather is in the graph of the forward, which needs the values of before.
_REFUSED_STEPPED = "modified by an inplace operation"

_Ranks = Mapping[int, Report]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a program on one transport.

    Attributes:
        kind: in a few words, to count by.
        is_find: whether that is wrong.
        detail: by rank, where it is wrong.
    """

    kind: str
    is_find: bool = False
    detail: str = ""


def how_torch_ran(ranks: _Ranks | None) -> str:
    """Say in a word how torch's FSDP2 ran a program."""
    if ranks is None:
        return "was not asked"
    reports = list(ranks.values())
    raised = [each.raised for each in reports if each.raised is not None]
    if any("hung" in text[:4] for text in raised):
        return "hangs"
    if any(text.startswith("died") for text in raised):
        return "dies"
    if raised:
        return "raises"
    if any(each.unsharded != "complete" for each in reports):
        return "completes"
    return "differs" if any(each.differs for each in reports) else "equal"


def judge(program: Program, ours: _Ranks, torchs: _Ranks | None) -> Verdict:
    """Judge the reports of all ranks on one transport by those of torch's FSDP2."""
    torch_ran = how_torch_ran(torchs)
    beside = f"torch {torch_ran}"
    reports = list(ours.values())
    raised = [each.raised for each in reports if each.raised is not None]
    detail = _detail(ours)
    if any(text.startswith("hung") for text in raised):
        return Verdict(f"hangs ({beside})", True, detail)
    if any(text.startswith("died") for text in raised):
        if torch_ran == "dies" and any(each.beside == "parameter" for each in program.blocks):
            # docs/torch-compatibility.md: whoever reads a view of what was freed ends the process.
            return Verdict("reads what was freed, as with torch")
        return Verdict(f"dies ({beside})", True, detail)
    means = all(each.unsharded in ("complete", "undefined") for each in reports)
    differs = any(each.differs for each in reports)
    as_torch = all(each.differs_from_torch is None for each in reports)
    as_gathered = all(each.differs_from_gathered is None for each in reports)
    if not means and not raised:
        if as_torch or as_gathered:
            return Verdict(f"unsharded raises, ours completes ({beside})")
        return Verdict(f"differs where unsharded raises ({beside})", True, detail)
    if differs:
        if as_torch:
            return Verdict(AS_TORCH)
        if runs_copies_on_parted_ranks(program) and any(_DIVERGED in text for text in raised):
            # A gather of one model met that of the other before the ranks noticed.
            return Verdict("mixes up models of the same names on ranks that part")
        # Torch's module reads a freed view anew, into which the next gather has put later values.
        says_nothing = any(each.missed for each in reports) or returns_views_twice(program)
        if as_gathered and (torch_ran != "equal" or says_nothing):
            return Verdict(f"equal with values as gathered ({beside})")
        return Verdict(f"differs ({beside})", True, detail)
    if raised:
        if loosens_ties(program) and all(_REFUSED_TIES in text for text in raised):
            # torch ties them again without a word, which shows only once they part.
            return Verdict(f"refuses ties that were loosened ({beside})")
        if all(any(refused in text for refused in _REFUSED_STALE) for text in raised):
            # torch goes on with values, or parameters, of before: no difference shows if a program
            # ends, or raises, before it uses what comes of them.
            return Verdict(f"refuses what is out of date ({beside})")
        if returns_views_in_objects(program) and all(_REFUSED_VIEW in text for text in raised):
            return Verdict(f"refuses a view of what is freed ({beside})")
        ahead = freezes_ahead(program) or writes_before_a_use_on_one_rank(program)
        if ahead and all(_REFUSED_STEPPED in text for text in raised):
            return Verdict(f"refuses a write between forward and backward ({beside})")
        if torch_ran == "equal":
            return Verdict("raises (torch equal)", True, detail)
        return Verdict(
            f"raises ({beside})" if means else "unsharded raises, ours too", False, detail
        )
    return Verdict(f"equal ({beside})")


def _detail(ranks: _Ranks) -> str:
    lines = []
    for rank, report in sorted(ranks.items()):
        said = []
        if report.differs:
            said.append(f"differs at {report.differs}")
        if report.differs_from_torch not in (None, "?"):
            said.append(f"from torch at {report.differs_from_torch}")
        if report.differs_from_gathered:
            said.append(f"from values as gathered at {report.differs_from_gathered}")
        if report.raised:
            said.append(f"raised at {report.raised}")
        if report.unsharded != "complete":
            said.append(f"unsharded: {report.unsharded}")
        lines.append(f"  rank {rank}: {'; '.join(said) or 'equal'}")
    return "\n".join(lines)
