"""Ties in time, the order of messages, and membership, in virtual time: exact to the nanosecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agents import events
from agents.config import StopConditions
from agents.rules.fedfix import FedFix
from agents.wire import payloads
from analysis.load import Run
from testbed import simulate
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from tests.agents.helpers import Simulation


def _run(folder: Path, **topology: Any) -> Run:
    """Simulate the topology, and replay the run."""
    run = _long_run(folder, durability="recording", **topology)
    replay(RunDirectory(run.path))
    return run


def _long_run(folder: Path, **topology: Any) -> Run:
    """Simulate the topology. Replays of every rule are in `test_virtual_fuzz`."""
    run = simulate(yaml.safe_dump({"name": "exact"} | topology), runs=folder)
    assert run.ended is not None
    return run


def _records(run: Run) -> list[events.Record]:
    return list(events.read(run.path / "events.jsonl"))


def _final(run: Run) -> list[float]:
    model = (run.path / "models" / "final.safetensors").read_bytes()
    return [float(value) for value in payloads.unpack(model)[0]]


def _task(*centers: float, steps: int = 1, lr: float = 0.5) -> dict[str, Any]:
    return {
        "name": "quadratic",
        "centers": [[c] for c in centers],
        "local": {"steps": steps, "lr": lr},
    }


def _devices(*timings: str) -> list[dict[str, Any]]:
    return [{"name": name, "timing": timing} for name, timing in zip("abcde", timings, strict=False)]


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "as_fedavg", "every": 2},
        {"name": "area", "every": 2},
        {"name": "area", "criterion": "period", "period": "100ms"},
    ],
    ids=["as_fedavg", "area every", "area period"],
)
@pytest.mark.parametrize("after", [1, 12])
def test_all_events_of_the_last_instant_are_handled_in_order(
    rule: dict[str, Any], after: int, tmp_path: Path
) -> None:
    """Arrivals, the rule's timer, an evaluation and the end, all at the last instant."""
    run = _run(
        tmp_path,
        task=_task(2, 4),
        rule=rule,
        devices=_devices("100ms", "100ms"),
        evaluate={"every": "100ms"},
        stop={"after": f"{after}s"},
    )
    assert len(run.updates) == 20 * after
    assert len(run.evaluations) == 1 + 10 * after


@pytest.mark.parametrize(
    ("criterion", "staleness"),
    [
        ({"criterion": "period", "period": "200ms"}, {0: 1, 1: 19}),
        ({"criterion": "random", "rate": 5.0}, {0: 1, 1: 18}),  # the last message waits for a tick
    ],
    ids=["period", "random"],
)
def test_area_tick_without_messages_makes_no_version(
    criterion: dict[str, Any], staleness: dict[int, int], tmp_path: Path
) -> None:
    run = _run(
        tmp_path,
        task={
            "name": "digits-logreg",
            "partition": {"scheme": "iid"},
            "local": {"steps": 5, "batch_size": 16, "lr": 0.1},
        },
        rule={"name": "area"} | criterion,
        devices=_devices("1s"),
        stop={"after": "20s"},
    )
    made = run.versions[run.versions["updates"] > 0]
    assert made["version"].tolist() == list(range(1, len(made) + 1))
    assert run.versions["version"].max() == len(made)
    assert run.updates["staleness"].value_counts().to_dict() == staleness


def test_each_attempt_of_a_training_takes_the_next_duration(tmp_path: Path) -> None:
    """Crashes take the trainings of 300 ms and of 50 ms; a leave the one of 70 ms. What comes after is
    another's turn: 200 ms, then from the beginning."""
    measured = {"distribution": "trace", "values": ["100ms", "300ms", "50ms", "70ms", "200ms"]}
    run = _run(
        tmp_path,
        task=_task(2),
        rule={"name": "fedasync"},
        devices=[{"name": "a", "timing": measured, "think": measured}],
        scenario=[
            {"at": "250ms", "crash": "a", "restart_after": "50ms"},
            {"at": "320ms", "crash": "a", "restart_after": "80ms"},
            {"at": "410ms", "leave": "a"},
            {"at": "500ms", "join": "a"},
        ],
        stop={"updates": 3},
    )
    ended = [(row.sequence, row.train_end, row.applied) for row in run.updates.itertuples()]
    assert ended == [(1, 0.1, 0.2), (2, 0.7, 0.9), (3, 1.0, 1.1)]


def test_crashes_do_not_slow_a_device_with_memoryless_durations(tmp_path: Path) -> None:
    """In 100 s there are 600 trainings, less those lost in 1 ms of absence per second; far fewer if an
    attempt repeated its draw. The same seed gives the same records."""

    def run(seconds: int, folder: str) -> Run:
        return _run(
            tmp_path / folder,
            seed=1,
            task=_task(*[1] * 6, lr=0.1),
            rule={"name": "fedasync"},
            devices=[{"name": "d", "count": 6, "timing": {"distribution": "exponential", "mean": "1s"}}],
            churn={"rate": "60/min", "downtime": "1ms"},
            evaluate={"every": "100s"},
            stop={"after": f"{seconds}s"},
        )

    long = run(100, "long").updates
    assert len(long) == pytest.approx(598, rel=0.1)
    assert long.groupby("client").size().min() > 75
    once, again = (run(10, folder).updates for folder in ("once", "again"))
    assert len(once) > 50
    assert once.equals(again)


def test_last_scenario_step_may_end_the_run(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        task=_task(2, 4),
        rule={"name": "fedasync"},
        devices=_devices("100ms", "100ms"),
        scenario=[{"at": "1s", "leave": "a"}, {"at": "1s", "leave": "b"}],
        stop={"after": "2s"},
    )
    assert [r.device for r in _records(run) if isinstance(r, events.Acted)] == ["a", "b"]


def test_equal_periods_coincide_throughout_the_run() -> None:
    run = Simulation(FedFix(period=0.1), [2, 4], [0.1, 0.1], 0.5, StopConditions(after=120.0))
    run.run()
    assert {r.weight for r in run.records if isinstance(r, events.UpdateApplied)} == {0.5}
    assert run.server.version == 1_200


def test_tick_at_the_end_counts(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        task=_task(2, 4),
        rule={"name": "fedfix", "period": "700ms"},
        devices=_devices("700ms", "700ms"),
        stop={"after": "7s"},
    )
    assert [r.at for r in _records(run) if isinstance(r, events.VersionMade)] == [
        pytest.approx(0.7 * k, abs=1e-9) for k in range(1, 11)
    ]


def test_interrupt_at_the_end_of_a_step_takes_no_further_step(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        task=_task(2, 4, steps=10, lr=0.05),
        rule={"name": "favano", "period": "500ms", "sample": 2},
        devices=_devices("1s", "1s"),
        stop={"after": "7s"},
    )
    assert set(run.updates["steps"]) == {5}


REJOINING: dict[str, dict[str, Any]] = {
    "area": {"every": 2},
    "as_fedavg": {"every": 3},
    "async_fedavg": {"weights": "time_based", "server_lr": 0.05},
    "asysg": {"gradients": 2, "server_lr": 0.1},
    "defedavg_iid": {"buffer_size": 3},
    "defedavg_niid": {"sample": 3},
    "favano": {"period": "400ms", "sample": 3},
    "fedasync": {"mixing": 0.1},
    "fedavg": {},
    "fedbuff": {"buffer_size": 3, "server_lr": 0.2},
    "fedfa": {"window_size": 3},
    "fedfix": {"period": "600ms"},
    "port": {"min_updates": 3},
}


AWAY: list[dict[str, Any]] = [
    {"at": "1s", "join": "c"},
    {"at": "2s", "leave": "c"},
    {"at": "2s", "join": "c"},
    {"at": "3s", "crash": "c", "restart_after": "600ms"},
    {"at": "4s", "leave": "c"},
    {"at": "5050ms", "join": "c"},
]


@pytest.mark.parametrize("rule", REJOINING)
def test_returning_client_regains_its_full_weight(rule: str, tmp_path: Path) -> None:
    """After a returned client has been present for a while, each client's share of the weight and the
    mean loss equal those of a run without the absence. AREA ends at the mean of its members."""

    def settled(folder: str, scenario: list[dict[str, Any]]) -> tuple[list[float], float]:
        run = _long_run(
            tmp_path / folder,
            task=_task(2, 4, 9, steps=2, lr=0.2),
            rule={"name": rule, **REJOINING[rule]},
            devices=_devices("100ms", "150ms", "200ms"),
            scenario=scenario,
            evaluate={"every": "130ms"},
            stop={"after": "13s"},
        )
        if rule == "area":
            assert _final(run) == pytest.approx([5.0], abs=1e-5)
        late, evaluations = run.updates, run.evaluations
        weights = late[late["applied"] > 7].groupby("client")["weight"].sum()
        loss = evaluations[evaluations["at"] > 7]["loss"].mean()
        return list(weights / weights.sum()), float(loss)

    shares, loss = settled("never", [])
    found_shares, found_loss = settled("away", AWAY)
    assert len(found_shares) == 3
    assert found_shares == pytest.approx(shares, abs=0.03)
    # Where clients' turns fall differently, so does the cycle that the model ends in.
    assert found_loss == pytest.approx(loss, rel=0.1)


def test_cpu_share_does_not_change_the_time_given_by_timing(tmp_path: Path) -> None:
    """20 steps of 1 ms are far below 10 s, at a tenth of a core too; at a thousandth they take 20 s."""
    run = _run(
        tmp_path,
        task=_task(2, 4, steps=20, lr=0.1),
        rule={"name": "fedbuff", "buffer_size": 1},
        devices=[{"name": "a", "timing": "10s", "cpu": 0.5}, {"name": "b", "timing": "150ms"}],
        runtime={"name": "virtual"},
        virtual={"step_time": "1ms"},
        scenario=[
            {"at": "2s", "set": "a", "cpu": 0.1},
            {"at": "32s", "set": "a", "cpu": 0.001},
        ],
        stop={"after": "71s"},
    )
    trained = run.updates[run.updates["client"] == "a"]
    took = (trained["train_end"] - trained["train_start"]).tolist()
    # The fourth had been computed when the share fell: 10 s are the floor. Then 20 ms / 0.001.
    assert took == pytest.approx([10, 10, 10, 10, 20])


def test_drawn_client_continues_from_the_model_of_that_round(tmp_path: Path) -> None:
    """[W] 2.1.1: who waits with its update when it is drawn in round t trains from w^t next."""
    run = _run(
        tmp_path,
        task=_task(2, 4, 9),
        rule={"name": "defedavg_niid", "sample": 2, "send_buffer": "hold"},
        devices=_devices("100ms", "150ms", "400ms"),
        stop={"after": "100s"},
    )
    made = [0.0, *(r.at for r in _records(run) if isinstance(r, events.VersionMade))]
    waited = 0
    for _, updates in run.updates.groupby("client"):
        begun = updates[updates["train_end"].shift() < updates["train_start"]]
        assert begun["train_start"].tolist() == [made[base] for base in begun["base_version"]]
        waited += len(begun)
    assert waited > 100


def test_updates_of_one_instant_are_delivered_in_device_order(tmp_path: Path) -> None:
    """a trains until the very moment at which the update that b sent before arrives."""
    run = _run(
        tmp_path,
        task=_task(2, 4),
        rule={"name": "fedasync"},
        devices=[
            {"name": "a", "timing": "200ms"},
            {"name": "b", "timing": "100ms", "link": {"rtt": "100ms"}},
        ],
        stop={"after": "1s"},
    )
    assert run.updates["client"].tolist() == ["a", "b"] * 5
