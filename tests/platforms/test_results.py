"""Judgement of a check's output, and the tables made from the records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.platforms import checks, results
from tests.platforms.checks import Check, Outcome
from tests.platforms.machine import Completed

CHECK = Check("quickstart", "testbed up --runs {runs}", r"^Verdict: \w+", r"^CPU: .*")
FACTS = {"engine": "Docker 28.5.2", "cgroup": "v1"}


class Answering:
    """A machine on which every command ends in the same way."""

    slowness = 1.0
    clone: Path | None = None

    def __init__(self, completed: Completed, engine: str = "Docker 28.5.2") -> None:
        self.facts: Mapping[str, str] = {"engine": engine}
        self.commands: list[str] = []
        self._completed = completed

    def run(self, command: str, *, timeout: float) -> Completed:
        self.commands.append(command)
        return self._completed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def outcome(exit_code: int, output: str) -> Outcome:
    machine = Answering(Completed(exit_code, output, 2.0))
    ((_, found),) = checks.run(machine, "sid", [CHECK])
    return found


def test_check_passes_with_exit_code_zero_and_the_expected_line() -> None:
    found = outcome(0, "CPU: 1% less\nVerdict: valid · Next: …\n")
    assert found == Outcome(True, "Verdict: valid; CPU: 1% less", 2.0, None)


@pytest.mark.parametrize(
    ("exit_code", "output", "detail"),
    [
        (1, "Verdict: valid\nerror: no room\nbye", "exit code 1: error: no room"),
        (0, "nothing", "exit code 0: nothing"),
        (0, "no Verdict: valid", "exit code 0: no Verdict: valid"),
        (124, "Verdict: valid", "timed out"),
    ],
)
def test_failed_check_keeps_its_output(exit_code: int, output: str, detail: str) -> None:
    found = outcome(exit_code, output)
    assert (found.passed, found.detail) == (False, detail)
    assert found.log is not None
    assert output in found.log.read_text()


def test_checks_that_need_an_engine_are_skipped_without_one() -> None:
    machine = Answering(Completed(0, "", 0.0), engine="none")
    assert list(checks.run(machine, "python-3.13", [CHECK])) == []


def test_demo_runs_where_the_project_was_set_up() -> None:
    machine = Answering(Completed(0, "Verdict: valid", 0.0), engine="none")
    demo = [check for check in checks.CHECKS if check.name == "demo"]
    assert list(checks.run(machine, "python-3.13", demo)) == []
    machine.clone = Path("/home/me/clone")
    ((_, found),) = checks.run(machine, "python-3.13", demo)
    assert found.passed
    assert "make -C /home/me/clone demo" in machine.commands[-2]


def test_limits_that_the_kernel_does_not_have_fail_the_check_of_a_run() -> None:
    (quickstart,) = (check for check in checks.CHECKS if check.name == "quickstart")
    for reason, passed in (("the cores were full", True), ("the kernel has other limits for a", False)):
        machine = Answering(Completed(0, f"ends\n · {reason}\nVerdict: not valid · Next", 2.0))
        ((_, found),) = checks.run(machine, "sid", [quickstart])
        assert found.passed == passed
    assert found.log is not None


def test_records_are_merged_and_survive_a_platform_that_fails_to_start(tmp_path: Path) -> None:
    records: dict[str, results.Record] = {}
    results.came_up(records, "sid", FACTS)
    results.add(records, "sid", "doctor", Outcome(True, "ok", 1.0, None), "abc")
    results.add(records, "sid", "quickstart", Outcome(False, "timed out", 9.0, None), "abc")
    results.unavailable(records, "arm64", "no\nQEMU")
    results.unavailable(records, "sid", "no mmdebstrap")
    results.save(records, tmp_path / "platforms.json")
    loaded = results.load(tmp_path / "platforms.json")
    assert loaded == records
    lines = results.markdown(loaded).splitlines()
    assert "| arm64 | – | – | – | – | – | – | – | – |" in lines
    assert "| sid | Docker 28.5.2 | v1 | – | – | – | – | – | – |" in lines
    assert any(line.startswith("| sid | passed |") and "**failed**" in line for line in lines)
    assert f"| arm64 | no QEMU | {results.today()} |" in lines
    assert f"| sid | no mmdebstrap | {results.today()} |" in lines
    assert "| sid | quickstart (failed) | 9 | timed out |" in lines


def test_results_of_another_engine_version_are_dropped() -> None:
    records: dict[str, results.Record] = {}
    results.came_up(records, "sid", FACTS)
    results.add(records, "sid", "doctor", Outcome(True, "ok", 1.0, None), "abc")
    results.came_up(records, "sid", FACTS)
    assert set(records["sid"].checks) == {"doctor"}
    results.came_up(records, "sid", {**FACTS, "engine": "Docker 29.0.0"})
    assert records["sid"].checks == {}


def test_page_keeps_text_outside_the_marked_lines(tmp_path: Path) -> None:
    page = tmp_path / "platforms.md"
    page.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    results.write_page({}, page)
    text = page.read_text()
    assert text.startswith(f"before\n{results.BEGIN}\n")
    assert text.endswith(f"{results.END}\nafter\n")
    assert "old" not in text
