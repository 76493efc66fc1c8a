"""Effects of a scenario on devices in virtual time: when their updates are applied, by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from agents import events
from agents.config import KEEPALIVE
from agents.device_actions import SetCpu
from analysis.charts import CHARTS
from analysis.load import load
from testbed.errors import RunFailedError
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.view import View

A = {"name": "a", "timing": "1s"}
WORKER = {"name": "a", "cpu": 0.5}
"""A second for 10 steps."""


def _run(folder: Path, scenario: list[dict[str, Any]], **changes: Any) -> list[events.Record]:
    """A run of `a`, which takes a second for an update, beside `b`, which takes 100."""
    topology = {
        "name": "t",
        "task": {"name": "quadratic", "centers": [[0.0], [1.0]], "local": {"steps": 10, "lr": 0.1}},
        "rule": {"name": "fedbuff", "buffer_size": 1},
        "devices": [A, {"name": "b", "timing": "100s"}],
        "scenario": scenario,
        "evaluate": {"every": "5s"},
        "stop": {"after": "7200ms"},
        "runtime": {"name": "virtual"},
        "virtual": {"step_time": "50ms"},
    }
    path = folder / "topology.yaml"
    path.write_text(yaml.safe_dump(topology | changes))
    parsed, plan = preparing.plan_file(path, Options())
    directory = RunDirectory.create(folder, "run")
    up.run(parsed, plan, directory, Options(), View())
    return list(events.read(directory.events))


def _applied(records: list[events.Record], client: str = "a") -> list[float]:
    return [r.applied for r in records if isinstance(r, events.UpdateApplied) and r.client == client]


@pytest.mark.parametrize(
    ("device", "scenario", "applied"),
    [
        (A, [], [1, 2, 3, 4, 5, 6, 7]),
        # The third was half done.
        (A, [{"at": "2500ms", "pause": "a", "for": "2s"}], [1, 2, 5, 6, 7]),
        (A, [{"at": "2500ms", "crash": "a", "restart_after": "2s"}], [1, 2, 5.5, 6.5]),
        (A, [{"at": "2500ms", "crash": "a"}], [1, 2]),
        # Trained at 3, on its way at once, and the model comes back at once.
        (A, [{"at": "2500ms", "disconnect": "a", "for": "2s"}], [1, 2, 4.5, 5.5, 6.5]),
        (A, [{"at": "3500ms", "leave": "a"}, {"at": "5s", "join": "a"}], [1, 2, 3, 6, 7]),
        (A, [{"at": "3s", "join": "a"}], [4, 5, 6, 7]),
        # What is set before it joins holds from there on.
        (
            WORKER,
            [{"at": "1s", "set": "a", "cpu": 0.25}, {"at": "3s", "join": "a"}],
            [5, 7],
        ),
        # Half a second each way from there on.
        (A, [{"at": "1500ms", "set": "a", "link": {"rtt": "1s"}}], [1, 2.5, 4.5, 6.5]),
        (WORKER, [], [1, 2, 3, 4, 5, 6, 7]),
        # Half of the second takes a second now, all others two.
        (WORKER, [{"at": "1500ms", "set": "a", "cpu": 0.25}], [1, 2.5, 4.5, 6.5]),
        # The same by heat.
        (WORKER | {"thermal": {"after": "1500ms", "to": 0.5}}, [], [1, 2.5, 4.5, 6.5]),
        # The same, but for a pause that is on when the share changes.
        (
            WORKER,
            [
                {"at": "1250ms", "pause": "a", "for": "500ms"},
                {"at": "1500ms", "set": "a", "cpu": 0.25},
            ],
            [1, 3.25, 5.25],
        ),
    ],
)
def test_times_of_applied_updates_by_hand(
    tmp_path: Path, device: dict[str, Any], scenario: list[dict[str, Any]], applied: list[float]
) -> None:
    slow = {"name": "b", "timing": "100s"}
    assert _applied(_run(tmp_path, scenario, devices=[device, slow])) == pytest.approx(applied)


def test_thermal_throttling_is_recorded_as_an_action(tmp_path: Path) -> None:
    hot = WORKER | {"thermal": {"after": "3s", "to": 0.5}}
    records = _run(tmp_path, [], devices=[hot, {"name": "b", "timing": "100s"}])
    (acted,) = (record for record in records if isinstance(record, events.Acted))
    assert (acted.at, acted.device, acted.source, acted.action) == (3, "a", "scenario", SetCpu(0.25))


def _uploads(tmp_path: Path, link: dict[str, Any], *scenario: dict[str, Any]) -> list[float]:
    """Seconds of each upload of `a`; the first one begins at 1 s."""
    tmp_path.mkdir(exist_ok=True)
    device = A | {"link": link}
    records = _run(tmp_path, list(scenario), devices=[device, {"name": "b", "timing": "100s"}])
    return [
        r.arrived - r.sent for r in records if isinstance(r, events.UpdateApplied) and r.client == "a"
    ]


def test_upload_continues_at_the_changed_link_rate(tmp_path: Path) -> None:
    slow = {"up": "2kbit"}
    (whole, *_) = _uploads(tmp_path / "plain", slow)
    assert 1.2 < whole < 3
    cut = {"at": "2s", "disconnect": "a", "for": "1s"}
    assert _uploads(tmp_path / "cut", slow, cut)[0] == pytest.approx(whole + 1)
    lost = (
        {"at": "2s", "set": "a", "link": {"loss": "100%"}},
        {"at": "3s", "set": "a", "link": {"loss": "0%"}},
    )
    assert _uploads(tmp_path / "lost", slow, *lost)[0] == pytest.approx(whole + 1)
    frozen = {"at": "1100ms", "pause": "a", "for": "1s"}  # the kernel sends, whatever the process does
    assert _uploads(tmp_path / "frozen", slow, frozen)[0] == pytest.approx(whole)
    faster = {"at": "2s", "set": "a", "link": {"up": "4kbit"}}
    assert _uploads(tmp_path / "set", slow, faster)[:2] == pytest.approx(
        [1 + (whole - 1) / 2, whole / 2]
    )
    (tmp_path / "up.csv").write_text("time,up\n0,2000\n2,4000\n")
    trace = {"trace": {"csv": "../up.csv", "loop": False}}
    assert _uploads(tmp_path / "trace", trace)[:2] == pytest.approx([1 + (whole - 1) / 2, whole / 2])


def test_first_model_uses_the_start_of_the_link_trace(tmp_path: Path) -> None:
    (tmp_path / "far.csv").write_text("time,rtt\n0,1\n")
    device = A | {"link": {"trace": {"csv": "far.csv"}}}
    records = _run(tmp_path, [], devices=[device, {"name": "b", "timing": "100s"}])
    assert _applied(records) == pytest.approx([2, 4, 6])


def test_jitter_and_loss_depend_on_the_seed(tmp_path: Path) -> None:
    link = {"rtt": "200ms", "jitter": "50ms", "loss": "10%"}
    took = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        devices = [A | {"link": link}, {"name": "b", "timing": "100s"}]
        took.append(_applied(_run(folder, [], devices=devices, seed=seed, stop={"after": "60s"})))
    assert took[0] != took[1]


def test_stalled_run_is_reported(tmp_path: Path) -> None:
    """No model arrives; only evaluations continue."""
    cut_off = {"timing": "1s", "link": {"loss": "100%"}}
    devices = [{"name": name, **cut_off} for name in "ab"]
    with pytest.raises(RunFailedError, match="after 0 s nothing can happen"):
        _run(tmp_path, [], devices=devices, stop={"updates": 5})
    (tmp_path / "timed").mkdir()
    records = _run(tmp_path / "timed", [], devices=devices, stop={"after": "9s"})
    notes = [(record.at, record.message) for record in records if isinstance(record, events.Note)]
    assert [(at, text.partition(":")[0]) for at, text in notes] == [
        (0.0, "from here on nothing can happen")
    ]


def test_records_list_actions_and_their_results(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    records = _run(tmp_path, [{"at": "2s", "crash": "a", "restart_after": "1s"}])
    assert set(threading.enumerate()) <= before
    told = [
        (r.at, r.details["action"] if isinstance(r, events.Acted) else r.state)
        for r in records
        if isinstance(r, events.Acted | events.ClientStatus)
    ]
    assert told == [(2, "crash"), (2, "offline"), (3, "restart"), (3, "joining"), (3, "ready")]


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        (  # a client that ends while it is cut off: the server hears of it when packets pass again
            [
                {"at": "2s", "disconnect": "a", "for": "9s"},
                {"at": "3s", "leave": "a"},
                {"at": "4s", "join": "a"},
            ],
            [(11, "offline"), (11, "joining"), (11, "ready")],
        ),
        (
            [{"at": "2s", "disconnect": "a", "for": "90s"}, {"at": "60s", "crash": "a"}],
            [(2 + 1.5 * KEEPALIVE, "offline")],
        ),
        (
            [
                {"at": "2s", "disconnect": "a", "for": "30s"},
                {"at": "22s", "pause": "a", "for": "40s"},
            ],
            [(47, "offline"), (62, "ready")],
        ),
    ],
)
def test_work_of_a_silent_device_is_lost_until_it_is_heard_again(
    tmp_path: Path, scenario: list[dict[str, Any]], told: list[tuple[float, str]]
) -> None:
    records = _run(tmp_path, scenario, stop={"after": "100s"})
    assert [(r.at, r.state) for r in records if isinstance(r, events.ClientStatus)] == told
    begun = [r.dispatched for r in records if isinstance(r, events.UpdateApplied)]
    ready = [at for at, state in told if state == "ready"]
    assert not [at for at in begun if 2 < at < (ready or [100])[0]]


def test_topk_remainder_of_a_lost_update_is_in_the_next_ones(tmp_path: Path) -> None:
    """Δ is half of what is left to (4, 1); its larger part is sent. The first is lost. It left out
    (0, ½), the second (0, 1), so that the third has (1, 1½)."""
    link = {"up": "1kbit", "compression": {"kind": "topk", "share": 0.5}}
    _run(
        tmp_path,
        [{"at": "1500ms", "disconnect": "a", "for": "50s"}, {"at": "0s", "crash": "b"}],
        task={"name": "quadratic", "centers": [[4, 1], [0, 0]], "local": {"steps": 1, "lr": 0.5}},
        devices=[A | {"link": link}, {"name": "b", "timing": "100s"}],
        stop={"updates": 2},
    )
    (w,) = load_file(tmp_path / "run" / "models" / "final.safetensors").values()
    assert w.tolist() == [2.0, 1.5]


def test_slow_link_does_not_extend_the_broker_timeout(tmp_path: Path) -> None:
    """A model of 8 kB takes 64 s at 1 kbit/s. A transfer that progresses is not silence, so the broker
    drops a silent device after 45 s, as on any link."""
    records = _run(
        tmp_path,
        [{"at": "2s", "disconnect": "a", "for": "450s"}],
        task={"name": "quadratic", "centers": [[0.0] * 2000] * 2, "local": {"steps": 1, "lr": 0.1}},
        devices=[A | {"link": {"up": "1kbit"}}, {"name": "b", "timing": "100s"}],
        stop={"after": "500s"},
    )
    offline, _ = [r for r in records if isinstance(r, events.ClientStatus)]
    assert (offline.at, offline.state) == (2 + 45, "offline")


def test_churn_and_availability_are_reproducible(tmp_path: Path) -> None:
    lines = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        off = {"on": {"distribution": "exponential", "mean": "20s"}, "off": "5s"}
        _run(
            folder,
            [],
            devices=[{**A, "count": 5, "availability": off}, {"name": "b", "timing": "3s"}],
            task={"name": "quadratic", "centers": [[0.0]] * 6, "local": {"steps": 1, "lr": 0.1}},
            churn={"rate": "2/min", "downtime": {"distribution": "exponential", "mean": "5s"}},
            stop={"after": "200s"},
        )
        lines.append((folder / "run" / "events.jsonl").read_text().splitlines()[1:])
    assert lines[0] == lines[1]
    actions = {line.split('"action":"')[-1].split('"')[0] for line in lines[0] if '"details"' in line}
    assert actions == {"crash", "restart", "disconnect", "reconnect"}


def test_farewell_is_sent_after_messages_in_flight(tmp_path: Path) -> None:
    """A model has 1,000 bytes and a header, at 1,000 bytes a second. An update is under way when `a`
    leaves; its goodbye to `area` is as large, and only then is it started again."""
    records = _run(
        tmp_path,
        [{"at": "1500ms", "leave": "a"}, {"at": "2s", "join": "a"}],
        devices=[A | {"link": {"up": "8kbit"}}, {"name": "b", "timing": "100s"}],
        task={"name": "quadratic", "centers": [[1.0] * 250] * 2, "local": {"steps": 1, "lr": 0.1}},
        rule={"name": "area", "criterion": "every", "every": 1},
    )
    first = next(r for r in records if isinstance(r, events.UpdateApplied))
    (retired,) = [r for r in records if isinstance(r, events.Note) and "retired" in r.message]
    statuses = [r for r in records if isinstance(r, events.ClientStatus)]
    took = first.arrived - 1
    assert 1 < took < 1.9
    assert [r.state for r in statuses] == ["offline", "joining", "ready"]
    assert [retired.at, *(r.at for r in statuses)] == pytest.approx([1 + 2 * took] * 4)


def test_run_has_the_use_of_its_segments_and_actions_on_them(tmp_path: Path) -> None:
    """`a` needs a second for a training; an upload waits while the cell is cut."""
    half = {"kind": "constant", "up": "50%"}
    network = {"cell": {"parent": "root", "up": "1mbit"}, "root": {"up": "2mbit", "background": [half]}}
    records = _run(
        tmp_path,
        [
            {"at": "2500ms", "disconnect": "cell", "for": "1500ms"},
            {"at": "5s", "set": "cell", "link": {"up": "2mbit"}},
            {"at": "6s", "set": "root", "background": False},
        ],
        network=network,
        devices=[A | {"segment": "cell"}, {"name": "b", "timing": "100s"}],
    )
    assert _applied(records) == pytest.approx([1, 2, 4, 5, 6, 7], abs=0.01)
    run = load(tmp_path / "run")
    assert [*run.scenario["action"]] == ["disconnect", "reconnect", "set", "background"]
    assert run.manifest["segments"] == ["root", "cell"]
    use = run.network.groupby(["segment", "device"])["bytes"].sum()
    assert use["root", ""] == 750_000  # 1 Mbit/s for 6 s
    assert use["root", "a"] == use["cell", "a"] > 0
    drawn = CHARTS["segments-over-time"]([run])
    assert [layer.name for layer in drawn.layers if layer.mark == "line"] == [
        *("root up", "root up background", "cell up", "root down", "cell down")
    ]
