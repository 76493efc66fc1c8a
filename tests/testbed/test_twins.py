"""Twins: emulated devices with the figures measured in a run, and the comparison of both runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load
from testbed import speed
from testbed import topology as topologies
from testbed.api import twins
from testbed.api.launching import plan_run
from testbed.speed import from_core
from testbed.topology import profiles
from testbed.virtual import slices
from tests.running import Testbed

_TEXT = """\
name: desk
task: {name: digits-logreg, local: {steps: 10, batch_size: 32, lr: 0.2}}
rule: {name: fedasync}
devices:
  - {name: slow, count: 2, cpu: 0.1, link: {up: 200kbit, down: 400kbit, rtt: 80ms}}
  - {name: fast, cpu: 0.5, think: 20ms}
scenario: [{at: 4s, crash: slow-2, restart_after: 2s}, {at: 9s, set: fast, cpu: 0.4}]
evaluate: {every: 1s}
stop: {after: 20s}
virtual: {step_time: 8ms, sliced_step_time: 10ms, start_time: 1s, update_time: 3ms, packets: true}
runtime: {name: virtual}
"""
_CORE: dict[str, Any] = {
    "gflops": [20.0, 20.0, 20.0],
    "training": {"convolution": 50.0, "depthwise": 1.0, "memory": 2.0, "matrix": 60.0},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is in a folder of its own, on a host with a known speed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # also for the process of the twin
    known = from_core(_CORE, speed.calibrated_host())
    speed._keep(speed._Cache(calibrations=(known,)))


def _original(testbed: Testbed, text: str = _TEXT) -> Path:
    Path("desk.yaml").write_text(text)
    code, _, err = testbed("up", "desk.yaml")
    assert code == 0, err
    return next(Path("runs").glob("desk-*"))


def test_twin_repeats_the_measured_rounds(testbed: Testbed) -> None:
    run = _original(testbed, _TEXT.replace(", {at: 9s, set: fast, cpu: 0.4}", ""))
    code, out, err = testbed("twin", run, "--runtime", "virtual", "--json")
    assert code == 0, err
    outer = json.loads(out)
    (told,) = outer["pairs"]
    assert outer["ranks"] is None
    assert told["remarks"] == ["fast: no rate and no round trip was measured; its link is not limited"]
    for device in told["devices"]:
        assert device["twin_round"] == pytest.approx(device["round"], rel=0.02)
        assert device["twin_updates"] == pytest.approx(device["updates"], abs=1)
    figures = {row["name"]: row for row in told["figures"]}
    assert abs(figures["updates"]["difference"]) < 0.02
    assert abs(figures["staleness, mean"]["difference"]) < 0.05
    (time,) = (row for name, row in figures.items() if name.startswith("time to "))
    assert time["twin"] == pytest.approx(time["original"], rel=0.1)
    assert told["ranks"]["configurations"][0]["name"] == "fast"
    assert told["ranks"]["configurations"][0]["predicted_rank"] == 1
    assert told["original"] == run.name
    assert load(Path("runs") / told["twin"]).topology["name"] == "desk-twin"


def test_twin_of_a_run_that_was_cut_short_lasts_as_long(testbed: Testbed) -> None:
    run = _original(testbed)
    records = run / "events.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[: len(lines) // 2]))
    made = twins.make(run, runtime="virtual")
    assert "the run was cut short: its twin lasts as long as the run did" in made.remarks
    stop = topologies.load(made.write(Path("twin"))).stop.build()
    assert stop.after == pytest.approx(load(run).duration, abs=1e-6) != 20.0


def test_topology_has_the_measured_figures_with_their_source(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "measure_step", lambda _: (0.008, 0.010))
    run = _original(testbed)
    code, out, err = testbed("twin", run, "--to", "twin")
    assert code == 0, err
    assert "twin/twin.yaml" in out
    assert "changes of CPU shares" in out
    topology = topologies.load(Path("twin/twin.yaml"))
    known = profiles.read(Path("twin/profiles.yaml"))
    groups = {group.name: group for group in topology.devices}
    assert list(groups) == ["slow-1", "slow-2", "fast"]
    assert groups["slow-1"].profile == "slow-1"
    share = (known.devices["slow-1"].gflops or 0) / 20
    assert share == pytest.approx(0.1, rel=0.01)
    assert groups["slow-1"].link is not None
    assert groups["slow-1"].link.kind == "slow-1"
    assert [name for _, name in groups["slow-2"].actions or ()] == ["crash", "restart"]
    assert topology.scenario == ()
    assert topology.dilation == "auto"
    link = known.links["slow-1"]
    assert (link.up, link.down, link.rtt) == (200_000, 400_000, 0.08)
    assert run.name in link.source
    assert run.name in known.devices["slow-1"].source
    assert not Path("runs/desk-twin").exists()


@pytest.mark.parametrize("runtime", ["process", "virtual"])
def test_twin_is_as_fast_on_another_host(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    """Its cores are twice as fast: emulated devices need half the share there. In virtual time the
    twin's own step counts."""
    monkeypatch.setattr(slices, "measure_step", lambda _: (0.008, 0.010))
    run = _original(testbed)
    assert testbed("twin", run, "--to", "twin", "--runtime", runtime).code == 0
    twice = {kind: 2 * speed for kind, speed in _CORE["training"].items()}
    other = from_core({"gflops": [40.0] * 3, "training": twice}, speed.calibrated_host())
    speed._keep(speed._Cache(calibrations=(other,)))
    launch = plan_run(Path("twin/twin.yaml"), runtime=runtime)
    shares = {device.name: device.cpu for device in launch.plan.devices}
    assert shares["slow-1"] == pytest.approx(0.05 if runtime == "process" else 0.1, rel=0.02)


def test_configurations_are_ranked_in_runs_and_twins(testbed: Testbed) -> None:
    Path("desk.yaml").write_text(_TEXT.replace("after: 20s", "after: 10s"))
    Path("study.yaml").write_text(
        "topology: desk.yaml\nvariants: {fast: {}, slow: {task.local.lr: 0.01}}\n"
    )
    code, _, err = testbed("sweep", "study.yaml", "--jobs", "1")
    assert code == 0, err
    assert testbed("twin", "study", "--dry-run").code == 2  # of one run
    code, out, err = testbed("twin", "study", "--runtime", "virtual")
    assert code == 0, err
    assert "Mean time to a test accuracy of" in out
    assert "Kendall's tau-b: 1.00" in out.rpartition("Mean time")[2]
    assert len(list(Path("runs").glob("desk-twin-*"))) == 2


def test_dry_run_writes_nothing(testbed: Testbed) -> None:
    run = _original(testbed)
    before = sorted(Path().rglob("*"))
    code, out, err = testbed("twin", run, "--dry-run", "--runtime", "virtual")
    assert code == 0, err
    assert "profile: slow-1" in out
    assert "source: " in out
    assert sorted(Path().rglob("*")) == before


def test_durations_of_the_topology_are_kept(testbed: Testbed) -> None:
    timing = "timing: {distribution: uniform, low: 100ms, high: 300ms}"
    run = _original(testbed, _TEXT.replace("cpu: 0.5", timing).replace("set: fast", "set: slow-1"))
    made = twins.make(run, runtime="virtual")
    groups = {group.name: group for group in topologies.parse(made.topology).devices}
    assert groups["fast"].timing is not None
    assert groups["fast"].timing.params == {"low": 0.1, "high": 0.3}
    assert "fast: its durations are given by the topology, and are kept" in made.remarks


@pytest.mark.parametrize("damage", ["events", "folder"])
def test_run_without_updates_is_refused(testbed: Testbed, damage: str) -> None:
    if damage == "folder":
        Path("empty").mkdir()
        code, _, err = testbed("twin", "empty")
        assert (code, "empty" in err) == (2, True)
        return
    run = _original(testbed)
    events = run / "events.jsonl"
    lines = [line for line in events.read_text().splitlines() if '"event":"update"' not in line]
    events.write_text("\n".join(lines) + "\n")
    code, _, err = testbed("twin", run)
    assert code == 2
    assert "has no update" in err
