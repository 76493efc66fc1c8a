"""Experiment trackers, against their real local backends, which are read back."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import testbed as product
from agents import events
from agents.energy.messages import RoundEnergy
from testbed import tracking
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory
from testbed.tracking.following import Point, Points, follow
from tests.running import Testbed

TOPOLOGY: dict[str, Any] = {
    "name": "tracked",
    "task": {"name": "digits-logreg", "local": {"steps": 2, "lr": 0.1}},
    "rule": {"name": "fedasync", "mixing": 0.5},
    "devices": [{"name": "pi", "count": 3, "timing": "1s"}],
    "evaluate": {"every": "2s"},
    "stop": {"after": "6s"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return product.simulate(TOPOLOGY, runs=tmp_path_factory.mktemp("runs")).path


def expected(run: Path) -> dict[str, list[tuple[float, float]]]:
    """Expected points of each figure: device time and value."""
    points, found = Points(), dict[str, list[tuple[float, float]]]()
    for record in events.read(run / "events.jsonl"):
        for point in points.add(record):
            for name, value in point.values.items():
                found.setdefault(name, []).append((point.at, value))
    return found


def test_energy_of_rounds_and_power_offs_become_tracker_points(run: Path) -> None:
    assert "round_joules" not in expected(run)
    points, found = Points(), list[Point]()
    energy = [RoundEnergy(0.1, "a", n, 2.5, "sent") for n in (1, 2)]
    off = events.Acted(0.3, "a", "battery", 0.0, {"action": "poweroff"})
    update = next(r for r in events.read(run / "events.jsonl") if isinstance(r, events.UpdateApplied))
    records: list[events.Record] = [*energy, off, update, events.RunEnded(9.0, "time", 1, 1)]
    for record in records:
        found += points.add(record)
    assert found[-1].values["round_joules"] == 5.0
    assert found[-1].values["power_offs"] == 1.0


def test_records_become_tracker_points() -> None:
    def update(at: float, staleness: int) -> events.UpdateApplied:
        return events.UpdateApplied(
            client="a", sequence=1, kind="delta", base_version=0, applied_version=1, staleness=staleness,
            weight=1.0, samples=1, steps=1, loss=0.0, bytes=500_000, dispatched=0.0, downloaded=0.0,
            train_start=0.0, train_end=0.0, sent=0.0, arrived=at, applied=at,
        )  # fmt: skip

    points = Points(perplexity=True)
    records: list[events.Record] = [
        update(0.2, 0),
        events.VersionMade(0.2, 1, 1),
        update(0.6, 4),
        events.Evaluated(0.6, 1, 2.0, math.nan),
        update(3.5, 1),
        events.RunEnded(3.75, "after", 1, 3),
    ]
    found = [(point.at, dict(point.values)) for record in records for point in points.add(record)]
    first = {"version": 1, "updates": 2, "updates_per_second": 2, "staleness": 2, "megabytes": 1}
    last = {"version": 1, "updates": 3, "updates_per_second": 1 / 0.75, "staleness": 1, "megabytes": 1.5}
    assert found == [
        (0.6, {"loss": 2.0, "perplexity": math.exp(2)}),
        (1.0, first | {"rejected": 0}),
        (3.75, last | {"rejected": 0}),
    ]


def test_mlflow_gets_each_point_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told twice, and there once."""
    from mlflow import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        told = follow(RunDirectory(run), tracking.tracker("mlflow", run), model=True)
        assert uri in told
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tracked")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.data.params["task.local.lr"] == "0.1"
    assert found.data.params["devices.pi.count"] == "3"
    assert found.data.tags["testbed.rule"] == "fedasync"
    for name, points in expected(run).items():
        history = client.get_metric_history(found.info.run_id, name)
        assert sorted((m.step, m.value) for m in history) == [(int(at * 1e3), v) for at, v in points]
        began = history[0].timestamp - history[0].step
        assert all(abs(m.timestamp - m.step - began) <= 1 for m in history)  # ms
    artifacts = {one.path for one in client.list_artifacts(found.info.run_id)}
    assert artifacts == {"manifest.json", "topology.yaml", "final.safetensors"}


def records_of_leveldb(log: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, a log as LevelDB's but for its first 7 bytes: blocks of 32 KiB, in
    which each part of a record has 4 bytes of checksum, 2 of length, 1 on whether it is the last."""
    whole, at = b"", 7
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_wandb_works_offline(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2 as messages

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "240")  # seconds: this host may be busy
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    follow(RunDirectory(run), tracking.tracker("wandb", run))
    wandb.teardown()  # else its service lives as long as this process
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, float]] = []
    config: dict[str, str] = {}
    for data in records_of_leveldb(file.read_bytes()):
        record = messages.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        for item in record.run.config.update:
            config[item.key] = item.value_json
        if record.HasField("history"):
            items = record.history.item
            rows.append({"".join(i.nested_key) or i.key: float(i.value_json) for i in items})
    for name, points in expected(run).items():
        found = [(row["device_time"], row[name]) for row in rows if name in row]
        assert found == [pytest.approx(point) for point in points]
    assert config["task.local.lr"] == "0.1"
    assert config["testbed.rule"] == '"fedasync"'


def test_tensorboard_files_are_written(testbed: Testbed, run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(RunDirectory(run), tracking.tracker("tensorboard", run))
    done = testbed("export", run, "--to", "tensorboard", "--json")  # once more
    assert done.code == 0, done.err
    assert str(run / "tensorboard") in json.loads(done.out)["told"]
    read = EventAccumulator(str(run / "tensorboard"), {"scalars": 0})
    read.Reload()
    wanted = expected(run)
    assert set(read.Tags()["scalars"]) == set(wanted)
    for name, points in wanted.items():
        scalars = read.Scalars(name)
        assert [s.step for s in scalars] == [int(at * 1e3) for at, _ in points]
        assert [s.value for s in scalars] == pytest.approx([v for _, v in points], rel=1e-6)
        assert scalars[-1].wall_time - scalars[0].wall_time == pytest.approx(
            points[-1][0] - points[0][0], abs=1e-5
        )


@pytest.mark.usefixtures("forked_programs")
def test_failed_tracker_is_reported_without_disturbing_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server is unreachable and one works, beside a running run."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with product.up(
        TOPOLOGY, runtime="virtual", track=["mlflow", "tensorboard"], runs=tmp_path
    ) as handle:
        assert handle.wait().ended is not None
    log = handle.logs("controller", 100)
    assert "tensorboard: TensorBoard files in" in log
    assert f"`testbed export {handle.id} --to mlflow` sends the run again" in log
    assert list(handle.path.glob("tensorboard/events.out.tfevents.*"))
    assert "127.0.0.1" in handle.logs("tracker-mlflow", 5)


def test_unavailable_trackers_are_refused(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.yaml").write_text("name: t\n")
    said = testbed("up", tmp_path / "t.yaml", "--track", "excel")
    assert said.code == 2
    assert "unknown tracker 'excel', expected one of mlflow, wandb, tensorboard" in said.err
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "sqlalchemy" or None)
    with pytest.raises(BadInputError, match="export MLFLOW_TRACKING_URI=http://HOST:PORT, or"):
        tracking.check(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    tracking.check(["mlflow"])
