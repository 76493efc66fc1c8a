"""The checks of a platform: commands, and what their output must have."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.platforms.machine import Completed, Machine

_VERDICT = r"^Verdict: (.*?)(?: ·|$)"
_OUTCOME = r"^(?:CPU|Links|Link): .*|^[a-z_]+: (?:accuracy|loss).*"
_TEST_COUNTS = r"^=+ (.*) in [\d.]+s.* =+$"


@dataclass(frozen=True, slots=True)
class Check:
    """One command and its expected output."""

    name: str
    """Also the heading of its column."""
    command: str
    """For bash. `{runs}` stands for a folder for run directories, `{shared}` for `--shared` or nothing."""
    expected: str
    """Regular expression that must match in the output, which shows in the detail: its first group, or
    all of it."""
    also: str = ""
    """Regular expression of lines that the detail has, too."""
    timeout: float = 300
    """Seconds, before `Machine.slowness`."""
    needs_engine: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended."""

    passed: bool
    detail: str
    """One line."""
    seconds: float
    log: Path | None = None
    """File with the command and its full output, if the check failed."""


CHECKS = (
    Check("doctor", "testbed doctor", r"^ok\s+Docker engine +(.*?)\s*$", also=r"^warn .*?  (?=\S)\S+ ?\S*", timeout=60),
    Check("plan", "testbed plan topologies/quickstart.yaml", r"^.*slow-2.*$", timeout=60, needs_engine=False),
    Check(
        "virtual",
        "testbed up topologies/faults.yaml --runtime virtual --runs {runs}/virtual",
        r"^area: .*",
        needs_engine=False,
    ),
    Check(
        "process",
        "testbed up topologies/quickstart.yaml --runtime process --runs {runs}/process",
        _VERDICT,
        _OUTCOME,
        needs_engine=False,
    ),
    Check(
        "quickstart",
        "testbed up topologies/quickstart.yaml --runtime docker --runs {runs}/quickstart",
        _VERDICT,
        _OUTCOME,
    ),
    Check("links", "testbed up topologies/links.yaml --runs {runs}/links", _VERDICT, _OUTCOME),
    Check("faults", "testbed up topologies/faults.yaml --runtime docker --runs {runs}/faults", _VERDICT, _OUTCOME),
    Check("limits", "python -m tests.platforms.probes limits {runs} {shared}", "nothing wrong"),
    Check("SIGKILL, down", "python -m tests.platforms.probes killed {runs} {shared}", "nothing wrong"),
    Check("nothing left", "python -m tests.platforms.probes left {runs} {shared}", "nothing wrong"),
    Check(
        "tests",
        'python -m pytest -p no:cacheprovider -m "docker and not alone and not browser"',
        _TEST_COUNTS,
        timeout=1800,
    ),
)
