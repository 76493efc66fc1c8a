from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from agents import events
from analysis import records
from analysis.charts import CHARTS
from analysis.load import Follower, load, load_many
from tests.analysis.conftest import EVENTS, MANIFEST

ACTED = events.Acted(3.0, "slow", "hand", 0.25, {"action": "set", "link": {"up": None, "rtt": 0.1}})


def write(directory: Path, *lines: str) -> None:
    (directory / "events.jsonl").write_text("".join(line + "\n" for line in lines))


def change_manifest(directory: Path, **entries: object) -> None:
    (directory / "manifest.json").write_text(json.dumps({**MANIFEST, **entries}))


def append_telemetry(directory: Path, sample: dict[str, object]) -> None:
    """A line after the fixture's torn one."""
    with (directory / "telemetry.jsonl").open("a") as file:
        file.write("\n" + json.dumps(sample) + "\n")


def test_every_record_becomes_a_row(directory: Path) -> None:
    run = load(str(directory))
    assert run.manifest["devices"]["fast"]["cpu"] == 0.5
    assert run.topology["rule"] == {"name": "fedbuff", "buffer_size": 1}
    assert run.started is not None
    assert run.started.clients == ("fast", "slow")
    assert run.updates["client"].tolist() == ["fast", "fast", "slow"]
    assert run.updates["group"].tolist() == ["pi", "pi", "pi"]
    assert run.updates["staleness"].tolist() == [0, 0, 2]
    assert run.versions["at"].tolist() == [2.0, 5.0, 8.0]
    assert run.evaluations["accuracy"].tolist() == [0.1, 0.85, 0.8]
    assert run.rejected["reason"].tolist() == ["duplicate: sequence 2"]
    assert run.statuses.empty
    assert run.ended is not None
    assert run.duration == 10.0


def test_columns_are_typed_and_clients_in_plan_order(directory: Path) -> None:
    run = load(directory)
    assert run.updates["client"].cat.categories.tolist() == ["fast", "slow", "mute"]
    assert run.devices["group"].cat.categories.tolist() == ["pi", "nano"]
    assert run.updates["staleness"].dtype == np.int64
    assert run.updates["loss"].dtype == np.float64
    assert run.devices["importance"].tolist() == [0.5, 0.3, 0.2]


def test_unplanned_client_is_last_and_has_no_group(directory: Path) -> None:
    write(directory, *EVENTS[:2], EVENTS[2].replace('"fast"', '"guest"'), EVENTS[8])
    run = load(directory)
    assert run.updates["client"].cat.categories.tolist() == ["fast", "slow", "mute", "guest"]
    assert run.updates["group"].isna().tolist() == [True, False]


def test_non_finite_values_are_nan_and_unknown_records_skipped(directory: Path) -> None:
    update = EVENTS[2].replace('"loss":1.5', '"loss":null,"colour":{"new":[1]}')
    unknown = '{"event":"novelty","at":1.0}', '{"event":"novelty","at":"noon","version":[1]}'
    write(directory, EVENTS[0], update, *unknown, EVENTS[3])
    run = load(directory)
    assert run.updates["loss"].isna().tolist() == [True]
    assert len(run.versions) == 1


def test_records_may_be_written_with_spaces(directory: Path) -> None:
    lines = [json.dumps(json.loads(line)) if '"version"' in line else line for line in EVENTS]
    assert lines != [*EVENTS]
    expected = load(directory)
    write(directory, *lines)
    found = load(directory)
    assert found.versions.equals(expected.versions)
    assert found.updates.equals(expected.updates)


def test_torn_last_line_is_skipped(directory: Path) -> None:
    assert load(directory).telemetry["cpu"].tolist() == [1.25]  # the fixture's second line is torn
    path = directory / "events.jsonl"
    path.write_text(path.read_text()[:-20])
    run = load(directory)
    assert run.ended is None
    assert len(run.evaluations) == 3


@pytest.mark.parametrize(
    "broken",
    ["{", "[]", '{"at":1.0}', '{"event":"version","at":1.0}', '{"event":"status","at":"x"}', "{}"],
)
def test_unreadable_line_is_named(directory: Path, broken: str) -> None:
    write(directory, *EVENTS[:4], broken, *EVENTS[4:])
    with pytest.raises(ValueError, match=r"events.jsonl:.*\b5\b"):
        load(directory)


def test_line_numbers_are_counted_across_blocks(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "BLOCK", 100)  # shorter than a line
    whole = load(directory)
    assert len(whole.updates) == 3
    assert whole.ended is not None
    write(directory, *EVENTS[:8], "{", *EVENTS[8:])
    with pytest.raises(ValueError, match=r"events.jsonl:9:"):
        load(directory)


def test_running_run_lasts_until_its_last_record(directory: Path) -> None:
    write(directory, *EVENTS[:9])
    assert load(directory).duration == 8.0  # an update's time is when it was applied


def test_resumed_run_continues_after_its_first_end(directory: Path) -> None:
    resumed = (
        EVENTS[0].replace('"at":0.0,"wall_clock":1.7e9', '"at":10.0,"wall_clock":1.8e9'),
        EVENTS[1].replace('"at":0.0', '"at":11.0'),
    )
    write(directory, *EVENTS, *resumed)
    run = load(directory)
    assert run.started is not None
    assert (run.started.at, run.ended, run.duration) == (0.0, None, 11.0)
    write(directory, *EVENTS, *resumed, EVENTS[-1].replace('"at":10.0', '"at":12.0'))
    assert load(directory).duration == 12.0


def test_run_without_records_has_all_columns_and_no_rows(directory: Path) -> None:
    for name in ("events.jsonl", "telemetry.jsonl", "topology.yaml"):
        (directory / name).unlink()
    run = load(directory)
    assert (run.started, run.duration, run.topology) == (None, 0.0, {})
    names = [field.name for field in dataclasses.fields(events.UpdateApplied)]
    assert run.updates.columns.tolist() == [*names, "energy_j", "group"]
    assert run.telemetry.columns.tolist()[:3] == ["device", "at", "cpu"]
    assert run.fidelity.columns.tolist() == ["device", "group", "figure", "asked", "got", "error"]


def test_folder_without_a_run_or_with_a_newer_format_is_refused(directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(directory / "nowhere")
    write(directory, EVENTS[0].replace('"format":1', '"format":2'))
    with pytest.raises(ValueError, match="format 2 is newer"):
        load(directory)
    (directory / "manifest.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(ValueError, match="format 2 is newer"):
        load(directory)


def test_telemetry_is_in_device_time(directory: Path) -> None:
    assert load(directory).telemetry[["at", "monotonic"]].values.tolist() == [[7.5, 107.5]]
    change_manifest(directory, dilation=5.0)
    assert load(directory).telemetry["at"].tolist() == [1.5]
    (directory / "manifest.json").write_text(json.dumps({"format": 1}))
    assert load(directory).telemetry["at"].isna().tolist() == [True]


def test_each_part_of_a_resumed_run_has_its_own_clock(directory: Path) -> None:
    # resumed at device time 10, when the host's clock showed 200 s
    again = events.RunStarted(10.0, 1.7e9 + 100, ("fast",), ())
    write(directory, *EVENTS, events.to_line(again).strip())
    samples = [{"device": "fast", "at": at, "cpu": 1.0} for at in (90.0, 107.0, 195.0, 203.0)]
    (directory / "telemetry.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    run = load(directory)
    # the third was taken while the clients of the second leg were being started
    assert run.telemetry["at"].fillna(-99).tolist() == [-10.0, 7.0, -99.0, 13.0]
    assert run.duration == 13.0


def test_host_clock_may_restart_between_segments(directory: Path) -> None:
    """The host had been up for 100 s when the first leg began, and for 90 s when the second did, at
    device time 10."""
    again = events.RunStarted(10.0, 1.7e9 + 1000, ("fast",), ())
    write(directory, *EVENTS, events.to_line(again).strip())
    first, second = 1.7e9 - 100, 1.7e9 + 910
    change_manifest(directory, monotonic_zero=second)
    lines = [{"monotonic_zero": first}, *({"device": "fast", "at": at, "cpu": 1.0} for at in (95, 107))]
    lines += [{"monotonic_zero": second}, {"device": "fast", "at": 93.0, "cpu": 1.0}]
    probe = {"device": "slow", "at": 94.0, "probe": {"up": 5e5}}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for torn in ("", '{"device": "fa\n'):  # Arrow reads the one, we the other
        (directory / "telemetry.jsonl").write_text(torn + text)
        follower = Follower(directory)
        assert follower.run().telemetry["at"].tolist() == [-5.0, 7.0, 13.0]
        with (directory / "telemetry.jsonl").open("a") as file:  # read later than what tells its clock
            file.write(json.dumps(probe) + "\n")
        run = follower.run()
        assert run.probes["at"].tolist() == [14.0]
        assert run.telemetry["monotonic"].tolist() == [-915.0, -903.0, 93.0]  # one clock for all


def test_durations_of_telemetry_are_in_device_time(directory: Path) -> None:
    change_manifest(directory, dilation=5.0)
    queue = {"busy": 2.0, "left": 100, "allowed": 100}
    sample = {"device": "slow", "at": 110.0, "cpu": 1.0, "throttled": 10.0, "memory": 1, "uplink": queue}
    append_telemetry(directory, sample)
    columns = ["at", "cpu", "throttled", "up_busy", "up_left"]
    assert load(directory).telemetry[columns].values.tolist()[-1] == [2.0, 1.0, 2.0, 0.4, 100.0]


def test_use_of_segments_is_in_device_time(directory: Path) -> None:
    """2000 bytes in 4 s of the host are 8 kbit/s of a device whose seconds last two of the host's."""
    change_manifest(directory, dilation=2.0)
    use = {"segment": "cell", "way": "up", "devices": {"fast": 2000}, "background": 0}
    line = {"device": "router", "at": 108.0, "seconds": 4.0, "segments": [use]}
    append_telemetry(directory, line)
    run = load(directory)
    assert run.network[["at", "seconds", "bytes"]].values.tolist() == [[4.0, 2.0, 2000.0]]
    rate = CHARTS["segments-over-time"]([run]).layers[0]
    assert (rate.columns["x"].tolist(), rate.columns["y"].tolist()) == ([3.0], [8.0])


def test_probes_are_in_device_time(directory: Path) -> None:
    change_manifest(directory, dilation=2.0)
    probe = {"device": "slow", "at": 98.0, "probe": {"up": 5e5, "rtt": 0.2}}
    append_telemetry(directory, probe)
    run = load(directory)
    assert run.telemetry["device"].tolist() == ["fast"]
    assert run.probes[["device", "at", "up", "rtt"]].values.tolist() == [["slow", -1.0, 1e6, 0.1]]
    assert run.probes["down"].isna().all()


def test_repr_of_a_run_is_one_line(directory: Path) -> None:
    told = f"<run {directory.name}: 3 devices, 3 updates in 3 versions, 10.0 s>"
    assert repr(load(directory)) == told


def test_scenario_table_lists_actions_with_details(directory: Path) -> None:
    write(directory, *EVENTS[:5], events.to_line(ACTED).strip(), *EVENTS[5:])
    row = load(directory).scenario.iloc[0]
    assert (row["at"], row["device"], row["action"]) == (3.0, "slow", "set")
    assert json.loads(row["details"]) == ACTED.details


def test_fidelity_table_has_a_row_per_figure(directory: Path) -> None:
    cpu = {"asked": 0.5, "got": 0.49, "error": -2.0, "measured": 9.0, "used": 0.3}
    figures = {"group": "pi", "cpu": cpu, "up": {"asked": None, "got": None, "error": None}, "probes": 0}
    (directory / "fidelity.json").write_text(json.dumps({"format": 1, "devices": {"fast": figures}}))
    table = load(directory).fidelity
    assert table["figure"].tolist() == ["cpu", "up"]
    assert table["got"].tolist() == pytest.approx([0.49, np.nan], nan_ok=True)


def test_unreadable_fidelity_is_an_error_once_the_run_has_an_outcome(directory: Path) -> None:
    (directory / "fidelity.json").write_text('{"format": 1, "dev')
    assert load(directory).fidelity.empty
    change_manifest(directory, outcome="after")
    with pytest.raises(ValueError, match=r"fidelity.json:"):
        load(directory)


def test_follower_returns_new_records_and_the_whole_run(directory: Path) -> None:
    path = directory / "events.jsonl"
    write(directory, *EVENTS[:4])
    follower = Follower(directory)
    assert follower.read()["update"]["sequence"].tolist() == [1]
    assert follower.read() == {}
    with path.open("a") as file:
        file.write(EVENTS[4] + "\n" + EVENTS[5][:30])
    new = follower.read()
    assert list(new) == ["update"]
    assert new["update"]["sequence"].tolist() == [2]
    with path.open("a") as file:
        file.write(EVENTS[5][30:] + "\n" + "\n".join(EVENTS[6:]) + "\n")
    run, whole = follower.run(), load(directory)
    for name, table in whole.tables.items():
        pd.testing.assert_frame_equal(run.tables[name], table)
    assert run.ended == whole.ended
    assert follower.read() == {}


def test_runs_of_a_folder_are_sorted_oldest_first(directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for name, created in (("b", 1.0), ("a", 2.0)):
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text(json.dumps({"format": 1, "created": created}))
    assert [run.name for run in load_many(folder)] == ["b", "a"]
    assert [run.name for run in load_many([folder / "a"])] == ["a"]
    with pytest.raises(FileNotFoundError, match="no run directory"):
        load_many(folder / "a")


def test_export_writes_every_table(directory: Path, tmp_path: Path) -> None:
    run = load(directory)
    paths = run.export(tmp_path / "out")
    assert {path.stem for path in paths} == set(run.tables)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "updates.parquet"), run.updates)
    run.export(tmp_path / "out", "csv")
    assert pd.read_csv(tmp_path / "out" / "versions.csv")["at"].tolist() == [2.0, 5.0, 8.0]
    with pytest.raises(ValueError, match="parquet or csv"):
        run.export(tmp_path / "out", "xls")  # type: ignore[arg-type]


def test_duration_extends_to_the_last_sample(directory: Path) -> None:
    (directory / "events.jsonl").write_text(EVENTS[0] + "\n")
    assert load(directory).duration == 7.5
    (directory / "telemetry.jsonl").write_text('{"device":"fast","at":99.5,"cpu":1.0}\n')  # not begun
    assert load(directory).duration == 0.0


def test_devices_that_are_alike_share_an_entry_of_the_manifest(directory: Path) -> None:
    shared = {"pi-9": {"count": 3, "group": "pi", "cpu": 0.5}, "nano": {"group": "nano"}}
    change_manifest(directory, devices=shared)
    run = load(directory)
    assert list(run.manifest["devices"]) == ["pi-9", "pi-10", "pi-11", "nano"]
    assert run.devices["device"].tolist() == ["pi-9", "pi-10", "pi-11", "nano"]
    assert run.devices["cpu"].fillna(0.0).tolist() == [0.5, 0.5, 0.5, 0.0]
    for name, count in (("pi", 3), ("pi-1", 1_000_001), ("pi-1", 0)):
        devices = {name: {"count": count, "group": "pi"}}
        change_manifest(directory, devices=devices)
        with pytest.raises(ValueError, match=r"manifest\.json: not a manifest: devices"):
            load(directory)


def test_topology_that_contains_itself_is_refused(directory: Path) -> None:
    (directory / "topology.yaml").write_text("name: t\nrule: {name: fedavg}\nown: &x [1, *x]\n")
    with pytest.raises(ValueError, match=r"topology.yaml: this value contains itself .*line 3"):
        load(directory)
