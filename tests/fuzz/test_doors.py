"""Each door for a few inputs, always the same; for a minute, with inputs that are new each day."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.fuzz.doors import DOORS, SLOW
from tests.fuzz.harness import Report, run

_COUNT, _SECONDS = 60, 60.0


@pytest.mark.parametrize("name", [name for name in DOORS if name not in SLOW])
def test_values_or_errors_with_a_place_come_out(name: str) -> None:
    report = run(name, DOORS[name], 1, count=_COUNT)
    _check(report)
    assert min(report.outcomes["value"], report.outcomes["refused"]) > 0, report


@pytest.mark.hosts
@pytest.mark.parametrize("name", DOORS)
def test_new_inputs_of_each_day(name: str) -> None:
    seed = 10**6 * datetime.now(UTC).date().toordinal()
    _check(run(name, DOORS[name], seed, seconds=_SECONDS))


def _check(report: Report) -> None:
    alike = [f"--seed {some[0].seed}: {some[0].text}" for some in report.kinds_of_faults().values()]
    assert not alike, "\n".join([str(report), *alike])
