"""One run per runtime, with a crash and masked sums, asked all that a run has to show."""

from __future__ import annotations

import re

import pytest

from agents import events
from analysis.device_states import timeline
from analysis.load import load
from testbed.host import docker_engine
from testbed.plan import models
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from tests.running import Finished, cli, left_as_processes, left_in_docker, write_topology

CLIENTS = ("d-1", "d-2", "d-3")


@pytest.fixture(
    scope="module", params=[pytest.param("docker", marks=pytest.mark.docker), "process", "virtual"]
)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run of 120 updates, which take two clients 14 seconds at least. The third crashes in the first
    second and comes back; any two open a sum. The bias is frozen. Clients log their work (`-v`)."""
    runtime: str = request.param
    if runtime == "docker":
        request.getfixturevalue("built")
    folder = tmp_path_factory.mktemp(runtime)
    topology = write_topology(
        folder,
        task={"name": "digits-logreg", "frozen": ["1.bias"], "local": {"steps": 20, "lr": 0.1}},
        devices=[{"name": "d", "count": 3, "cpu": 0.2, "timing": "250ms"}],
        rule={"name": "fedbuff", "buffer_size": 2},
        privacy={
            "secure": {"colluding": 1, "needed": 2},
            "differential": {"clip": 5.0, "noise": 0.01, "at": "server"},
        },
        scenario=[{"at": "1s", "crash": "d-1", "restart_after": "500ms"}],
        evaluate={"every": "2s", "devices": 20},
        stop={"updates": 120, "after": "4min"},
        durability="recording",
    )
    done = cli("up", topology, "--runtime", runtime, "--runs", folder / "runs", "-v", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished.only_one_in(folder / "runs")


def test_run_ends_after_its_updates_and_has_learned(ended: Finished) -> None:
    last = ended.records[-1]
    assert isinstance(last, events.RunEnded)
    assert (last.reason, last.updates) == ("updates", len(ended.updates))
    assert len(ended.updates) >= 120
    assert ended.best_accuracy > 0.5
    assert ended.manifest["outcome"] == "updates"
    assert set(ended.manifest["privacy"]["epsilon"]) == {*CLIENTS}
    if ended.manifest["runtime"] != "virtual":
        assert ended.manifest["validity"].keys() == {"valid", "reasons", "unjudged"}
        assert ended.manifest["timings"].keys() == {"launch", "ready", "down"}


def test_crashed_client_returns_and_the_others_go_on(ended: Finished) -> None:
    acted = [record for record in ended.records if isinstance(record, events.Acted)]
    assert [(one.device, one.details["action"]) for one in acted] == [
        ("d-1", "crash"),
        ("d-1", "restart"),
    ]
    assert {update.client for update in ended.updates if update.dispatched > acted[0].at} >= {
        "d-2",
        "d-3",
    }
    states = [one.state for one in ended.records if isinstance(one, events.ClientStatus)]
    assert states[:3] == ["offline", "joining", "ready"]
    # d-1 refuses what was sealed for the process that it was.
    logs = [ended.path / "logs" / f"{name}.log" for name in ("d-2", "d-3", "aggregator")]
    assert "refused" not in "".join(log.read_text() for log in logs if log.exists())


def test_times_of_an_update_are_in_order(ended: Finished) -> None:
    for u in ended.updates:
        times = [u.dispatched, u.downloaded, u.train_start, u.train_end, u.sent, u.arrived, u.applied]
        assert times == sorted(times)
        assert u.staleness == u.applied_version - 1 - u.base_version >= 0
    assert len({(u.client, u.dispatch) for u in ended.updates}) == len(ended.updates)


def test_frozen_parameters_stay_and_devices_are_evaluated_one_by_one(ended: Finished) -> None:
    directory = RunDirectory(ended.path)
    final = models.saved_state(directory, models.saved_model(directory))
    assert not final["1.bias"].any()
    assert final["1.weight"].any()
    evaluated = [record for record in ended.records if isinstance(record, events.Evaluated)]
    parts = [
        (one.part, one.name, one.samples)
        for one in ended.records
        if isinstance(one, events.EvaluatedPart) and one.at == evaluated[-1].at
    ]
    assert parts == [("device", client, 20) for client in CLIENTS]


def test_only_sums_leave_the_clients_and_what_that_costs_is_theirs(ended: Finished) -> None:
    """Each client sends shares as large as the model to the two others. The kernel counts the bytes of
    containers."""
    assert all(u.masking > 0 for u in ended.updates)
    record = load(ended.path)
    assert "mask" in set(timeline(record)["state"])
    if ended.manifest["runtime"] == "docker":
        sent = record.telemetry.groupby("device", observed=True)["sent"].max().sum()
        assert sent > 2 * record.updates["bytes"].sum()


def test_run_is_replayed_bit_by_bit(ended: Finished) -> None:
    if ended.manifest["runtime"] != "virtual":
        assert replay(RunDirectory(ended.path)).updates == len(ended.updates)


def test_directory_has_all_records_and_no_password(ended: Finished) -> None:
    """Nothing that looks like one of the passwords (32 URL-safe characters) is in any text."""
    files = {"topology.yaml", "manifest.json", "events.jsonl", "telemetry.jsonl", "fidelity.json"}
    if ended.manifest["runtime"] != "virtual":
        files |= {"models", "logs", "inputs.bin", "start.safetensors"}  # frozen parameters are in it
        assert {path.name for path in ended.path.iterdir()} == files
    models = {path.name for path in (ended.path / "models").iterdir()}
    assert {"000000.safetensors", "final.safetensors"} <= models
    first = ended.records[0]
    assert isinstance(first, events.RunStarted)
    assert (first.clients, first.missing) == (CLIENTS, ())
    for path in ended.path.rglob("*"):
        if path.suffix in {".json", ".jsonl", ".log", ".yaml"}:
            assert not re.search(r"(?<![\w-])[\w-]{32}(?![\w-])", path.read_text()), path


def test_nothing_is_left_but_the_directory(ended: Finished) -> None:
    assert left_as_processes(ended.path.name) == []
    if ended.manifest["runtime"] == "docker":
        with docker_engine.connect_if_present() as engine:
            assert engine is not None
            assert left_in_docker(engine, ended.path.name) == []
    if ended.manifest["runtime"] != "virtual":
        log = cli("logs", ended.path, "d-2", "--tail", "1000").stdout
        assert "Z round 1 begins, from version 0\n" in log
        assert "Z round 1 ends: 20 steps, loss " in log
