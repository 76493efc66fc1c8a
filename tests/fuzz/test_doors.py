"""Each door for a few inputs, and for a minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import pytest

from tests.fuzz import harness
from tests.fuzz.doors import DOORS, SLOW
from tests.fuzz.harness import SECRET, Door, Report, run

_COUNT, _MOST, _SECONDS = 60, 1000, 60.0


@pytest.mark.parametrize("name", [name for name in DOORS if name not in SLOW])
def test_values_or_errors_with_a_place_come_out(name: str) -> None:
    report = run(name, DOORS[name], 1, count=_COUNT)
    _check(report)
    assert min(report.outcomes["value"], report.outcomes["refused"]) > 0, report


@pytest.mark.hosts
@pytest.mark.parametrize("name", DOORS)
def test_a_minute_of_inputs(name: str) -> None:
    """Always the same ones, so that a change is what fails; for others `python -m tests.fuzz --seed`."""
    _check(run(name, DOORS[name], 1000, count=_MOST, seconds=_SECONDS))


def _check(report: Report) -> None:
    alike = [f"--seed {some[0].seed}: {some[0].text}" for some in report.kinds_of_faults().values()]
    assert not alike, "\n".join([str(report), *alike])


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda: {"b": 1}["a"], "KeyError"),
        (lambda: [{"a": float("nan")}], "the number nan"),
        (lambda: _refuse("a.csv: \x1b[2J"), "not printable"),
        (lambda: _refuse("somewhere"), "no place"),
        (lambda: _refuse(f"a.csv: {SECRET}"), "a secret"),
        (lambda: Path("../outside/a.csv").touch(), "outside of its folder"),
        (lambda: b"x" * 2**27, "MiB of memory"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_whatever_else_comes_out_is_a_fault(
    read: Callable[[], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "MEMORY", 2**26)
    door = Door(lambda _: nullcontext(lambda _: read()), r"a\.csv", (ValueError,))
    (fault,) = run("", door, 1, count=1).faults
    assert told in fault.text
