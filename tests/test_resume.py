"""A run that is stopped, in order or by a crash, and carried on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from agents import events
from agents.disk import files
from agents.wire import payloads
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from tests.running import (
    Finished,
    Testbed,
    interrupt,
    left_as_processes,
    started,
    until_printed,
    write_topology,
)


def with_one_device(folder: Path, **settings: str) -> Path:
    """A topology of 200 updates, some seconds."""
    return write_topology(
        folder,
        task={"name": "digits-logreg", "local": {"steps": 10, "batch_size": 32, "lr": 0.01}},
        devices=[{"name": "one", "cpu": 0.5, "timing": "30ms"}],  # it waits rather than computes
        rule={"name": "fedasync"},
        stop={"updates": 200},
        evaluate={"every": "500ms"},
        **settings,
    )


def test_run_resumes_after_interrupt_and_kill(testbed: Testbed, tmp_path: Path) -> None:
    """It resumes once after an interrupt and once after SIGKILL for every process: nothing is lost, and
    nothing is applied twice."""
    topology = with_one_device(tmp_path, durability="recording")
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
    finished = unacknowledged(crashed)
    done = testbed(*resume)
    assert done.code == 0, done.out + done.err
    after = Finished.only_one_in(runs)
    *_, last = re.findall(r"updates +(\d+)", done.out)
    assert int(last) == len(after.updates)  # the earlier legs' too, as its version

    for earlier, later in ((interrupted, crashed), (crashed, after)):
        assert later.records[: len(earlier.records)] == earlier.records
    assert after.manifest["runtime"] == "process"
    assert after.manifest["outcome"] == "updates"
    versions = [r.version for r in after.records if isinstance(r, events.VersionMade)]
    assert versions == list(range(1, len(versions) + 1))
    times = [u.applied for u in after.updates]
    assert times == sorted(times)
    _, *resumed = [r.at for r in after.records if isinstance(r, events.RunStarted)]
    for at, before in zip(resumed, (interrupted, crashed), strict=True):
        assert at >= before.updates[-1].applied
    end = after.records[-1]
    assert isinstance(end, events.RunEnded)
    assert end.updates == len(after.updates) >= 200
    assert end.version == versions[-1]
    assert [r for r in after.records if isinstance(r, events.Note)] == []
    assert len({(update.client, update.dispatched) for update in after.updates}) == len(after.updates)
    for update in finished:
        same = [u for u in after.updates if u.client == update.client and u.sequence == update.sequence]
        assert [u.loss == pytest.approx(update.loss, rel=1e-5) for u in same].count(True) == 1
    assert not (after.path / "state").exists()
    assert replay(RunDirectory(after.path)).updates == len(after.updates)
    assert left_as_processes(after.path.name) == []


def unacknowledged(run: Finished) -> list[payloads.UpdateMessage]:
    """Updates that clients had finished and were not told to be safe."""
    kept = (run.path / "state" / "clients").rglob("*.update")
    return [payloads.decode_update(bytes(files.without_checksum(file.read_bytes()))) for file in kept]


def wait_for_the_last_record(runs: Path) -> Finished:
    """The run directory as the ended run has left it."""
    (run,) = runs.iterdir()
    while left_as_processes(run.name):
        time.sleep(0.05)
    return Finished.only_one_in(runs)


def test_crashed_run_resumes_from_its_checkpoint(testbed: Testbed, tmp_path: Path) -> None:
    """Records after the checkpoint are removed. The resumed run's controller and the command that waits
    for the run clock continue to read."""
    topology = with_one_device(tmp_path, durability="checkpoint")
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        for _ in range(3):
            until_printed(up, "version")
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    crashed = wait_for_the_last_record(runs)
    assert crashed.updates
    resumed = testbed("up", "--resume", crashed.path.name, "--runs", runs)
    assert resumed.code == 0, resumed.out + resumed.err
    after = Finished.only_one_in(runs)
    assert after.manifest["outcome"] == "updates"
    lost = "1 earlier leg of the run: ended without a verdict"
    assert lost in after.manifest["validity"]["unjudged"]
    assert after.manifest["judged_legs"] == 2
    assert sum(isinstance(record, events.RunStarted) for record in after.records) == 2
    (note,) = [record.message for record in after.records if isinstance(record, events.Note)]
    assert "continues from its last checkpoint" in note
    versions = [record.version for record in after.records if isinstance(record, events.VersionMade)]
    assert versions == list(range(1, len(versions) + 1))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of 200 updates that was killed after two versions and more."""
    folder = tmp_path_factory.mktemp("killed")
    topology = with_one_device(folder)
    runs = folder / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "version")
        until_printed(up, "version")
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    return wait_for_the_last_record(runs)


@pytest.fixture
def interrupted(killed: Finished, tmp_path: Path) -> Finished:
    """A copy of that run, which the test may change."""
    (tmp_path / "runs").mkdir()
    subprocess.run(["cp", "-a", killed.path, tmp_path / "runs"], check=True)  # named pipes, too
    return Finished.only_one_in(tmp_path / "runs")


def test_changed_topology_is_not_resumed(testbed: Testbed, interrupted: Finished) -> None:
    path = interrupted.path / "topology.yaml"
    began = path.read_text()
    needed = [file for file in (interrupted.path / "state").rglob("*") if file.is_file()]
    needed.append(interrupted.path / "events.jsonl")
    before = [file.read_bytes() for file in needed]
    assert "seed: 7" in began
    resume = ("up", "--resume", interrupted.path.name, "--runs", interrupted.path.parent)
    model = began.replace("name: digits-logreg", "name: digits-mlp")
    for changed, told in (
        (began.replace("seed: 7", "seed: 8"), "seed was 7, and is 8"),
        (model, 'task.name was "digits-logreg", and is "digits-mlp"'),
    ):
        path.write_text(changed)
        said = testbed(*resume)
        assert said.code == 2
        assert told in " ".join(said.err.split()), said.err
        assert [file.read_bytes() for file in needed] == before  # so it can still be resumed


def test_damaged_log_is_not_resumed_and_invalid_outbox_files_are_set_aside(
    testbed: Testbed, interrupted: Finished
) -> None:
    log = interrupted.path / "state" / "aggregator" / "inputs.bin"
    journal = interrupted.path / "events.jsonl"
    outbox = interrupted.path / "state" / "clients" / "one"
    assert {path.stat().st_mode & 0o077 for path in (log, interrupted.path / "state")} == {0}
    whole, records = log.read_bytes(), journal.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    resume = ("up", "--resume", interrupted.path.name, "--runs", interrupted.path.parent)
    for content, told in ((damaged, "is damaged: "), (b"", "inputs.bin is empty")):
        log.write_bytes(content)
        said = testbed(*resume)
        assert said.code == 1
        assert told in " ".join(said.err.split()), said.err
        assert "Intact: checkpoint.bin" in " ".join(said.err.split())
        assert (log.read_bytes(), journal.read_bytes()) == (content, records)
    log.write_bytes(whole)
    (outbox / "9999.update").touch()
    (outbox / "abc.update").write_bytes(b"an update")
    (outbox / "9998.update").mkdir()
    os.mkfifo(outbox / "9997.update")
    done = testbed(*resume)
    assert done.code == 0, done.out + done.err
    assert done.out.count("is set aside as") + done.err.count("is set aside as") == 4
    after = Finished.only_one_in(interrupted.path.parent)
    notes = [record.message for record in after.records if isinstance(record, events.Note)]
    assert sorted(note.split("/")[-1] for note in notes) == [
        "9997.update is set aside as 9997.update.aside: it is not a regular file",
        "9998.update is set aside as 9998.update.aside: it is not a regular file",
        "9999.update is set aside as 9999.update.aside: it cannot be read: its checksum is wrong: it "
        "is damaged or incomplete",
        "abc.update is set aside as abc.update.aside: its name is not the number of a dispatch",
    ]
    assert len({(one.client, one.dispatch) for one in after.updates}) == len(after.updates) >= 200
