"""Runs whose evaluation is slow: they end in time, and report its outcome."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents import events
from testbed.run import supervision
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.process import runtime as process
from testbed.runtimes.process.runtime import Programs
from tests.running import Finished, Testbed, left_as_processes, write_small_topology

SLOW = """
import dataclasses, time
from agents import config
from agents.aggregator import evaluation, main

load, evaluate = config.load, evaluation.Evaluator.evaluate

def slow(self, version, w, buffers):
    time.sleep({seconds})
    return evaluate(self, version, w, buffers)

config.load = lambda *file: dataclasses.replace(load(*file), last_evaluation_timeout_s={timeout})
evaluation.Evaluator.evaluate = slow
main.main()
"""
"""An aggregator whose evaluations take so many seconds, and which waits so long for the last one."""
WAITS = "the run is over and waits for its last 2 evaluations"
Up = Callable[..., Finished]


@pytest.fixture
def up(testbed: Testbed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Up:
    """A function that runs a small topology of local processes, with a slow evaluation."""

    def up(seconds: float | str, timeout: float, code: int = 0, **changes: Any) -> Finished:
        program = (sys.executable, "-c", SLOW.format(seconds=seconds, timeout=timeout))
        monkeypatch.setattr(process, "Programs", lambda: Programs(aggregator=program))
        topology = write_small_topology(tmp_path, durability="recording", **changes)
        said = testbed("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
        assert said.code == code, said.out + said.err
        run = Finished.only_one_in(tmp_path / "runs")
        assert left_as_processes(run.path.name) == []
        return run

    return up


def notes(run: Finished) -> list[str]:
    return [record.message for record in run.records if isinstance(record, events.Note)]


def last_sample(run: Finished) -> float:
    """Device time of the last sign of life of a device."""
    (started,) = [record for record in run.records if isinstance(record, events.RunStarted)]
    epoch: float = started.wall_clock - run.manifest["monotonic_zero"]
    last: float = max(sample["at"] for sample in run.telemetry)
    return last - epoch


@pytest.mark.timed
def test_run_ends_in_time_despite_a_slow_evaluation(up: Up) -> None:
    """The devices end with the run and do not wait for the evaluation."""
    began = time.monotonic()
    run = up(600, timeout=4, stop={"after": "2s"}, evaluate={"every": "1s"})
    assert time.monotonic() - began < 60
    assert notes(run)[-2:] == [
        f"{WAITS}, at most 4 s (without limit: evaluate: {{when: after}})",
        "the last 2 models were not evaluated: the run waits no longer",
    ]
    assert not any(isinstance(record, events.Evaluated) for record in run.records)
    ended = run.records[-1]
    assert isinstance(ended, events.RunEnded)
    assert (ended.reason, ended.updates) == ("after", len(run.updates))
    assert 2 <= ended.at < 3
    assert max(record.at for record in run.records) == ended.at
    assert run.manifest["outcome"] == "after"
    assert last_sample(run) < 5
    assert replay(RunDirectory(run.path)).updates == len(run.updates) > 0


def test_ctrl_c_ends_the_wait_for_the_last_evaluation(up: Up, tmp_path: Path) -> None:
    def interrupt() -> None:
        """Interrupt once the run reports that it waits for the last evaluation."""
        while not any(WAITS in file.read_text() for file in tmp_path.glob("runs/*/events.jsonl")):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    run = up(600, timeout=600, code=130, stop={"updates": 3}, evaluate={"every": "10min"})
    assert notes(run)[-1] == "the last 2 models were not evaluated: the run was interrupted"
    ended = run.records[-1]
    assert isinstance(ended, events.RunEnded)
    assert ended.reason == "updates"
    assert replay(RunDirectory(run.path)).updates == len(run.updates)


def test_failed_evaluation_ends_the_run_with_its_reason(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails again after a restart of the aggregator. The records up to then are kept."""
    monkeypatch.setattr(supervision, "_MAX_RESTARTS", 1)
    run = up("1 / 0", timeout=60, code=1, stop={"after": "60s"})
    assert "ZeroDivisionError" in (run.path / "logs" / "aggregator.log").read_text()
    assert isinstance(run.records[0], events.RunStarted)
    assert run.manifest["outcome"] == "failed"


@pytest.mark.timed
def test_models_may_be_evaluated_after_the_run(up: Up) -> None:
    """All of them, longer than a run would wait otherwise; nothing happens to its devices meanwhile."""
    run = up(
        0.25,
        timeout=0.1,
        stop={"after": "3s"},
        evaluate={"every": "500ms", "when": "after"},
        scenario=[{"at": "3500ms", "crash": "fast", "restart_after": "1s"}],
    )
    aside = events.Note | events.RoundUnfinished | events.UpdateRejected  # one that came after the end
    told = [record for record in run.records if not isinstance(record, aside)]
    evaluated = [record for record in run.records if isinstance(record, events.Evaluated)]
    ended = run.records[-1]
    assert isinstance(ended, events.RunEnded)
    assert told[-len(evaluated) - 1 :] == [*evaluated, ended]
    times = [record.at for record in evaluated]
    first = min(record.at for record in run.records if isinstance(record, events.UpdateApplied))
    assert times[0] == 0
    # One half a second after the other, from the first at which there was another model than at 0.
    begin = round(times[1] / 0.5)
    assert 0.5 * (begin - 1) < first < 0.5 * begin + 0.2
    assert times[1:-1] == pytest.approx([0.5 * k for k in range(begin, 6)], abs=0.2)
    assert times[-1] == ended.at
    assert [record.version for record in evaluated] == sorted({r.version for r in evaluated})
    assert evaluated[-1].version == ended.version
    assert evaluated[-1].accuracy > evaluated[0].accuracy
    assert not any(isinstance(record, events.Acted) for record in run.records)
    assert replay(RunDirectory(run.path)).records == len(run.records) - len(notes(run))
