"""Runs of local processes with actions by hand, crashes, departures and lost networks."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from agents import events
from tests.running import (
    TOPOLOGIES,
    Finished,
    Testbed,
    interrupt,
    left_as_processes,
    run_to_its_end,
    started,
    until_printed,
    write_topology,
)


def test_actions_by_hand_in_a_run_of_processes(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_topology(
        tmp_path,
        task={"name": "digits-logreg", "local": {"steps": 5, "lr": 0.01}},
        network={"cell": {"up": "20mbit"}},
        devices=[
            {"name": "a", "cpu": 0.3},
            {"name": "b", "cpu": 0.3, "link": {"rtt": "10ms"}, "segment": "cell"},
        ],
        rule={"name": "fedbuff", "buffer_size": 1},
        stop={"after": "60s"},
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        for command in (
            "set {} a --cpu 0.1",
            "set {} a --up 12mbit",
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


def test_area_mean_holds_through_crash_outage_and_churn(testbed: Testbed, tmp_path: Path) -> None:
    """A step that was lost, or counted twice, would be in x + u, and so in where it ends, for ever."""
    done = testbed("up", TOPOLOGIES / "faults.yaml", "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    run = Finished.only_one_in(tmp_path / "runs")
    acted = [r.details["action"] for r in run.records if isinstance(r, events.Acted)]
    assert {"crash", "restart", "disconnect", "reconnect", "set"} == set(acted)
    assert acted.count("crash") > 1  # churn's
    assert f"Scenario: {len(acted)} steps done, at most" in done.out
    (w,) = load_file(run.path / "models" / "final.safetensors").values()
    assert float(w[0]) == pytest.approx(3.0, abs=0.05)


def test_leaving_client_is_removed_from_area_mean(tmp_path: Path) -> None:
    """Started again, it is not listened to any more."""
    topology = write_topology(
        tmp_path,
        task={"name": "quadratic", "centers": [[0.0], [3.0], [9.0]], "local": {"steps": 1, "lr": 0.3}},
        rule={"name": "area", "criterion": "every", "every": 2},
        devices=[{"name": name, "cpu": 0.2, "timing": "100ms"} for name in ("left", "middle", "right")],
        scenario=[{"at": "2s", "leave": "right"}],
        evaluate={"every": "2s"},
        stop={"after": "6s"},
    )
    run = run_to_its_end(topology, "process")
    notes = [record.message for record in run.records if isinstance(record, events.Note)]
    assert any(
        note.startswith("right retired: its model was removed from the mean") for note in notes
    ), notes
    (w,) = load_file(run.path / "models" / "final.safetensors").values()
    assert float(w[0]) == pytest.approx(1.5, abs=0.05)  # the mean of those who stayed
