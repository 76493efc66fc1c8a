"""The run directory: who gets which."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from testbed.rundir.directory import RunDirectory


def test_runs_started_in_the_same_second_are_distinct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = iter(["0a1b", "0a1b", "0a1b", "c2d3"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(digits))
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-120000")
    first, second = (RunDirectory.new(tmp_path / "runs", "study").run for _ in range(2))
    assert (first, second) == ("study-20260101-120000-0a1b", "study-20260101-120000-c2d3")
