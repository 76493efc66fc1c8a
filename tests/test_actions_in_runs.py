"""Runs of local processes with actions by hand, crashes, departures and lost networks."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from agents import events
from tests.running import (
    Finished,
    Testbed,
    interrupt,
    left_as_processes,
    started,
    until_printed,
    write_topology,
)


def test_actions_by_hand_in_a_run_of_processes(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_topology(
        tmp_path,
        task={"name": "digits-logreg", "local": {"steps": 5, "lr": 0.01}},
        network={"cell": {"up": "2mbit"}},
        devices=[
            {"name": "a", "cpu": 0.3},
            {"name": "b", "cpu": 0.3, "link": {"rtt": "10ms"}, "segment": "cell"},
        ],
        rule={"name": "fedbuff", "buffer_size": 1},
        stop={"after": "10min"},
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        for command in (
            "set {} a --cpu 0.1",
            "set {} a --up 2mbit",
            "pause {} b",
            "resume {} b",
            "kill {} b",
            "restart {} b",
            "disconnect {} cell b",
            "reconnect {} cell b",
        ):
            done = testbed(*command.format(run).split(), "--runs", runs)
            assert done.code == 0, done.err
        for command, told in (
            ("kill {} c", "has no device c; it has a, b"),
            ("kill {} cell", "cell is a segment"),
            (
                "set {} a",
                "nothing to set: give --cpu, --up, --down, --rtt, --jitter, --loss or --battery",
            ),
            ("set {} a --cpu 0", "--cpu 0: expected a positive share of one host core such as 0.25"),
            ("set {} a --cpu 64", "a cannot have 64 cpu: the devices would request 64.3 cores"),
            ("set {} a --up 12", "--up 12: expected a rate"),
            ("set {} a --up 12mbit --loss 1%", "cannot lose packets"),
            ("kill nowhere a", "no run nowhere"),
            ("shell {} a", "ran in the process runtime, whose devices have no containers"),
        ):
            refused = testbed(*command.format(run).split(), "--runs", runs)
            assert (refused.code, refused.out) == (2, "")
            assert told in refused.err
        until_printed(up, "online: b")
        interrupt(up)
    ended = Finished.only_one_in(runs)
    acted = [record for record in ended.records if isinstance(record, events.Acted)]
    assert [(a.device, a.details["action"], a.source) for a in acted] == [
        ("a", "set", "hand"),
        ("a", "set", "hand"),
        ("b", "pause", "hand"),
        ("b", "resume", "hand"),
        ("b", "crash", "hand"),
        ("b", "restart", "hand"),
        ("cell", "disconnect", "hand"),
        ("b", "disconnect", "hand"),
        ("cell", "reconnect", "hand"),
        ("b", "reconnect", "hand"),
    ]
    assert left_as_processes(run.name) == []
    over = testbed("kill", run, "a", "--runs", runs)
    assert (over.code, over.out) == (2, "")
    assert "is not running" in over.err


def test_area_mean_holds_through_crash_outage_churn_and_departure(
    testbed: Testbed, tmp_path: Path
) -> None:
    """A step that was lost, or counted twice, would be in x + u, and so in where it ends, for ever. A
    client that has left, and is started again, is not listened to any more."""
    devices = [
        {"name": "near", "count": 2, "cpu": 0.2, "timing": "100ms", "link": {"rtt": "20ms"}},
        {"name": "far", "count": 2, "cpu": 0.2, "timing": "100ms", "link": {"rtt": "80ms"}},
    ]
    scenario = [
        {"at": "1s", "crash": "near-1", "restart_after": "1s"},
        {"at": "1500ms", "disconnect": "far-1", "for": "1s"},
        {"at": "2s", "set": "far-1", "link": {"rtt": "200ms"}},
        {"at": "3s", "leave": "far-2"},
    ]
    churn = {"rate": "60/min", "downtime": "500ms", "devices": ["near"]}
    changes = {"devices": devices, "scenario": scenario, "churn": churn}
    topology = write_topology(tmp_path, "faults", **changes, stop={"updates": 250, "after": "4min"})
    done = testbed("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    run = Finished.only_one_in(tmp_path / "runs")
    acted = [r.details["action"] for r in run.records if isinstance(r, events.Acted)]
    assert {"crash", "restart", "disconnect", "reconnect", "set", "leave"} == set(acted)
    assert acted.count("crash") > 1  # churn's
    assert f"Scenario: {len(acted)} steps done, at most" in done.out
    notes = [record.message for record in run.records if isinstance(record, events.Note)]
    told = "far-2 retired: its model was removed from the mean"
    assert any(note.startswith(told) for note in notes), notes
    (w,) = load_file(run.path / "models" / "final.safetensors").values()
    assert float(w[0]) == pytest.approx(4 / 3, abs=0.05)  # the mean of those who stayed: 0, 1, 3
