"""Recorded fleets: the devices of a run, or of a log, in virtual time."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from analysis.load import Run, load
from testbed import topology as topologies
from testbed.errors import BadInputError
from testbed.fleets import recorded
from testbed.topology import Topology
from tests.running import Testbed

_TASK = "task: {name: quadratic, centers: [[0], [1], [2], [5]], local: {steps: 4, lr: 0.1}}\n"
_TASK_OF_ONE = _TASK.replace("[0], [1], [2], [5]", "[0]")
_TASK_OF_TWO = _TASK.replace(", [2], [5]", "")
_RULE = "rule: {name: fedbuff, buffer_size: 2}\nevaluate: {every: 5s}\nstop: {after: 60s}\n"
_VIRTUAL = "runtime: {name: virtual}\n"
_FLEET = """\
devices:
  - name: slow
    count: 2
    timing: {distribution: lognormal, median: 900ms, sigma: 0.4}
    link: {up: 20kbit, down: 40kbit, rtt: 80ms, jitter: 20ms}
  - {name: fast, count: 2, timing: {distribution: lognormal, median: 300ms, sigma: 0.3}, think: 20ms}
"""
_FAULTS = """\
scenario:
  - {at: 6s, crash: fast-1, restart_after: 3s}
  - {at: 20s, pause: slow-1, for: 4s}
  - {at: 30s, disconnect: slow-2, for: 5s}
  - {at: 10s, leave: fast-2}
  - {at: 18s, join: fast-2}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _run(testbed: Testbed, name: str, text: str) -> Run:
    Path(f"{name}.yaml").write_text(f"name: {name}\n{text}")
    code, _, err = testbed("up", f"{name}.yaml")
    assert code == 0, err
    return load(next(Path("runs").glob(f"{name}-*")))


def _original(testbed: Testbed, faults: str = "") -> Run:
    return _run(testbed, "original", _TASK + _RULE + _VIRTUAL + _FLEET + faults)


def _again(testbed: Testbed, source: Run, more: str = "") -> Run:
    return _run(
        testbed, "again", f"{_TASK}{_RULE}{_VIRTUAL}{more}devices: {{from_run: {source.path}}}\n"
    )


def _load(devices: str, task: str = _TASK) -> Topology:
    text = f"name: recorded\n{task}{_RULE.replace('size: 2', 'size: 1')}{_VIRTUAL}devices: {devices}\n"
    Path("recorded.yaml").write_text(text)
    return topologies.load(Path("recorded.yaml"))


def _error(devices: str) -> str:
    with pytest.raises(BadInputError) as raised:
        _load(devices)
    return str(raised.value)


def _check_alike(one: Run, other: Run, within: float) -> None:
    by_client = (
        one.updates.groupby("client", observed=True)["staleness"],
        other.updates.groupby("client", observed=True)["staleness"],
    )
    sizes, means = ([getattr(group, what)() for group in by_client] for what in ("size", "mean"))
    for first, second in (sizes, means):
        assert second.to_dict() == pytest.approx(first.to_dict(), rel=within)


def test_run_from_its_own_record_is_the_same_run(testbed: Testbed) -> None:
    original = _original(testbed)
    again = _again(testbed, original)
    columns = ["client", "dispatched", "downloaded", "train_end", "sent", "arrived", "staleness"]
    left, right = (run.updates[columns] for run in (original, again))
    assert len(left) == len(right) > 300
    assert (left["client"].astype(str) == right["client"].astype(str)).all()
    assert (left["staleness"] == right["staleness"]).all()
    # Recorded times have microseconds, and the errors of about 200 rounds add up.
    assert (left[columns[1:-1]] - right[columns[1:-1]]).abs().to_numpy().max() < 1e-3
    assert list(again.devices["group"].astype(str)) == ["slow", "slow", "fast", "fast"]
    assert _load(f"{{from_run: {again.path}}}").fleet.hints == ()  # a record of a record
    recorded = _load(f"{{from_run: {original.path}}}", _TASK.replace("steps: 4", "steps: 8"))
    assert recorded.fleet.hints == (
        "slow-1 was recorded with trainings of 4 steps, and has trainings of 8: they last as long as "
        "the recorded ones",
    )
    manifest = original.path / "manifest.json"  # a dilated run has the times of devices
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "dilation": 4.0}))
    dilated = _load(f"{{from_run: {original.path}}}", _TASK.replace("steps: 4", "steps: 8"))
    assert dilated.devices == recorded.devices
    shutil.rmtree(original.path)  # the run's own files repeat it
    code, _, err = testbed("up", again.path / "topology.yaml", "--runs", "repeated")
    assert code == 0, err
    repeated = load(next(Path("repeated").iterdir()))
    assert (repeated.updates["arrived"] == again.updates["arrived"]).all()


def test_faults_are_repeated_and_updates_and_staleness_agree(testbed: Testbed) -> None:
    original = _original(testbed, _FAULTS)
    again = _again(testbed, original)
    _check_alike(original, again, within=0.03)
    done = {
        (device, json.loads(details)["action"])
        for device, details in zip(again.scenario["device"], again.scenario["details"], strict=True)
    }
    assert done == {
        ("fast-1", "crash"), ("fast-1", "restart"), ("fast-2", "leave"), ("fast-2", "join"),
        ("slow-1", "pause"), ("slow-1", "resume"), ("slow-2", "disconnect"), ("slow-2", "reconnect"),
    }  # fmt: skip


def test_round_lost_before_its_training_takes_no_recorded_training(testbed: Testbed) -> None:
    """The crash interrupts the second download, the end of the run the last training: neither may
    shift the durations, or give an update that was not there."""
    text = (
        _TASK_OF_ONE
        + "rule: {name: fedasync}\nevaluate: {every: 5s}\nstop: {after: 27s}\n"
        + _VIRTUAL
        + "virtual: {step_time: 1ms}\n"
    )
    values = "[1s, 2s, 3s, 4s, 5s, 6s]"
    device = f"timing: {{distribution: trace, values: {values}}}, link: {{down: 4kbit}}"
    fault = "scenario: [{at: 1600ms, crash: a, restart_after: 1s}]\n"
    source = _run(testbed, "source", f"{text}devices: [{{name: a, {device}}}]\n{fault}")
    again = _run(testbed, "again", f"{text}devices: {{from_run: {source.path}}}\n")
    took = (source.updates["train_end"] - source.updates["train_start"]).tolist()
    assert took == pytest.approx([1, 2, 3, 4, 5, 6, 1])
    for column in ("train_start", "train_end", "arrived"):
        assert again.updates[column].tolist() == pytest.approx(source.updates[column].tolist())


@pytest.mark.parametrize(
    ("rule", "device", "scenario", "key", "expected"),
    [
        # The goodbye takes 50 ms: it arrives after the order to join, and is no crash.
        (
            "{name: fedasync}",
            "timing: 300ms, link: {rtt: 100ms}",
            "[{at: 1050ms, leave: b}, {at: 1050ms, join: b}]",
            "actions",
            [["1050ms", "leave"], ["1100ms", "join"]],
        ),
        # Models leave at the next tick, 10 ms after the update: the server does not work in this time.
        (
            "{name: fedfix, period: 100ms}",
            "timing: 290ms, link: {rtt: 100ms}",
            "[]",
            "transfers",
            {"download": "50ms", "upload": "50ms", "model_bytes": 372, "update_bytes": 372},
        ),
        # All updates are late. A training begins when the one before is done, and waits in a pause. The
        # last one was seen for 150 ms, and must not end in the repeat.
        (
            "{name: fedavg, round_timeout: 150ms}",
            "timing: 250ms",
            "[{at: 600ms, pause: b, for: 500ms}]",
            "timing",
            {"distribution": "trace", "values": ["250ms"] * 9 + ["170ms"]},
        ),
    ],
)
def test_only_the_device_counts_in_its_durations(
    testbed: Testbed, rule: str, device: str, scenario: str, key: str, expected: object
) -> None:
    text = f"{_TASK_OF_TWO}rule: {rule}\nevaluate: {{every: 5s}}\nstop: {{after: 2900ms}}\n{_VIRTUAL}"
    devices = f"devices: [{{name: a, timing: 90ms}}, {{name: b, {device}}}]\nscenario: {scenario}\n"
    assert recorded.from_run(_run(testbed, "source", text + devices).path)["b"][key] == expected


def test_absences_that_nobody_ordered_are_repeated(testbed: Testbed) -> None:
    """As of a real device: the record has only reports that the device is offline, and ready again."""
    original = _original(testbed, _FAULTS)
    events = original.path / "events.jsonl"
    lines = [line for line in events.read_text().splitlines() if '"event":"action"' not in line]
    events.write_text("\n".join(lines) + "\n")
    actions = {group.name: group.actions for group in _load(f"{{from_run: {original.path}}}").devices}
    assert actions["fast-1"] == ((6.0, "crash"), (9.0, "restart"))
    assert actions["fast-2"] == ((10.0, "crash"), (18.0, "restart"))
    assert actions["slow-1"] is None  # 4 s of silence: the broker did not notice


def test_device_without_a_training_gets_the_durations_of_its_group(testbed: Testbed) -> None:
    absent = "scenario: [{at: 59.9s, join: slow-2}]\n"
    original = _original(testbed, absent)
    assert "slow-2" not in set(original.updates["client"])
    fleet = {group.name: group for group in _load(f"{{from_run: {original.path}}}").devices}
    median = (original.updates["train_end"] - original.updates["train_start"])[
        original.updates["client"] == "slow-1"
    ].median()
    timing = fleet["slow-2"].timing
    assert timing is not None
    assert timing.params["value"] == pytest.approx(median, abs=1e-5)
    assert fleet["slow-2"].actions == ((59.9, "join"),)


def test_client_with_one_update_repeats_it() -> None:
    Path("log.csv").write_text("client,start,end\na,0,2.5\nb,0,1\nb,1,2\n")
    fleet = _load("{from_log: log.csv}", _TASK_OF_TWO).devices
    assert [group.name for group in fleet] == ["a", "b"]
    assert [group.timing and group.timing.params for group in fleet] == [{"value": 2.5}, {"value": 1.0}]
    own = "timing: {distribution: uniform, low: 1s, high: 2s}"  # wins over what is recorded
    fleet = _load(f"{{from_log: log.csv, {own}}}", _TASK_OF_TWO).devices
    assert [group.timing and group.timing.params for group in fleet] == [{"low": 1.0, "high": 2.0}] * 2


def test_log_has_named_columns_times_and_transfers(testbed: Testbed) -> None:
    Path("log.csv").write_text(
        "device_id,began,done,bytes,upload,download\n"
        "Phone_1,2026-01-31T12:00:00,2026-01-31T12:00:10,400,2,1\n"
        "Phone_1,2026-01-31T12:00:20,2026-01-31T12:00:26.5,400,2.5,1\n"
    )
    run = _run(
        testbed,
        "logged",
        f"{_TASK_OF_ONE}rule: {{name: fedasync}}\n"
        f"stop: {{after: 60s}}\n{_VIRTUAL}devices:\n"
        "  from_log: log.csv\n  columns: {client: device_id, start: began, end: done}\n",
    )
    updates = run.updates
    assert set(updates["client"]) == {"phone-1"}
    trainings = (updates["train_end"] - updates["train_start"]).to_list()
    # 10 − 1 − 2, then 6.5 − 1 − 2.5, and from the beginning
    assert trainings == pytest.approx(([7, 3] * 5)[: len(trainings)])
    assert (updates["arrived"] - updates["sent"]).to_list()[:2] == pytest.approx([2, 2.5])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-10-25T02:59:50", 1_792_897_190.0),  # 02:59:50 UTC, whatever the host's zone
        ("2026-10-25T04:59:50+02:00", 1_792_897_190.0),
        ("1792897190", 1_792_897_190.0),
    ],
)
def test_date_without_a_zone_is_in_utc(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")  # where clocks go back at 03:00 on that day
    time.tzset()
    try:
        assert recorded._time(text, "start", "log.csv:2") == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


def test_dates_without_a_zone_are_said() -> None:
    rows = "client,start,end\na,2026-01-31T12:00:00,2026-01-31T12:00:10+00:00\na,2026-01-31T12:00:20,"
    Path("log.csv").write_text(rows + "2026-01-31T12:00:30\n")
    (hint,) = _load("{from_log: log.csv}", _TASK_OF_ONE).fleet.hints
    assert hint.endswith("log.csv: 3 times without a zone, read as UTC")


@pytest.mark.parametrize("text", ["20260131120030", "1792897190000"])
def test_numbers_that_are_no_seconds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"log.csv:2: end is '{text}', which is no number of seconds"):
        recorded._time(text, "end", "log.csv:2")


def test_transfer_of_another_size_takes_in_proportion(testbed: Testbed) -> None:
    task = "task: {name: quadratic, centers: [[" + ", ".join(["0"] * 2000) + "]], local: {steps: 1}}\n"
    text = f"{task}rule: {{name: fedasync}}\nstop: {{updates: 1}}\n{_VIRTUAL}"
    Path("log.csv").write_text("client,start,end,bytes,upload\na,0,5,4000,2\n")
    run = _run(testbed, "large", f"{text}devices: {{from_log: log.csv}}\n")
    row = run.updates.iloc[0]
    assert row["arrived"] - row["sent"] == pytest.approx(2 * row["bytes"] / 4000)
    assert row["bytes"] > 8000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("client,begin,end\na,0,1\n", ":1: found no column 'start' among client, begin, end"),
        ("client,start,end\n", "no row follows the header"),
        ("", "found no column 'client' among none"),
        ("client,start,end\na,0,1\na,2,1\n", ":3: end is before start (1 < 2)"),
        ("client,start,end\na,5,6\nb,0,1\na,4,5\n", ":4: start of a is before the start in an earlier"),
        ("client,start,end\na,0,1\na,zero,1\n", ":3: start is 'zero'"),
        ("client,start,end\na,0,nan\n", ":2: end is 'nan'"),
        ("client,start,end\na,0\n", ":2: found 2 values, expected 3"),
        ("client,start,end\n --,0,1\n", ":2: client is '--'"),
        ("client,start,end\nA b,0,1\na-b,0,1\n", ":3: the clients 'A b' and 'a-b'"),
        ("client,start,end,upload\na,0,1,2\n", ":2: download and upload take longer"),
        ("client,start,end,bytes\na,0,1,-2\n", ":2: bytes is '-2'"),
    ],
)
def test_faulty_log_is_refused_with_its_row(text: str, expected: str) -> None:
    Path("log.csv").write_text(text)
    found = _error("{from_log: log.csv}")
    assert expected in found
    assert "devices[0].from_log" in found


def test_source_that_is_no_run_is_refused(testbed: Testbed) -> None:
    assert "is no run directory" in _error("{from_run: nowhere}")
    assert "cannot be read: No such file" in _error("{from_log: nowhere.csv}")
    original = _original(testbed)
    assert f"write {original.path.absolute()}" in _error(f"{{from_run: {original.path.name}}}")
    events = original.path / "events.jsonl"
    lines = [line for line in events.read_text().splitlines() if '"event":"update"' not in line]
    events.write_text("\n".join(lines) + "\n")
    assert "has no update" in _error(f"{{from_run: {original.path}}}")
    events.write_text("{}\n")
    assert "events.jsonl:1" in _error(f"{{from_run: {original.path}}}")


def test_keys_that_do_not_fit_together_are_refused() -> None:
    Path("log.csv").write_text("client,start,end,upload\na,0,5,1\n")
    assert "cannot be combined" in _error("[{name: x, count: 2, from_log: log.csv}]")
    assert "columns: has no effect" in _error("[{name: x, cpu: 1, columns: {client: y}}]")
    assert "link.up has no effect" in _error("{from_log: log.csv, link: {up: 1mbit}}")
    with pytest.raises(BadInputError, match="include the server's link"):
        _load("{from_log: log.csv}", f"{_TASK_OF_ONE}server: {{link: {{up: 1mbit}}}}\n")
    assert "a, a name that another group has" in _error(
        "[{name: r, from_log: log.csv}, {name: a, cpu: 1}]"
    )
    found = _error("{from_log: log.csv, actions: [[5s, crash], [3s, restart]]}")
    assert "3 s follows 5 s" in found


def test_recorded_transfers_are_refused_in_real_time(testbed: Testbed) -> None:
    Path("log.csv").write_text("client,start,end,upload\na,0,5,1\n")
    text = f"name: real\n{_TASK_OF_ONE}rule: {{name: fedasync}}\n"
    Path("real.yaml").write_text(f"{text}stop: {{after: 5s}}\ndevices: {{from_log: log.csv}}\n")
    code, _, err = testbed("plan", "real.yaml", "--runtime", "process")
    assert code == 2
    assert "the virtual runtime alone" in err
    assert "testbed twin" in err


def test_other_settings_on_the_same_fleet_are_one_command(testbed: Testbed) -> None:
    original = _original(testbed)
    Path("again.yaml").write_text(
        f"name: again\n{_TASK}{_RULE}{_VIRTUAL}devices: {{from_run: {original.path}}}\n"
    )
    code, _, err = testbed("up", "again.yaml", "--set", "rule.buffer_size=4", "--set", "seed=2")
    assert code == 0, err
    again = load(next(Path("runs").glob("again-*")))
    assert (again.topology["rule"]["buffer_size"], again.topology["seed"]) == (4, 2)
    assert len(again.versions) == len(again.updates) // 4
    durations = [
        (run.updates["train_end"] - run.updates["train_start"])[run.updates["client"] == "fast-1"]
        for run in (original, again)
    ]
    assert durations[1].head(90).to_numpy() == pytest.approx(durations[0].head(90).to_numpy(), abs=2e-6)
    code, _, err = testbed("up", "again.yaml", "--set", "rule.bufer_size=4")
    assert (code, "again.yaml with --set" in err, "buffer_size" in err) == (2, True, True)
    for wrong in ("seed", "=3", "name.x=3"):
        code, _, err = testbed("up", "again.yaml", "--set", wrong)
        assert (code, f"--set {wrong}" in err) == (2, True)
