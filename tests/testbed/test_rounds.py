"""How long a round is expected to take, beside what virtual time makes of it."""

from __future__ import annotations

import json
import math
from math import inf
from pathlib import Path

import pytest

from agents import events
from agents.config import LocalTraining
from testbed import topology
from testbed.data import preparation
from testbed.energy.planned import battery_lives
from testbed.energy.planned import remarks as battery_remarks
from testbed.plan import HostResources, costs, plan, rounds
from testbed.plan.rounds import Round
from testbed.topology import Topology
from tests.running import Testbed

HOST = HostResources(cores=(0, 1, 2, 3), memory=2**34)
PARAMETERS = 250_000
"""A megabyte; messages have some hundred bytes more."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fleet(devices: str, local: str = "steps: 20", stop: str = "after: 10s", more: str = "") -> Topology:
    return topology.parse(
        "name: fleet\n"
        f"task: {{name: digits-logreg, flops_per_step: 1e9, local: {{{local}}}}}\n"
        "rule: {name: fedasync}\n"
        f"devices: [{devices}]\n"
        f"stop: {{{stop}}}\n{more}"
    )


def one(
    devices: str,
    runtime: str = "virtual",
    samples: int | None = 100,
    local: str = "steps: 20",
    **more: str,
) -> Round:
    wanted = fleet(devices, local, **more)
    known = None if samples is None else {"pi": samples}
    return rounds.estimate_rounds(wanted, plan(wanted, runtime, HOST), PARAMETERS, known)["pi"]


def test_transfer_time_uses_the_slowest_link_and_a_round_trip() -> None:
    assert one("{name: pi, timing: 1s}").transfer == 0
    own = one("{name: pi, timing: 1s, link: {up: 1mbit, down: 8mbit, rtt: 100ms}}")
    assert own.transfer == pytest.approx(8 + 1 + 0.1, rel=1e-3)
    assert own.seconds == pytest.approx(own.transfer + 1)
    shared = "link: {up: 1mbit}, access: {name: cell, down: 2mbit}"
    assert one(f"{{name: pi, timing: 1s, {shared}}}").transfer == pytest.approx(8 + 4, rel=1e-3)
    server = "server: {link: {up: 500kbit, down: 4mbit}}\n"  # the models go up from there
    slow = one("{name: pi, timing: 1s, link: {up: 8mbit, down: 8mbit}}", more=server)
    assert slow.transfer == pytest.approx(2 + 16, rel=1e-3)
    lossy = one("{name: pi, timing: 1s, link: {up: 8mbit, down: 8mbit, rtt: 100ms, loss: 5%}}")
    assert lossy.transfer > 3 * (2 + 0.1)
    assert one("{name: pi, timing: 1s, link: {loss: 100%}}").transfer == inf


def test_training_time_equals_virtual_time() -> None:
    assert one("{name: pi, gflops: 10, speed: 0.5}").seconds == pytest.approx(20 / 5)
    step = "virtual: {step_time: 10ms}\n"
    assert one("{name: pi, cpu: 0.1}", more=step).seconds == pytest.approx(20 * 0.1)
    assert one("{name: pi, cpu: 0.1, timing: 3s}", more=step).seconds == 3
    assert one("{name: pi, timing: 3s, speed: 0.5}").seconds == 6
    emulated = one("{name: pi, cpu: 0.1, gflops: 10}", "docker", more=step)
    assert emulated.seconds == pytest.approx(20 * 0.1)  # the share decides
    thinks = "think: {distribution: exponential, mean: 4s}"
    assert one(f"{{name: pi, timing: 1s, {thinks}}}").seconds == 5


def test_duration_of_epochs_needs_the_number_of_samples() -> None:
    epochs = "epochs: 2, batch_size: 32"
    known = one("{name: pi, gflops: 1}", local=epochs)
    assert known.seconds == pytest.approx(8)
    assert (known.samples, known.lacks) == (100, frozenset())
    unknown = one("{name: pi, gflops: 1, think: 2s}", local=epochs, samples=None)
    assert (unknown.seconds, unknown.samples, unknown.lacks) == (2, None, frozenset({"samples"}))


def test_unknown_durations_are_reported() -> None:
    no_step = one("{name: pi, cpu: 0.1, timing: 3s}")
    assert (no_step.seconds, no_step.lacks) == (3, frozenset({"step time"}))
    heavy = "{distribution: pareto, scale: 1s, shape: 1}"
    assert one(f"{{name: pi, timing: {heavy}}}").lacks == frozenset({"mean"})
    assert one(f"{{name: pi, timing: 1s, think: {heavy}}}").lacks == frozenset({"mean"})
    wanted = fleet("{name: pi, count: 6, cpu: 0.1}")
    planned = plan(wanted, "virtual", HOST)
    found = rounds.estimate_rounds(wanted, planned, PARAMETERS, None)
    samples, step = rounds.remarks(wanted, found)
    assert "number of samples per device is known once a run" in samples
    assert "a step of pi-1, pi-2, pi-3, pi-4 and 2 more on this host is unknown" in step
    assert rounds.group_rows(planned, found) == [
        {"group": "pi", "devices": 6, "samples": None, "transfer": None, "round": None}
    ]


def test_device_that_cannot_finish_a_round_gives_a_warning() -> None:
    devices = (
        "{name: a, timing: 10s}, {name: b, count: 2, timing: 10.1s}, "
        "{name: c, timing: 1s, link: {up: 100kbit}}"
    )
    wanted = fleet(devices)
    planned = plan(wanted, "virtual", HOST)
    samples = {"a": 9, "b-1": 5, "b-2": 7, "c": 9}
    found = rounds.estimate_rounds(wanted, planned, PARAMETERS, samples)
    link, late = rounds.remarks(wanted, found)
    assert link.startswith("Warning: c will not finish one round: model and update alone take 80")
    assert late.startswith("Warning: b-1, b-2 will not finish one round: it takes about 10.1s, but ")
    assert "the run ends after 10s (stop.after)" in late
    assert list(rounds.remarks(fleet(devices, stop="updates: 5"), found)) == []
    row = rounds.group_rows(planned, found)[1]
    assert row == {"group": "b", "devices": 2, "samples": "5 to 7", "transfer": None, "round": "10.1s"}


def test_plan_says_how_long_a_battery_lasts() -> None:
    """2 W idle and 5 W busy: 600 J last 300 s idle. A round of 3 s computes for 1 s: 200 s at 3 W."""
    energy = "idle: 2W, core: 3W, battery: {capacity: 600J}"
    charged = energy.replace("600J", "600J, power_off_at: 50%") + ", charger: 5W"
    devices = (
        f"{{name: a, count: 2, timing: 1s, think: 2s, energy: {{{energy}}}}}, "
        f"{{name: b, timing: 1s, energy: {{{charged}}}}}, "
        f"{{name: c, timing: 1s, energy: {{{energy}}}}}, "
        "{name: d, timing: 1s, energy: {idle: 1W, core: 1W}}, {name: e, timing: 1s}"
    )
    scenario = "scenario: [{at: 9s, charge: c, watts: 9W}]\n"
    wanted = fleet(devices, stop="after: 250s", more=scenario)
    planned = plan(wanted, "virtual", HOST)
    found = rounds.estimate_rounds(wanted, planned, PARAMETERS, None)
    lives = battery_lives(planned, found)
    times = {name: (one.battery_idle_s, one.battery_working_s) for name, one in lives.items()}
    assert times["a-1"] == pytest.approx((300, 200))
    assert (lives["a-1"].idle_w, lives["a-1"].working_w) == pytest.approx((2, 3))
    assert (times["b"], lives["b"].returns) == ((inf, inf), True)
    assert (times["c"], lives["c"].returns) == ((300, 120), False)
    assert (times["d"][0], lives["d"].returns) == (None, True)
    assert "e" not in lives
    off, lost = battery_remarks(wanted, planned, found)
    assert off.startswith("The batteries of a-1, a-2, c are too low after 2min to 3.33min if they train")
    assert lost.startswith("Warning: a-1, a-2 cannot return after the power-off")
    own = {row["group"]: row for row in rounds.group_rows(planned, found)}
    assert (own["a"]["power"], own["a"]["battery idle"]) == ("2W to 3W", "5min")
    assert (own["b"]["battery working"], own["d"]["battery idle"], own["e"]["power"]) == (
        "for ever",
        None,
        None,
    )
    by_name = {row.device: row for row in rounds.device_rows(planned, found)}
    assert by_name["a-1"].battery_idle_s == 300
    assert by_name["b"].battery_idle_s == math.inf


def test_sample_counts_are_known_after_data_preparation() -> None:
    """A task without a dataset knows them before."""

    def dealt(one: Topology) -> dict[str, int]:
        return {name: len(chosen) for name, chosen in preparation.prepare(one, None).indices.items()}

    digits = "digits-logreg, partition: {{scheme: {}}}"
    names = [*map(digits.format, ("shards", "iid", "resampled"))]
    shards, iid, resampled, quadratic = (
        topology.parse(
            f"name: t\ntask: {{name: {task}, local: {{steps: 1}}}}\nrule: {{name: fedasync}}\n"
            f"devices: [{{name: pi, count: {count}, cpu: 0.1}}]\nstop: {{after: 1s}}\n"
        )
        for task, count in [*((name, 7) for name in names), ("quadratic, centers: [[1.0], [2.0]]", 2)]
    )
    assert preparation.known_samples(shards, None) is None
    assert preparation.known_samples(iid, None) is None
    assert preparation.known_samples(resampled, None) == dict.fromkeys(iid.device_names, 60)
    assert preparation.known_samples(quadratic, None) == dealt(quadratic)
    found = dealt(shards)
    assert preparation.known_samples(shards, None) == found
    equal = preparation.known_samples(iid, None)  # before it was dealt out
    assert equal == dealt(iid)


def test_measured_step_time_is_cached_for_the_same_work(tmp_path: Path) -> None:
    task = fleet("{name: pi, cpu: 0.1}").task.build()
    assert costs.cached_step_time(task, LocalTraining(steps=1)) is None
    step = costs.StepTime(0.00125, 0.0015)
    costs.cache_step_time(task, LocalTraining(steps=1), step)
    assert costs.cached_step_time(task, LocalTraining(epochs=3, lr=0.5)) == step
    assert costs.cached_step_time(task, LocalTraining(steps=1, batch_size=8)) is None
    (file,) = (tmp_path / "cache" / "testbed" / "steps").iterdir()
    for damaged in ("", "0.001", "0.0 0.1", "nan 0.1", "0.1 inf", "0.2 0.1"):
        file.write_text(damaged)
        assert costs.cached_step_time(task, LocalTraining(steps=1)) is None


def test_round_takes_as_long_as_planned(testbed: Testbed, tmp_path: Path) -> None:
    """The run is in virtual time, which uses the same costs, also with a measured step time."""
    file, runs = tmp_path / "t.yaml", tmp_path / "runs"
    file.write_text(
        "name: t\n"
        "task: {name: digits-logreg, local: {epochs: 2}}\n"
        "rule: {name: fedasync}\n"
        "devices: [{name: pi, cpu: 0.01, think: 50ms, link: {up: 400kbit, down: 800kbit, rtt: 80ms}}]\n"
        "stop: {updates: 1}\n"
    )
    before = testbed("plan", file, "--runtime", "virtual", "--json")
    (row,) = json.loads(before.out)
    assert (row["samples"], row["lacks"]) == (None, ["step time"])
    assert "The time of a step of pi on this host is unknown" in before.err
    assert testbed("up", file, "--runtime", "virtual", "--runs", runs).code == 0
    records = events.read(next(runs.iterdir()) / "events.jsonl")
    (update,) = (record for record in records if isinstance(record, events.UpdateApplied))
    after = testbed("plan", file, "--runtime", "virtual", "--json")
    (row,) = json.loads(after.out)
    assert (row["samples"], row["lacks"], after.err) == (update.samples, [], "")
    assert row["round_s"] == pytest.approx(update.arrived - update.dispatched, rel=0.01)
    said = testbed("plan", file, "--runtime", "process", "--oversubscribe")
    assert said.code == 0
    assert "group  devices  samples" in said.out
    assert "not known" not in said.out
