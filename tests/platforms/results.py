"""Results per platform: the records, and the tables made from them in docs/evidence/platforms.md."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from testbed.host import cache
from tests.platforms.checks import CHECKS, Outcome
from tests.platforms.local import CHECKOUT

RECORDS = CHECKOUT / "docs" / "evidence" / "platforms.json"
PAGE = CHECKOUT / "docs" / "evidence" / "platforms.md"
BEGIN, END = "<!-- platforms: begin -->", "<!-- platforms: end -->"
"""Lines of the page around what is made of the records."""
_FACTS = {
    "engine": "Engine",
    "cgroup": "cgroup",
    "driver": "Driver",
    "kernel": "Kernel",
    "netem": "netem",
    "python": "Python",
    "architecture": "Architecture",
    "cores": "Cores",
}


@dataclass(slots=True)
class Result:
    """The last result of a check on a platform."""

    passed: bool
    detail: str
    seconds: float
    date: str
    commit: str


@dataclass(slots=True)
class Record:
    """Recorded results of a platform."""

    facts: dict[str, str] = field(default_factory=dict)
    unavailable: str | None = None
    """Why the platform could not be brought up at the last attempt; None if it could."""
    date: str = ""
    """Date of the last attempt."""
    checks: dict[str, Result] = field(default_factory=dict)


def load(path: Path = RECORDS) -> dict[str, Record]:
    """Return the records by platform; empty if there is no file."""
    if not path.exists():
        return {}
    return {name: _record(each) for name, each in json.loads(path.read_text(encoding="utf-8")).items()}


def save(records: Mapping[str, Record], path: Path = RECORDS) -> None:
    """Write the records."""
    entries = {name: asdict(records[name]) for name in sorted(records)}
    path.write_text(f"{json.dumps(entries, indent=1, ensure_ascii=False)}\n", encoding="utf-8")


@contextmanager
def changing(path: Path = RECORDS) -> Iterator[dict[str, Record]]:
    """The records, written when the block ends; other processes wait that long."""
    cache.folder().mkdir(parents=True, exist_ok=True)
    with (cache.folder() / "platforms.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = load(path)
        yield records
        save(records, path)


def came_up(records: dict[str, Record], name: str, facts: Mapping[str, str]) -> None:
    """Note that a platform has been brought up; drop results of an earlier one with other facts."""
    record = records.setdefault(name, Record())
    if record.facts != facts:
        record.checks.clear()
    record.facts, record.unavailable, record.date = dict(facts), None, today()


def unavailable(records: dict[str, Record], name: str, reason: str) -> None:
    """Note why a platform cannot be brought up. Its earlier results, with their dates, stay."""
    record = records.setdefault(name, Record())
    record.unavailable, record.date = " ".join(reason.split()), today()


def add(records: dict[str, Record], name: str, check: str, outcome: Outcome, commit: str) -> None:
    """Replace the result of `check`."""
    records[name].checks[check] = Result(
        outcome.passed, outcome.detail, round(outcome.seconds, 1), today(), commit
    )


def today() -> str:
    return time.strftime("%Y-%m-%d")


def write_page(records: Mapping[str, Record], page: Path = PAGE) -> None:
    """Replace what lies between BEGIN and END on the page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise RuntimeError(f"{page} lacks the lines {BEGIN} and {END}")
    page.write_text(f"{before}{begin}{markdown(records)}{end}{after}", encoding="utf-8")


def markdown(records: Mapping[str, Record]) -> str:
    """The tables of platforms and of results, and the details of both."""
    sections = [
        _table(["Platform", *_FACTS.values()], (_facts(*each) for each in sorted(records.items()))),
        _table(
            ["Platform", *(check.name for check in CHECKS), "Commit", "Date"],
            (_results(*each) for each in sorted(records.items()) if each[1].checks),
        ),
        _table(["Platform", "Why it could not be brought up", "Date"], _missing(records)),
        _table(["Platform", "Check", "Seconds", "Detail"], _details(records)),
    ]
    return "\n" + "\n".join(section for section in sections if section) + "\n"


def _facts(name: str, record: Record) -> list[str]:
    return [name, *(record.facts.get(fact, "–") for fact in _FACTS)]


def _results(name: str, record: Record) -> list[str]:
    dates = sorted({result.date for result in record.checks.values()})
    commits = dict.fromkeys(result.commit for result in record.checks.values())
    cells = (_cell(record.checks.get(check.name)) for check in CHECKS)
    return [name, *cells, " ".join(commits), " to ".join(dict.fromkeys([dates[0], dates[-1]]))]


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    return "passed" if result.passed else "**failed**"


def _missing(records: Mapping[str, Record]) -> Iterator[list[str]]:
    for name, record in sorted(records.items()):
        if record.unavailable is not None:
            yield [name, record.unavailable, record.date]


def _details(records: Mapping[str, Record]) -> Iterator[list[str]]:
    for name, record in sorted(records.items()):
        for check, result in record.checks.items():
            if result.detail != f"{check}: nothing wrong":
                failed = "" if result.passed else " (failed)"
                yield [name, f"{check}{failed}", f"{result.seconds:.0f}", result.detail]


def _table(heading: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [_row(heading), _row(["---"] * len(heading)), *map(_row, rows)]
    return "".join(lines) if len(lines) > 2 else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def _record(entry: Mapping[str, Any]) -> Record:
    checks = {name: Result(**result) for name, result in entry["checks"].items()}
    return Record(**{**entry, "checks": checks})
