"""A run that is stopped, in order or by a crash, and carried on."""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agents import events
from agents.aggregator import storage
from agents.aggregator.storage import Checkpoint, Past, newest_checkpoint, past
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from tests.running import (
    Finished,
    cli,
    interrupt,
    left_as_processes,
    started,
    until_printed,
    write_topology,
)


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Once after an interrupt, and once after a crash."""
    topology = write_topology(
        tmp_path,
        devices=[{"name": "one", "cpu": 0.5}],
        rule={"name": "fedasync"},
        stop={"updates": 200},
        evaluate={"every": "500ms"},
        record="updates",
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "version")
        until_printed(up, "version")
        interrupt(up)
    interrupted = wait_for_the_last_record(runs)
    resume = ("up", "--resume", interrupted.path.name, "--runs", runs)
    with started(*resume) as up:
        until_printed(up, "version")
        until_printed(up, "version")
        os.kill(up.pid, signal.SIGKILL)  # its processes die with it
        up.wait()
    crashed = wait_for_the_last_record(runs)
    done = cli(*resume)
    assert done.returncode == 0, done.stdout + done.stderr
    after = Finished.only_one_in(runs)

    for earlier, later in ((interrupted, crashed), (crashed, after)):
        assert later.records[: len(earlier.records)] == earlier.records
    assert after.manifest["runtime"] == "process"
    assert after.manifest["outcome"] == "updates"
    versions = [r.version for r in after.records if isinstance(r, events.VersionMade)]
    assert all(earlier < later for earlier, later in pairwise(versions))
    times = [u.applied for u in after.updates]
    assert times == sorted(times)
    _, *resumed = [r.at for r in after.records if isinstance(r, events.RunStarted)]
    for at, before in zip(resumed, (interrupted, crashed), strict=True):
        assert at >= before.updates[-1].applied
    end = after.records[-1]
    assert isinstance(end, events.RunEnded)
    assert end.updates == len(after.updates) >= 200
    assert end.version == versions[-1]
    assert lost(crashed) == []
    assert len(lost(after)) == 1  # what came after the last checkpoint before the crash
    assert replay(RunDirectory(after.path)).updates == len(after.updates)
    assert left_as_processes() == []


def lost(run: Finished) -> list[str]:
    """What the run says of versions that a crash took."""
    return [r.message for r in run.records if isinstance(r, events.Note)]


def test_no_version_number_is_given_twice(tmp_path: Path) -> None:
    """Whichever of the two the crash has kept: the records, or the model."""
    (tmp_path / "events.jsonl").write_text(events.to_line(events.VersionMade(2.0, 7, 1)))
    for checkpoint, version in ((5, 7), (8, 8)):
        assert past(tmp_path, Checkpoint(checkpoint, np.zeros(1, np.float32))).version == version


def test_the_past_is_as_long_as_its_latest_record_and_counts_its_updates(tmp_path: Path) -> None:
    applied = events.UpdateApplied(
        client="a",
        sequence=1,
        kind="delta",
        base_version=0,
        applied_version=3,
        staleness=2,
        weight=1.0,
        samples=10,
        steps=2,
        loss=0.5,
        bytes=4,
        dispatched=0.0,
        downloaded=0.1,
        train_start=0.2,
        train_end=0.3,
        sent=0.4,
        arrived=1.5,
        applied=2.5,
    )
    ended = events.RunEnded(2.0, "after", 2, 1)
    (tmp_path / "events.jsonl").write_text(
        "".join(events.to_line(record) for record in (applied, applied, ended))
    )
    found = past(tmp_path, Checkpoint(0, np.zeros(1, np.float32)))
    assert found == Past(at=2_500_000_000, updates=2, version=3)


def test_a_run_that_holds_no_model_cannot_go_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="models holds no model to resume from"):
        newest_checkpoint(tmp_path)


def test_of_all_models_the_newest_alone_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    w = np.zeros(1_000_000, np.float32)
    for name, version in (("000000", 0), ("000200", 200), ("final", 300), ("000100", 100)):
        w[0] = version
        storage.save_model(folder, name, w, version, "schema")
    tracemalloc.start()
    checkpoint = newest_checkpoint(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (checkpoint.version, checkpoint.w[0]) == (300, 300.0)
    assert peak < 1.5 * w.nbytes


def wait_for_the_last_record(runs: Path) -> Finished:
    """The run directory as the ended run has left it."""
    while left_as_processes():
        time.sleep(0.05)
    return Finished.only_one_in(runs)
