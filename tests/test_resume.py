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
from agents.aggregator import models
from agents.aggregator.resume import newest_checkpoint
from testbed.replay import replay
from testbed.rundir import RunDirectory
from tests.running import (
    Finished,
    cli,
    interrupt,
    left_as_processes,
    started,
    until_printed,
    write_topology,
)


@pytest.mark.parametrize("crash", [False, True], ids=["interrupted", "crashed"])
def test_a_resumed_run_goes_on(crash: bool, tmp_path: Path) -> None:
    topology = write_topology(
        tmp_path,
        devices=[{"name": "one", "cpu": 0.5}],
        rule={"name": "fedasync"},
        stop={"updates": 120},
        evaluate={"every": "500ms"},
        record="updates",
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "version")
        until_printed(up, "version")
        if crash:
            os.kill(up.pid, signal.SIGKILL)  # its processes die with it
            up.wait()
        else:
            interrupt(up)
    before = wait_for_the_last_record(runs)

    done = cli("up", "--resume", before.path.name, "--runs", runs)
    assert done.returncode == 0, done.stdout + done.stderr
    after = Finished.only_one_in(runs)
    assert after.records[: len(before.records)] == before.records
    assert after.manifest["runtime"] == "process"
    assert after.manifest["outcome"] == "updates"

    versions = [r.version for r in after.records if isinstance(r, events.VersionMade)]
    assert all(earlier < later for earlier, later in pairwise(versions))
    times = [u.applied for u in after.updates]
    assert times == sorted(times)
    resumed = [r for r in after.records if isinstance(r, events.RunStarted)][1]
    assert resumed.at >= before.updates[-1].applied
    end = after.records[-1]
    assert isinstance(end, events.RunEnded)
    assert end.updates == len(after.updates) >= 120
    assert end.version == versions[-1]
    lost = [r.message for r in after.records if isinstance(r, events.Note)]
    assert bool(lost) == crash
    assert replay(RunDirectory(after.path)).updates == len(after.updates)
    assert left_as_processes() == []


def test_of_all_models_the_newest_alone_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    w = np.zeros(1_000_000, np.float32)
    for name, version in (("000000", 0), ("000200", 200), ("final", 300), ("000100", 100)):
        w[0] = version
        models.save(folder, name, w, version, "schema")
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
