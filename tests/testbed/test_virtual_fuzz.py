"""Random small topologies in virtual time, with ties on purpose: what must hold in every run.

A failing one is named by its seed: `topology(SEED)` is its text, to be run by hand.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agents import events
from agents.aggregator import inputs, recording
from agents.aggregator.core import Setup
from agents.rules import RULES
from agents.wire import payloads
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from testbed.topology import parse
from testbed.view import View

RUNS, PARTS = 300, 4
"""Spread over so many tests."""

TIMES = ["50ms", "100ms", "150ms", "200ms", "300ms", "700ms"]
"""Durations that often coincide with each other and with the periods."""


def rule(dice: random.Random, devices: int) -> dict[str, Any]:
    """One of all rules, with parameters that fit so many devices."""
    period, some = dice.choice(TIMES), dice.randint(1, devices)
    choices: dict[str, list[dict[str, Any]]] = {
        "area": [
            {"every": dice.randint(1, 4)},
            {"criterion": "period", "period": period},
            {"criterion": "random", "rate": 3},
        ],
        "as_fedavg": [{"every": dice.randint(1, 3)}],
        "async_fedavg": [{"server_lr": 0.2}, {"weights": "time_based", "server_lr": 0.1}],
        "asysg": [{"gradients": some, "server_lr": 0.2}],
        "defedavg_iid": [{"buffer_size": some}],
        "defedavg_niid": [{"sample": some}, {"sample": some, "send_buffer": "hold"}],
        "favano": [{"period": period, "sample": some}],
        "fedasync": [{}, {"staleness": "hinge"}],
        "fedavg": [{}, {"sample": some}, {"round_timeout": period}],
        "fedbuff": [
            {"buffer_size": dice.randint(1, 4), "server_lr": 0.5},
            {"buffer_size": some, "reply": "after_aggregation"},
            {"buffer_size": 2, "concurrency": some, "server_lr": 0.5},
        ],
        "fedfa": [{"window_size": dice.randint(1, 4)}],
        "fedfix": [{"period": period}],
        "port": [{"min_updates": some, "staleness_bound": dice.randint(1, 3)}],
    }
    name = dice.choice(list(RULES))
    return {"name": name, **dice.choice(choices[name])}


def scenario(dice: random.Random, names: list[str], after: int) -> list[dict[str, Any]]:
    """Steps at times that tie with trainings and ticks, the start and the end among them. One device
    stays as it is."""
    steps: list[dict[str, Any]] = []
    for name in names[1:]:
        at = dice.choice([0, 100, 300, 1000, 1050, 2100])
        kind = dice.choice(["nothing", "leave", "crash", "pause", "disconnect", "set", "join"])
        begin = {"at": f"{at}ms"}
        match kind:
            case "leave":
                steps.append(begin | {"leave": name})
                if dice.random() < 0.7:
                    back = at + dice.choice([0, 50, 100, 1000])
                    steps.append({"at": f"{back}ms", "join": name})
            case "crash":
                steps.append(begin | {"crash": name, "restart_after": dice.choice(TIMES)})
            case "pause" | "disconnect":
                steps.append(begin | {kind: name, "for": dice.choice([*TIMES, "50s"])})
            case "set":
                steps.append(begin | {"set": name, "cpu": dice.choice([0.1, 0.2, 0.5])})
            case "join" if at:
                steps.append(begin | {"join": name})
        if kind == "crash" and dice.random() < 0.3:
            steps.append({"at": f"{after - 1}ms", "leave": name})
    return sorted(steps, key=lambda step: int(step["at"].removesuffix("ms")))


def topology(seed: int) -> str:
    dice = random.Random(seed)  # noqa: S311
    count = dice.randint(1, 4)
    names = list("abcd"[:count])
    after = dice.choice([1000, 2100, 4200] * 3 + [60_000])
    devices = []
    for name in names:
        device: dict[str, Any] = {"name": name}
        if dice.random() < 0.8:
            device["timing"] = dice.choice(
                [*TIMES, {"distribution": "trace", "values": dice.sample(TIMES, 3)}]
            )
        else:
            device["cpu"] = dice.choice([0.1, 0.2])
        if "timing" in device and dice.random() < 0.2:
            device["cpu"] = 0.25
        if dice.random() < 0.3:
            device["link"] = {"up": "8kbit", "down": "8kbit", "rtt": "100ms"}
        elif dice.random() < 0.1:
            device["link"] = {"up": "8kbit", "rtt": "50ms", "jitter": "20ms", "loss": "5%"}
        if dice.random() < 0.2:
            device["think"] = dice.choice(TIMES)
        devices.append(device)
    settable = {d["name"] for d in devices if "cpu" in d}
    steps = [s for s in scenario(dice, names, after) if "set" not in s or s["set"] in settable]
    whole: dict[str, Any] = {
        "name": "fuzz",
        "seed": dice.randint(0, 9),
        "durability": "recording",
        "task": {
            "name": "quadratic",
            "centers": [[float(dice.randint(-3, 9))] for _ in names],
            "local": {"steps": dice.randint(1, 10), "lr": 0.1},
        },
        "rule": rule(dice, count),
        "devices": devices,
        "scenario": steps,
        "evaluate": {"every": dice.choice(TIMES) if after < 60_000 else "5s"},
        "stop": dice.choice(
            [{"after": f"{after}ms"}, {"after": f"{after}ms", "updates": dice.randint(1, 60)}]
        ),
        "runtime": {"name": "virtual"},
        "virtual": {"step_time": "5ms"},
    }
    if dice.random() < 0.2 and count > 1:
        whole["churn"] = {"rate": "20/min", "downtime": dice.choice(TIMES), "devices": names[1:]}
    return yaml.safe_dump(whole, sort_keys=False)


def play(text: str, folder: Path) -> RunDirectory:
    parsed = parse(text, "<fuzz>")
    plan = preparing.plan_topology(parsed, Options(runtime="virtual"))
    directory = RunDirectory.create(folder, "run")
    up.run(parsed, plan, directory, Options(runtime="virtual"), View())
    return directory


@pytest.mark.parametrize("part", range(PARTS))
def test_invariants_hold_in_random_runs(part: int, tmp_path: Path) -> None:
    for seed in range(part, RUNS, PARTS):
        try:
            _check(seed, tmp_path / str(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{topology(seed)}") from error


def _check(seed: int, folder: Path) -> None:
    text = topology(seed)
    directory = play(text, folder)
    records = list(events.read(directory.events))
    _check_records(records)
    _check_timing(yaml.safe_load(text), records)
    replay(directory)
    _check_books(directory, records)
    if seed % 10 == 0:  # device time is device time, however slowly the host's goes by
        stretched = play(f"{text}dilation: 3\n", folder / "slow")
        assert _without_wall_clock(stretched) == _without_wall_clock(directory)


def _without_wall_clock(directory: RunDirectory) -> list[str]:
    return directory.events.read_text(encoding="utf-8").splitlines()[1:]


def _check_records(records: list[events.Record]) -> None:
    assert [type(r) for r in records].count(events.RunEnded) == 1
    end = records[-1]
    assert isinstance(end, events.RunEnded), "something follows the end"
    in_order = [r.at for r in records if not isinstance(r, events.Evaluated)]
    assert in_order == sorted(in_order)
    updates = [r for r in records if isinstance(r, events.UpdateApplied)]
    versions = [r for r in records if isinstance(r, events.VersionMade)]
    made = [v.version for v in versions]
    assert sorted(set(made) - {0}) == list(range(1, end.version + 1))
    assert made == sorted(made)
    assert len({v.version for v in versions if v.updates}) == sum(v.updates > 0 for v in versions)
    assert sum(v.updates for v in versions) == len(updates) == end.updates
    # Also of a client that was started again: with the number it would draw the same again.
    assert len({(u.client, u.sequence) for u in updates}) == len(updates)
    for u in updates:
        assert u.staleness == u.applied_version - 1 - u.base_version >= 0
        assert 0 < u.weight < math.inf
        # Records have microseconds.
        times = [u.dispatched, u.downloaded, u.train_start, u.train_end, u.sent, u.arrived, u.applied]
        assert times == sorted(times)


def _check_timing(topology: dict[str, Any], records: list[events.Record]) -> None:
    """The k-th training that a device begins takes the k-th of its `timing`, unless it computes for
    longer, is paused or is interrupted. How many a life began after its last update, nobody has
    recorded: only within a life are the numbers of updates known to be those of trainings."""
    if topology["rule"]["name"] in ("favano", "port"):
        return
    paused = {step["pause"] for step in topology["scenario"] if "pause" in step}
    timed = {d["name"]: d["timing"] for d in topology["devices"] if "timing" in d and "cpu" not in d}
    ahead: dict[str, int] = dict.fromkeys(timed, 0)
    """Return the offset between an update's number in this life and the index of its duration."""
    new_life: set[str] = set()
    for u in records:
        if isinstance(u, events.ClientStatus) and u.state == "joining":
            new_life.add(u.client)
        if isinstance(u, events.UpdateApplied) and u.client in timed.keys() - paused:
            timing = timed[u.client]
            texts = [timing] if isinstance(timing, str) else timing["values"]
            values = [int(text.removesuffix("ms")) / 1000 for text in texts]
            if u.client in new_life:
                new_life.remove(u.client)
                took = u.train_end - u.train_start
                ahead[u.client] = u.sequence - 1 - int(np.argmin(np.abs(np.array(values) - took)))
            expected = values[(u.sequence - 1 - ahead[u.client]) % len(values)]
            assert u.train_end - u.train_start == pytest.approx(expected, abs=2e-6)


def _check_books(directory: RunDirectory, records: list[events.Record]) -> None:
    """Every delivered update was applied or rejected."""
    entries = recording.read(directory.inputs)
    setup = next(entries)
    assert isinstance(setup, Setup)
    w = payloads.unpack((directory.models / "000000.safetensors").read_bytes())[0].copy()
    core, _ = setup.core(w)
    handed_in = 0
    for event in entries:
        assert not isinstance(event, Setup | recording.Torn | recording.Cut)
        over = core.ended is not None
        if isinstance(event, inputs.UpdateArrived) and event.message.kind != payloads.FAREWELL:
            handed_in += not over
        core.handle(event)
        core.validate()
    done = [r for r in records if isinstance(r, events.UpdateApplied | events.UpdateRejected)]
    assert handed_in == len(done)


def test_late_pause_of_a_device_changes_nothing_before_it(tmp_path: Path) -> None:
    """Models take 100 ms on the link, so that they often arrive at the end of a training: which of the
    two comes first must not depend on whether anything happens later."""
    for seed in range(40):
        dice = random.Random(seed)  # noqa: S311
        devices = [
            {"name": name, "timing": dice.choice(TIMES)}
            | ({"link": {"up": "27840bit", "down": "17600bit"}} if dice.random() < 0.5 else {})
            for name in "abc"
        ]
        period = dice.choice(TIMES)
        rules = [
            {"name": "defedavg_iid", "buffer_size": 2},
            {"name": "fedfix", "period": period},
            {"name": "fedavg", "round_timeout": period},
            {"name": "area", "criterion": "period", "period": period},
        ]
        whole = yaml.safe_load(topology(seed)) | {
            "rule": dice.choice(rules),
            "devices": devices,
            "task": {"name": "quadratic", "centers": [[-1.0], [2.0], [5.0]], "local": {"steps": 2}},
            "stop": {"after": "3s"},
            "scenario": [],
        }
        whole.pop("churn", None)
        runs = []
        for number, steps in enumerate(([], [{"at": "2999ms", "pause": "c", "for": "1s"}])):
            text = yaml.safe_dump(whole | {"scenario": steps})
            records = events.read(play(text, tmp_path / f"{seed}-{number}").events)
            updates = (one for one in records if isinstance(one, events.UpdateApplied))
            runs.append([one for one in updates if one.applied < 2.999])
        assert runs[0] == runs[1], f"seed {seed}"


def test_random_runs_are_repeated_from_their_records(tmp_path: Path) -> None:
    """The same updates at the same microseconds. Three kinds of run are left out. Jitter and loss draw
    delays whose rounding errors add up. Under `favano`, `defedavg_niid` and `port` a client keeps its
    update, or ends its training early, so that the record does not show the device's own time. Of models
    that are sent over a link to a busy device, only the last download is recorded."""
    repeated = 0
    for seed in range(80):
        dice = random.Random(seed)  # noqa: S311
        whole = yaml.safe_load(topology(seed))
        links = [one["link"] for one in whole["devices"] if "link" in one]
        if any("jitter" in link for link in links):
            continue
        whole["rule"] = dice.choice(
            [
                {"name": "fedasync"},
                {"name": "fedbuff", "buffer_size": 2},
                {"name": "asysg", "gradients": 1, "server_lr": 0.2},
                {"name": "fedfix", "period": "100ms"},
                {"name": "fedavg"} if links else {"name": "fedavg", "round_timeout": "150ms"},
            ]
        )
        whole["stop"] = {"after": "3s"}
        first = play(yaml.safe_dump(whole), tmp_path / f"{seed}")
        if not (expected := _arrivals(first)):
            continue
        again = {**whole, "devices": {"from_run": str(first.path)}, "scenario": []}
        again.pop("churn", None)
        assert _arrivals(play(yaml.safe_dump(again), tmp_path / f"{seed}-again")) == expected, seed
        repeated += 1
    assert repeated > 50


def _arrivals(directory: RunDirectory) -> list[tuple[float, str]]:
    updates = (one for one in events.read(directory.events) if isinstance(one, events.UpdateApplied))
    return sorted((one.arrived, one.client) for one in updates)
