"""How do the reports of all ranks become one report of the test?

The first cause is on top, as pytest shows it; what became of the other ranks is folded into a
line each; captured output is by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddp_utils.ground.errors import RankFailedError
from ddp_utils.start.verdict import describe
from ddp_utils.testing.records import PHASES, Files, Phase, Record, Trouble, shorten

__all__ = ["Outcome", "combine"]


GOOD = ("passed", "unexpectedly passed", "skipped")


@dataclass
class Outcome:
    """What one phase of the test amounts to."""

    outcome: str = "passed"
    longrepr: Any = None
    wasxfail: str | None = None
    duration: float = 0.0
    sections: list[tuple[str, str]] = field(default_factory=list)
    user_properties: list[tuple[str, object]] = field(default_factory=list)

    def write_to(self, report: pytest.TestReport) -> None:
        """Make this the content of the report of the parent's own phase."""
        report.outcome = self.outcome  # type: ignore[assignment]
        report.longrepr = self.longrepr
        report.duration = self.duration or report.duration
        report.sections = [*report.sections, *self.sections]
        report.user_properties = self.user_properties
        if self.wasxfail is not None:
            report.wasxfail = self.wasxfail
        elif hasattr(report, "wasxfail"):
            del report.wasxfail


@dataclass
class _Told:
    """One rank's report of one phase, and how to read it."""

    rank: int
    phase: Phase
    report: pytest.TestReport

    @property
    def kind(self) -> str:
        """Return how the phase ended, with expected failures and lost peers told apart."""
        expected = hasattr(self.report, "wasxfail")
        if self.report.passed:
            return "unexpectedly passed" if expected else "passed"
        if self.report.skipped:
            return "failed as expected" if expected else "skipped"
        if self.phase.lost_peer:
            return "lost a peer"
        return "failed" if self.phase.raised else "unexpectedly passed (strict)"


class _Job:
    """All that is known of one test on all ranks."""

    def __init__(
        self,
        records: Sequence[Sequence[Record]],
        error: RankFailedError | None,
        load: Callable[[dict[str, Any]], pytest.TestReport],
    ) -> None:
        self.size = len(records)
        self.error = error
        self.told: dict[str, list[_Told]] = {when: [] for when in PHASES}
        self.troubles: dict[int, str] = {}
        for rank, ones in enumerate(records):
            for record in ones:
                if isinstance(record, Phase):
                    told = _Told(rank, record, load(record.report))
                    self.told[str(told.report.when)].append(told)
                elif isinstance(record, Trouble):
                    self.troubles[rank] = record.text

    def of(self, rank: int) -> dict[str, _Told]:
        """Return what one rank has told, by phase."""
        ones = ((when, told) for when in PHASES for told in self.told[when])
        return {when: told for when, told in ones if told.rank == rank}

    def reached(self, rank: int) -> str:
        """Return the phase in which a rank was when it was last heard of."""
        told = self.of(rank)
        if "setup" in told and not told["setup"].report.passed:
            return "teardown"
        return next((when for when in PHASES if when not in told), "teardown")

    @property
    def only_left_behind(self) -> bool:
        """Whether ranks were ended for no other reason than that another one's test had failed."""
        return type(getattr(self.error, "cause", None)).__name__ == "LeftBehindError"

    @property
    def crashed(self) -> bool:
        """Whether a rank's process ended by itself, in the middle of the test."""
        return self.error is not None and self.error.rank in self.crashes()

    def crashes(self) -> dict[int, str]:
        """Return how the processes ended that ended by themselves."""
        ends = () if self.error is None else self.error.failures
        return {end.rank: describe(end) for end in ends if end.kind in ("killed", "exited")}

    def failed_before(self, when: str) -> bool:
        """Whether a rank has failed in an earlier phase."""
        earlier = PHASES[: PHASES.index(when)]
        return any(told.kind not in GOOD for phase in earlier for told in self.told[phase])

    def silent(self, when: str) -> list[int]:
        """Return the ranks that have not told of a phase, where nothing else tells why."""
        every = [told for ones in self.told.values() for told in ones]
        explained = self.error is not None and not self.only_left_behind
        if explained or any(told.kind not in GOOD for told in every):
            return []
        told = {one.rank for one in self.told[when]}
        return [
            rank for rank in range(self.size) if rank not in told and self.reached(rank) == when
        ]


def combine(
    records: Sequence[Sequence[Record]],
    error: RankFailedError | None,
    load: Callable[[dict[str, Any]], pytest.TestReport],
    files: Sequence[Files] = (),
) -> dict[str, Outcome]:
    """Return what each phase amounts to.

    Args:
        records: What each rank has told.
        error: How the job failed, if a rank crashed, or hung, or could not start.
        load: Makes a report from what a record holds.
        files: Where each rank's output is.
    """
    job = _Job(records, error, load)
    combined = {}
    for when in PHASES:
        outcome = _judge(job, when, files)
        reports = [told.report for told in job.told[when]]
        outcome.duration = max((report.duration for report in reports), default=0.0)
        outcome.sections = _sections(job, when, files)
        outcome.user_properties = next(
            (told.report.user_properties for told in job.told[when] if told.rank == 0), []
        )
        combined[when] = outcome
    return combined


def _judge(job: _Job, when: str, files: Sequence[Files]) -> Outcome:
    """Decide one phase."""
    by_kind: dict[str, list[_Told]] = {}
    for told in sorted(job.told[when], key=lambda told: told.phase.moment):
        by_kind.setdefault(told.kind, []).append(told)
    if job.failed_before(when):
        by_kind.pop("lost a peer", None)  # an effect of that
    text = _trouble(job, when, files)
    if "failed" in by_kind and (text is None or not job.crashed):
        return _failure(job, _first(by_kind["failed"]), files)
    if text is not None:
        return Outcome("failed", text)
    if "skipped" in by_kind:
        if len(by_kind["skipped"]) < job.size:
            return Outcome("failed", _one_sided_skip(job, by_kind["skipped"][0], files))
        lowest = min(by_kind["skipped"], key=lambda told: told.rank)
        return Outcome("skipped", lowest.report.longrepr)
    for kind in ("failed as expected", "lost a peer", "unexpectedly passed (strict)"):
        if kind in by_kind:
            return _failure(job, _first(by_kind[kind]), files)
    silent = job.silent(when)
    if silent:
        return Outcome("failed", f"rank {', '.join(map(str, silent))} told nothing of its {when}")
    if "unexpectedly passed" in by_kind:
        return Outcome(wasxfail=by_kind["unexpectedly passed"][0].report.wasxfail)
    return Outcome()


def _first(failures: Sequence[_Told]) -> _Told:
    """Return the earliest, or its equal on the lowest rank: chance decides between equals."""
    place = _place(failures[0])
    alike = [told for told in failures if _place(told) == place]
    return min(alike, key=lambda told: told.rank)


def _failure(job: _Job, root: _Told, files: Sequence[Files]) -> Outcome:
    """Return a failure as pytest shows it on the rank that is its cause."""
    report = root.report
    longrepr: Any = report.longrepr
    others = "\n".join(_others(job, {root.rank}, files))
    headline = f"rank {root.rank} of {job.size} {root.kind}"
    if job.size > 1 and hasattr(longrepr, "addsection"):
        longrepr.addsection(headline, others, "-")
        crash = getattr(longrepr, "reprcrash", None)
        if crash is not None:
            crash.message = f"rank {root.rank}: {crash.message}"
    elif job.size > 1:
        longrepr = f"{longrepr}\n{headline}\n{others}"
    return Outcome(report.outcome, longrepr, getattr(report, "wasxfail", None))


def _trouble(job: _Job, when: str, files: Sequence[Files]) -> str | None:
    """Return what went wrong in this phase outside of the test's own exceptions."""
    if job.troubles and when == "setup":
        ranks: dict[str, list[str]] = {}
        for rank, text in job.troubles.items():
            ranks.setdefault(text, []).append(str(rank))
        return "\n\n".join(f"rank {', '.join(found)}: {text}" for text, found in ranks.items())
    if job.error is None or job.only_left_behind:
        return None
    if job.troubles or when != job.reached(job.error.rank):
        return None
    ended = {end.rank for end in job.error.failures if end.kind == "ended"}
    hung = job.error.rank in ended  # and their stacks are in the text
    shown = ended if hung else {job.error.rank}
    lines = [line for line in str(job.error).splitlines() if not line.startswith("  rank")]
    return "\n".join([shorten("\n".join(lines)), *_others(job, shown, files)])


def _one_sided_skip(job: _Job, skipped: _Told, files: Sequence[Files]) -> str:
    return (
        f"rank {skipped.rank} of {job.size} skipped this test, and not all ranks did. Skip on all "
        f"of them, by something that they all see alike.\n"
        f"rank {skipped.rank}: {_summary(skipped)}\n"
        + "\n".join(_others(job, {skipped.rank}, files))
    )


def _others(job: _Job, shown: set[int], files: Sequence[Files]) -> list[str]:
    """Return one line for all ranks that ended alike, but for those that are shown already."""
    alike: dict[str, list[str]] = {}
    for rank in range(job.size):
        if rank not in shown:
            alike.setdefault(_fate(job, rank, files), []).append(str(rank))
    return [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}"
        for text, ranks in alike.items()
    ]


def _fate(job: _Job, rank: int, files: Sequence[Files]) -> str:
    """Return what became of a rank, in one line."""
    told = list(job.of(rank).values())
    for one in told:
        if one.kind != "passed":
            return _summary(one)
    if told and told[-1].report.when == "teardown":
        return "passed"
    if rank in job.crashes():
        return job.crashes()[rank]
    place = files[rank].stopped_at() if files else ""
    at = f" at {place}" if place else ""
    return f"did not end: it was in its {job.reached(rank)}{at}"


def _summary(told: _Told) -> str:
    """Return how a phase ended, why and where, in one line."""
    text = told.kind if told.report.when == "call" else f"{told.kind} in its {told.report.when}"
    longrepr: Any = told.report.longrepr
    if isinstance(longrepr, tuple):
        return f"{text}: {longrepr[2]}"
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        message = "" if told.phase.lost_peer else f": {crash.message.partition(chr(10))[0]}"
        return f"{text} at {_place(told)}{message}"
    return f"{text}: {longrepr}" if longrepr else text


def _place(told: _Told) -> str:
    """Return the outermost line of a failure's traceback, which is the test's own."""
    longrepr: Any = told.report.longrepr
    if getattr(longrepr, "reprcrash", None) is None:
        return ""
    entries = longrepr.reprtraceback.reprentries
    places = [entry.reprfileloc for entry in entries if getattr(entry, "reprfileloc", None)]
    place = places[0] if places else longrepr.reprcrash
    return f"{place.path}:{place.lineno}"


def _sections(job: _Job, when: str, files: Sequence[Files]) -> list[tuple[str, str]]:
    """Return what the ranks have written up to the end of a phase, and logged."""
    sections: list[tuple[str, str]] = []
    for rank, own in enumerate(files):
        name = f" (rank {rank})" if job.size > 1 else ""
        told = job.of(rank)
        start = (0, 0)
        for phase in PHASES[: PHASES.index(when) + 1]:
            ended = phase in told
            if not ended and phase != job.reached(rank):
                continue
            end = told[phase].phase.written if ended else (None, None)
            for kind, first, last in zip(("out", "err"), start, end, strict=True):
                text = own.output(kind, first, last)
                if text and not ended:
                    text = shorten(text)  # of a crash
                if text:
                    sections.append((f"Captured std{kind} {phase}{name}", text))
            if ended:
                start = told[phase].phase.written
        if when in told:
            sections += [(f"{title}{name}", text) for title, text in told[when].report.sections]
    return sections
