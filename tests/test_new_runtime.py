"""ARCHITECTURE.md says that a runtime is one module and one row: this module is one, with its row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from testbed import traits
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun
from testbed.runtimes.process.runtime import ProcessRuntime
from testbed.view import View
from tests.running import Finished, Testbed, left_as_processes, write_small_topology

ELSEWHERE = LiveRun("t-elsewhere", "new", 3, None)
TAKEN_DOWN: list[str] = []


def is_available() -> bool:
    return True


def check_host() -> None: ...


@contextmanager
def launcher(spec: RunSpec, view: View) -> Iterator[ProcessRuntime]:
    view.progress("The new one begins")
    yield ProcessRuntime(spec)


def live_runs() -> list[LiveRun]:
    return [ELSEWHERE]


def take_down(run: str, directory: RunDirectory | None) -> bool:
    TAKEN_DOWN.append(run)
    return True


def logs(run: str, tail: int) -> dict[str, list[str]]:
    return {}


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(traits.RUNTIMES["process"], module=__name__, notice="devices are new")
    monkeypatch.setitem(traits.RUNTIMES, "new", row)


def test_run_with_a_runtime_added_by_a_user(testbed: Testbed, tmp_path: Path) -> None:
    topology, runs = write_small_topology(tmp_path, stop={"updates": 3}), tmp_path / "runs"
    said = testbed("up", topology, "--runtime", "new", "--runs", runs)
    assert said.code == 0, said.err
    assert "devices are new." in said.out
    assert "The new one begins" in said.out
    run = Finished.only_one_in(runs)
    assert run.manifest["runtime"] == "new"
    assert len(run.updates) >= 3
    assert left_as_processes(run.path.name) == []


def test_plan_and_list_with_an_added_runtime(testbed: Testbed, tmp_path: Path) -> None:
    assert (
        "new: 2 devices ask for"
        in testbed("plan", write_small_topology(tmp_path), "--runtime", "new").out
    )
    assert (
        "expected docker, swarm, process, virtual or new"
        in testbed("plan", write_small_topology(tmp_path), "--runtime", "old").err
    )
    assert "t-elsewhere" in testbed("ps").out
    assert testbed("down", "t-elsewhere").code == 0
    assert TAKEN_DOWN == ["t-elsewhere"]
