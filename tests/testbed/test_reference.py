"""Random small topologies in virtual time, held against `tests.reference`, a simulator of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from analysis.load import Run
from testbed import simulate
from tests import reference
from tests.reference import Contribution, Draw, Setting, Step, Version

MS = 1_000_000
TIMINGS = [100 * MS, 150 * MS, 200 * MS, 300 * MS]
PERIODS = [*TIMINGS, 50 * MS, 250 * MS, 70 * MS]
DRAWN = 100
"""Drawn durations of a device, which take it about 20 s."""
RUNS = 100
NAMES = "abcde"


def random_setting(seed: int) -> Setting:
    rng = Random(seed)  # noqa: S311 not a secret
    rule = sorted(reference.RULES)[seed % len(reference.RULES)]
    n = rng.randint(1 if rule == "defedavg_niid" else 2, 5)
    timings = [random_timing(rng) for _ in range(n)]
    after = rng.choice([2000, 3000, 2437]) * MS
    return Setting(
        rule=rule,
        parameters=random_parameters(rule, n, rng),
        centers=[[round(rng.uniform(-9, 9), 3) for _ in range(2)] for _ in range(n)],
        steps=rng.choice([1, 2, 4, 5]) if rule != "asysg" else 1,
        lr=rng.choice([0.05, 0.1, 0.3]),
        timings=timings,
        scenario=random_scenario(rule, n, after, rng) if rng.random() < 0.5 else [],
        after=after,
    )


def random_timing(rng: Random) -> list[int]:
    """Return durations of one device in ns: multiples that coincide with those of others, or drawn ones,
    which rarely do and of which a few are long enough for a crash."""
    if rng.random() < 0.3:
        return [max(1, round(rng.expovariate(1 / (200 * MS)))) for _ in range(DRAWN)]
    return [rng.choice(TIMINGS) for _ in range(rng.choice([1, 1, 1, 2, 3]))]


def random_parameters(rule: str, n: int, rng: Random) -> dict[str, Any]:
    """Return parameters of `rule`, with periods and times in ns."""
    size, period = rng.randint(1, n + 2), rng.choice(PERIODS)
    lr = {"server_lr": rng.choice([1.0, 0.5])}
    times = {"update_times": [rng.choice(TIMINGS) for _ in range(n)]} if rng.random() < 0.5 else {}
    match rule:
        case "area":
            when: dict[str, Any] = rng.choice(
                [{"every": size}, {"criterion": "period", "period": period}]
            )
            step: dict[str, Any] = rng.choice(
                [{}, {"lr": 0.2}, {"step": "harmonic", "c": 1.0, "d": 3.0}]
            )
            return when | step | lr
        case "as_fedavg":
            return {"every": size} | lr
        case "async_fedavg":
            return ({"weights": "time_based"} | times if rng.random() < 0.7 else {}) | {"server_lr": 0.2}
        case "asysg":
            return {"gradients": min(size, n), "server_lr": 0.2, "mean": rng.random() < 0.7}
        case "defedavg_iid":
            return {"buffer_size": min(size, n)} | lr
        case "defedavg_niid":
            return {"sample": size, "send_buffer": rng.choice(["overwrite", "hold"])} | lr
        case "favano":
            debias = rng.choice(["stochastic", "deterministic"])
            return {"period": period, "sample": n, "debias": debias} | lr
        case "fedasync":
            staleness: dict[str, Any] = rng.choice(
                [{}, {"staleness": "constant"}, {"staleness": "hinge", "a": 2.0, "b": 1}, {"a": 1.0}]
            )
            return staleness | {"mixing": rng.choice([0.3, 0.6])} | lr
        case "fedavg":
            return lr
        case "fedbuff":
            reply = rng.choice(["immediate", "after_aggregation"])
            size = size if reply == "immediate" else min(size, n)
            return {
                "buffer_size": size,
                "reply": reply,
                "staleness": rng.choice(["none", "inverse_sqrt"]),
            } | lr
        case "fedfa":
            variant = rng.choice(["param", "delta"])
            return {
                "window_size": size,
                "variant": variant,
                "server_lr": 0.2 if variant == "delta" else 1.0,
            }
        case "fedfix":
            return {"period": period} | times | lr
        case "port":
            return {
                "min_updates": min(size, n),
                "urgent": rng.random() < 0.6,
                "staleness_bound": rng.choice([1, 2, 10]),
            } | lr
    raise AssertionError(rule)


def random_scenario(rule: str, n: int, after: int, rng: Random) -> list[Step]:
    """All clients but the first come and go, often when something else happens too."""
    entries: list[list[Step]] = []
    for client in range(1, n):
        moments = sorted({rng.randrange(50 * MS, after, 50 * MS) for _ in range(rng.randint(0, 4))})
        moments = [moment + (rng.randrange(MS) if rng.random() < 0.2 else 0) for moment in moments]
        if rng.random() < 0.3 and moments:
            entries.append([Step(moments.pop(0), "join", client)])
        if rule == "defedavg_niid":  # whom a round has drawn and dropped is not in the records
            continue
        while moments:
            at = moments.pop(0)
            if moments and rng.random() < 0.5:
                entries.append([Step(at, "crash", client), Step(moments.pop(0), "restart", client)])
            else:
                entries.append([Step(at, "leave", client)])
                entries += [[Step(moments.pop(0), "join", client)]] if moments else []
    rng.shuffle(entries)
    return sorted((step for entry in entries for step in entry), key=lambda step: step.at)


def topology(setting: Setting) -> str:
    """Topology as YAML."""
    parameters: dict[str, Any] = {}
    for name, value in setting.parameters.items():
        if name == "period":
            parameters[name] = duration(value)
        elif name == "update_times":
            parameters[name] = [duration(time) for time in value]
        else:
            parameters[name] = value
    scenario: list[dict[str, Any]] = []
    for step in setting.scenario:
        if step.verb == "restart":
            crash = next(e for e in reversed(scenario) if e.get("crash") == name_of(step.client))
            crash["restart_after"] = duration(step.at - crash.pop("from"))
        else:
            entry = {"at": duration(step.at), step.verb: name_of(step.client)}
            scenario.append(entry | ({"from": step.at} if step.verb == "crash" else {}))
    whole = {
        "name": "reference",
        "seed": 1,
        "task": {
            "name": "quadratic",
            "centers": setting.centers,
            "local": {"steps": setting.steps, "lr": setting.lr},
        },
        "rule": {"name": setting.rule} | parameters,
        "devices": [
            {"name": name_of(i), "timing": timing(values)} for i, values in enumerate(setting.timings)
        ],
        "scenario": scenario,
        "evaluate": {"every": "1h"},
        "stop": {"after": duration(setting.after)},
        "runtime": {"name": "virtual"},
    }
    if not scenario:
        del whole["scenario"]
    return yaml.safe_dump(whole, sort_keys=False, default_flow_style=None, width=100)


def duration(ns: int) -> str:
    return f"{ns / MS:.6f}".rstrip("0").rstrip(".") + "ms"


def timing(values: Any) -> Any:
    if len(values) == 1:
        return duration(values[0])
    return {"distribution": "trace", "values": [duration(value) for value in values]}


def name_of(client: int) -> str:
    return NAMES[client]


def versions(run: Run) -> list[Version]:
    """Return the records of a run in the form of the reference."""
    found: defaultdict[int, list[Contribution]] = defaultdict(list)
    for row in run.updates.to_dict("records"):
        client = NAMES.index(row["client"])
        assert row["staleness"] == row["applied_version"] - 1 - row["base_version"]
        contribution = Contribution(
            client, row["base_version"], row["steps"], round(row["arrived"] * 1e9), row["weight"]
        )
        found[row["applied_version"]].append(contribution)
    return [
        Version(
            row["version"],
            round(row["at"] * 1e9),
            tuple(found[row["version"]] if row["updates"] else ()),
        )
        for row in run.versions.to_dict("records")
    ]


def draws(setting: Setting, recorded: list[Version]) -> Draw:
    """All members, each once; where a draw is with replacement, the draws that the weights tell."""
    if setting.rule != "defedavg_niid":
        return list
    n = setting.parameters["sample"]
    share = setting.parameters["server_lr"] / n
    rounds = iter(recorded)

    def draw(members: Sequence[int]) -> Sequence[int]:
        version = next(rounds, None)
        if version is None:
            return []
        drawn = [c.client for c in version.contributions for _ in range(round(c.weight / share))]
        assert len(drawn) == n, version
        assert set(drawn) <= set(members), version
        return drawn

    return draw


def difference(ours: list[Version], theirs: list[Version]) -> str | None:
    """The first version that is not the same in both."""
    for mine, its in zip(ours, theirs, strict=False):
        if not (
            mine.number == its.number
            and near(mine.at, its.at)
            and same(mine.contributions, its.contributions)
        ):
            return f"reference {mine}\ntestbed   {its}"
    if len(ours) != len(theirs):
        extra = (ours if len(ours) > len(theirs) else theirs)[min(len(ours), len(theirs))]
        return f"reference has {len(ours)} versions, testbed {len(theirs)}; the next is {extra}"
    return None


def same(mine: tuple[Contribution, ...], its: tuple[Contribution, ...]) -> bool:
    return len(mine) == len(its) and all(
        a[:3] == b[:3] and near(a.arrived, b.arrived) and a.weight == pytest.approx(b.weight, rel=1e-4)
        for a, b in zip(sorted(mine), sorted(its), strict=True)
    )


def near(mine: int, its: int) -> bool:
    """Records have microseconds."""
    return abs(mine - its) <= 1000


def disagreement(setting: Setting, folder: Path) -> str | None:
    run = simulate(topology(setting), runs=folder)
    recorded = versions(run)
    expected = reference.simulate(setting, draws(setting, recorded))
    found = difference(expected.versions, recorded)
    if found is None:
        w = load_file(run.path / "models" / "final.safetensors")
        (vector,) = (value for value in w.values())
        spread = np.ptp([*setting.centers, [0.0] * len(vector)])
        if not np.allclose(vector, expected.w, rtol=1e-5, atol=1e-4 * spread):
            found = f"reference ends at {expected.w}, testbed at {vector}"
    return found and f"{topology(setting)}\n{found}"


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_run_equals_the_reference_simulator(seed: int, tmp_path: Path) -> None:
    found = disagreement(random_setting(seed), tmp_path)
    assert found is None, f"seed {seed}\n{found}"


CASES = {
    "two aggregations of port in one instant: no model is older than it is": Setting(
        rule="port",
        parameters={"min_updates": 1, "urgent": False, "staleness_bound": 1, "server_lr": 1.0},
        centers=[[0.0], [3.0], [6.0]],
        steps=1,
        lr=0.1,
        timings=[[100 * MS, 300 * MS], [100 * MS], [100 * MS]],
        scenario=[],
        after=350 * MS,
    ),
    "a tick of area without messages, after a goodbye: x takes what is in u": Setting(
        rule="area",
        parameters={"criterion": "period", "period": 100 * MS, "server_lr": 1.0},
        centers=[[0.0], [4.0]],
        steps=1,
        lr=0.5,
        timings=[[1000 * MS], [150 * MS]],
        scenario=[Step(250 * MS, "leave", 1)],
        after=900 * MS,
    ),
    "who joins at the very instant of a tick of fedfix: that tick is over": Setting(
        rule="fedfix",
        parameters={"period": 100 * MS, "server_lr": 1.0},
        centers=[[0.0], [4.0]],
        steps=1,
        lr=0.5,
        timings=[[100 * MS], [200 * MS]],
        scenario=[Step(100 * MS, "join", 1)],
        after=350 * MS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rare_case_equals_the_reference_simulator(case: str, tmp_path: Path) -> None:
    found = disagreement(CASES[case], tmp_path)
    assert found is None, found
