"""`testbed up --runtime process`: local processes, real broker, no Docker."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agents import events
from agents.config import KEEPALIVE
from analysis.load import load
from testbed.plan import models
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.process import runtime
from tests import attacks
from tests.attacks import Facts
from tests.running import (
    Finished,
    Testbed,
    cli,
    interrupt,
    left_as_processes,
    run_to_its_end,
    started,
    until_printed,
    write_small_topology,
    write_topology,
)
from tests.waiting import eventually


def test_run_of_processes_ends_normally(tmp_path: Path) -> None:
    """The rule works in rounds; other tests run the other rules. The bias is frozen: it is not sent and
    stays 0. Devices are evaluated one by one. With `-v` their clients log their work."""
    task = {"name": "digits-logreg", "frozen": ["1.bias"], "local": {"steps": 20, "lr": 0.1}}
    topology = write_small_topology(
        tmp_path,
        task=task,
        rule={"name": "fedavg"},
        evaluate={"every": "1s", "devices": 20},
        stop={"updates": 20, "after": "60s"},
    )
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    said = cli("logs", run.path, "fast", "--tail", "1000").stdout
    assert re.search(r"Z round 1 begins, from version 0\n.*Z round 1 ends: 20 steps, loss \d", said), (
        said
    )
    assert isinstance(run.records[-1], events.RunEnded)
    assert run.records[-1].reason == "updates"
    assert len(run.updates) >= 20
    directory = RunDirectory(run.path)
    final = models.saved_state(directory, models.saved_model(directory))
    assert not final["1.bias"].any()
    assert final["1.weight"].any()
    last = run.records[-2]
    assert isinstance(last, events.Evaluated)
    parts = [r for r in run.records if isinstance(r, events.EvaluatedPart) and r.at == last.at]
    assert [(part.part, part.name, part.samples) for part in parts] == [
        ("device", "fast", 20),
        ("device", "slow", 20),
    ]
    for u in run.updates:
        times = [u.dispatched, u.downloaded, u.train_start, u.train_end, u.sent, u.arrived, u.applied]
        assert times == sorted(times)
    assert left_as_processes(run.path.name) == []


@pytest.mark.timed
def test_short_trainings_take_as_long_as_the_cpu_share_says(tmp_path: Path) -> None:
    """A training of some 5 ms of CPU time could use up the budget that a process may save, and end in a
    third of its time. From the first sample of the run to the last, a tenth of the time in trainings is
    CPU time: what a step costs depends on this host."""
    topology = write_small_topology(
        tmp_path, devices=[{"name": "slow", "cpu": 0.1}], rule={"name": "fedasync"}, stop={"after": "6s"}
    )
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = load(Finished.only_one_in(tmp_path / "runs").path)
    samples = run.telemetry[run.telemetry["at"] > 0]
    first, last = samples["at"].min(), samples["at"].max()
    begin, end = (run.updates[name].clip(first, last) for name in ("train_start", "train_end"))
    used = samples["cpu"].max() - samples["cpu"].min()
    assert used / (end - begin).sum() == pytest.approx(0.1, rel=0.1)


@pytest.mark.timed
def test_dilated_run_is_reported_in_device_time(testbed: Testbed, tmp_path: Path) -> None:
    devices = [{"name": "a", "cpu": 0.4, "timing": "300ms"}]
    topology = write_topology(tmp_path, devices=devices, dilation=4, stop={"after": "2s"})
    begin = time.monotonic()
    done = testbed("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    assert time.monotonic() - begin > 8
    run = Finished.only_one_in(tmp_path / "runs")
    assert run.records[-1].at == pytest.approx(2, abs=0.1)
    took = [u.sent - u.downloaded for u in run.updates]
    assert 0.3 <= statistics.median(took) < 0.35
    assert len(took) >= 4
    broker = (run.path / "logs" / "broker.log").read_text()
    assert re.search(rf" as a \(.*k{4 * KEEPALIVE}\b", broker), broker


@pytest.mark.parametrize("stage", ["Starting broker", "the run clock starts"])
def test_interrupt_leaves_nothing(stage: str, tmp_path: Path) -> None:
    """In the first stage the link is measured, for 5 s."""
    link = {"up": "1mbit", "down": "1mbit"} if stage == "Starting broker" else None
    topology = write_small_topology(tmp_path, devices=[{"name": "far", "cpu": 0.3, "link": link}])
    with started("up", topology, "--runtime", "process", "--runs", tmp_path / "runs") as up:
        until_printed(up, stage)
        time.sleep(1)
        took, output = interrupt(up)
    assert up.returncode == 130, output
    assert "Traceback" not in output
    assert took < 30
    (path,) = (tmp_path / "runs").iterdir()
    assert left_as_processes(path.name) == []
    judged = [(path / "fidelity.json").exists(), "validity" in (path / "manifest.json").read_text()]
    judged += ["CPU: " in output, f"Next: testbed up --resume {path}" in output]
    assert set(judged) == {stage == "the run clock starts"}  # what went is judged, however it ended


def test_detached_run_is_listed_and_removed(testbed: Testbed, tmp_path: Path) -> None:
    """One of its clients gains no rights at the broker beyond its own."""
    runs = tmp_path / "runs"
    topology = write_small_topology(tmp_path, broker={"tls": True})
    up = testbed("up", "-d", topology, "--runtime", "process", "--runs", runs)
    assert up.code == 0, up.out + up.err
    (path,) = runs.iterdir()
    assert path.name in testbed("ps").out
    assert "ready" in testbed("logs", path.name, "controller").out.lower()
    facts = Facts(path.name, "fast", "slow", str(path / "work" / "fast.json"))
    made = list(attacks.made(attacks.ON_THE_BROKER, facts))
    assert [name for name, refusal in made if refusal is None] == []
    assert testbed("down", path.name).code == 0
    assert left_as_processes(path.name) == []
    manifest = Finished.only_one_in(runs).manifest
    assert manifest["outcome"] == "interrupted"
    assert manifest["validity"].keys() == {"valid", "reasons", "unjudged"}
    assert attacks.reconnected((path / "logs" / "broker.log").read_text()) == {"fast"}
    assert manifest["refused"].keys() == {"fast", "?"}


def test_processes_end_with_a_killed_controller(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_small_topology(tmp_path)
    with started("up", topology, "--runtime", "process", "--runs", tmp_path / "runs") as up:
        until_printed(up, "the run clock starts")
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    (path,) = (tmp_path / "runs").iterdir()
    eventually(lambda: left_as_processes(path.name) == [])
    kept = {
        "events.jsonl",
        "logs",
        "manifest.json",
        "models",
        "state",
        "telemetry.jsonl",
        "topology.yaml",
    }
    assert (path / "work" / "fast.json").exists()  # with a password
    assert testbed("down", path).out == f"{path.name}: down\n"
    assert {one.name for one in path.iterdir()} == kept


def test_link_with_loss_is_refused_in_processes(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, devices=[{"name": "far", "cpu": 0.5, "link": {"loss": "1%"}}])
    done = testbed("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.code == 2
    assert "devices[0].link.loss" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


def test_only_sums_leave_the_clients_under_secure_aggregation(testbed: Testbed, tmp_path: Path) -> None:
    """Secure aggregation with noise once per version, among processes with keys and a broker of their
    own; one of three is ended in the middle and comes back, and any two open a sum."""
    topology = write_topology(
        tmp_path,
        devices=[{"name": "d", "count": 3, "cpu": 0.2, "timing": "150ms"}],
        rule={"name": "fedbuff", "buffer_size": 2},
        privacy={
            "secure": {"colluding": 1, "needed": 2},
            "differential": {"clip": 5.0, "noise": 0.01, "at": "server"},
        },
        scenario=[{"at": "2s", "crash": "d-1", "restart_after": "2s"}],
        stop={"after": "7s"},
        durability="recording",
    )
    run = run_to_its_end(topology, "process")
    assert run.best_accuracy > 0.5
    assert {u.client for u in run.updates if u.applied > 2} >= {"d-2", "d-3"}
    assert all(0 < u.masking < 1 for u in run.updates)
    logs = [(run.path / "logs" / f"{name}.log").read_text() for name in ("d-2", "d-3", "aggregator")]
    assert "refused" not in "".join(logs)  # by d-1 some are: sealed for the process that it was
    assert set(run.manifest["privacy"]["epsilon"]) == {"d-1", "d-2", "d-3"}
    assert testbed("replay", run.path).code == 0
    assert left_as_processes(run.path.name) == []


def test_malicious_client_only_spoils_the_sums_it_takes_part_in(
    tmp_path: Path,
) -> None:
    """It runs all of `tests.evil_peer` for 6 of 14 s. No memory grows by lengths that it announces, no
    honest share is displaced by its forged ones, the model stays unchanged while sums are wrong, and
    each wrong sum is reported with its suspects."""
    topology = write_topology(
        tmp_path,
        devices=[
            {"name": "d", "count": 3, "cpu": 0.2, "timing": "300ms"},
            {"name": "evil", "cpu": 0.1},
        ],
        rule={"name": "fedbuff", "buffer_size": 2},
        privacy={"secure": {"colluding": 1, "needed": 3}},
        scenario=[{"at": "1h", "join": "evil"}],
        stop={"after": "14s"},
        durability="recording",
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        eventually(lambda: [*runs.glob("*/events.jsonl")], 60)
        (path,) = runs.iterdir()
        log = path / "events.jsonl"
        eventually(lambda: any(isinstance(one, events.VersionMade) for one in events.read(log)), 60)
        config = path / "work" / "evil.json"
        root = Path(__file__).parent.parent
        with subprocess.Popen([sys.executable, "-m", "tests.evil_peer", config, "6"], cwd=root) as evil:
            most = 0
            while evil.poll() is None:
                most = max(most, *memory_of(path.name))
                time.sleep(0.2)
        assert evil.returncode == 0
        output, _ = up.communicate(timeout=120)
    assert up.returncode == 0, output
    assert most < 2**30
    run = Finished.only_one_in(runs)
    wrong = [record for record in run.records if isinstance(record, events.WrongSum)]
    assert wrong
    assert all("evil" in record.answers for record in wrong)
    honest = [u for u in run.updates if u.applied > wrong[-1].at]
    assert {u.client for u in honest} >= {"d-1", "d-2", "d-3"}
    assert run.best_accuracy > 0.5
    losses = [record.loss for record in run.records if isinstance(record, events.Evaluated)]
    assert max(losses) < 5
    rejected = [record for record in run.records if isinstance(record, events.UpdateRejected)]
    lacking = [one.client for one in rejected if "clients have answered" in one.reason]
    buffers = zip(lacking[::2], lacking[1::2], strict=True)  # of its own shares it has made up too many
    assert all("evil" in clients for clients in buffers)
    reasons = run.manifest["validity"]["reasons"]
    assert any(reason.startswith("a sum of masked updates was wrong at ") for reason in reasons)
    assert cli("replay", run.path).returncode == 0
    assert left_as_processes(run.path.name) == []


def memory_of(run: str) -> list[int]:
    """Bytes that the processes of a run have."""
    found = [0]
    for info in runtime.find():
        if info.run == run:
            with suppress(psutil.Error):
                found.append(info.process.memory_info().rss)
    return found
