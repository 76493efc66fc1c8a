"""Random small topologies in virtual time, held against the conformance kit's reference.

The reference is led through the run by its records: joins, arrivals, dispatches. It must make the same
versions at the same times, and end with the same model. What clients with the quadratic
f_i(w) = ½‖w − c_i‖² train is computed in closed form, in float64. The kit does not compute how long
trainings take and when clients get the next model: this is checked beside it. What the equations leave
open (a buffer that can fill no more, a round that outlasts its period) has no place in the kit and does
not occur here: see tests/agents/rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice, pairwise, takewhile
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from agents import events
from agents.events import UpdateApplied, VersionMade
from fl_conformance import adapter
from fl_conformance.adapter import Client, ClientUpdate, Vector
from fl_conformance.reference import RULES, Reference
from testbed import simulate

MS = 1_000
"""Microseconds, the unit of all times here: records have no finer times."""
TIMINGS = [100 * MS, 150 * MS, 200 * MS, 300 * MS]
PERIODS = [*TIMINGS, 50 * MS, 250 * MS, 70 * MS]
DRAWN = 100
"""Drawn durations of a device, which take it about 20 s."""
RUNS = 100
NAMES = "abcde"
AT_ONCE = {"area", "as_fedavg", "async_fedavg", "fedasync", "fedfa"}
"""Rules that send a client the next model when its update arrives; fedbuff, by default, too."""
ON_REQUEST = {"defedavg_niid", "favano"}
"""Rules whose clients send when they are asked."""
WAITING = {"asysg", "defedavg_iid", "port"}
"""Rules that need a number of updates, while the clients that have sent one wait."""


class Step(NamedTuple):
    at: int
    verb: str
    """`leave`, `join`, `crash` or `restart`."""
    client: int


@dataclass(frozen=True)
class Setting:
    rule: str
    parameters: Mapping[str, Any]
    """Every parameter that is not at its default."""
    centers: Sequence[Sequence[float]]
    steps: int
    lr: float
    timings: Sequence[Sequence[int]]
    """Durations that the trainings of each client take in turn."""
    scenario: Sequence[Step]
    """Steps in order of time. A client whose first step is `join` is absent at the start."""
    after: int

    @property
    def replies_at_once(self) -> bool:
        reply = self.parameters.get("reply", "immediate")
        return self.rule in AT_ONCE or (self.rule == "fedbuff" and reply == "immediate")

    @property
    def present(self) -> list[int]:
        first = {step.client: step.verb for step in reversed(self.scenario)}
        return [client for client in range(len(self.centers)) if first.get(client) != "join"]


def random_setting(seed: int) -> Setting:
    rng = Random(seed)  # noqa: S311 not a secret
    rule = sorted(RULES)[seed % len(RULES)]
    n = rng.randint(1 if rule == "defedavg_niid" else 2, 5)
    timings = [random_timing(rng, drawn=rule != "favano") for _ in range(n)]
    after = rng.choice([2000, 3000, 2437]) * MS
    parameters = random_parameters(rule, n, rng)
    waits = rule in WAITING or parameters.get("reply") == "after_aggregation"
    return Setting(
        rule=rule,
        parameters=parameters,
        centers=[[round(rng.uniform(-9, 9), 3) for _ in range(2)] for _ in range(n)],
        steps=rng.choice([1, 2, 4, 5]) if rule != "asysg" else 1,
        lr=rng.choice([0.05, 0.1, 0.3]),
        timings=timings,
        scenario=random_scenario(rule, n, after, rng) if rng.random() < 0.5 and not waits else [],
        after=after,
    )


def random_timing(rng: Random, *, drawn: bool) -> list[int]:
    """Return durations of one device: multiples that coincide with those of others, or drawn ones,
    which rarely do and of which a few are long enough for a crash."""
    if drawn and rng.random() < 0.3:
        return [max(1, round(rng.expovariate(1 / (200 * MS)))) for _ in range(DRAWN)]
    return [rng.choice(TIMINGS) for _ in range(rng.choice([1, 1, 1, 2, 3]))]


def random_parameters(rule: str, n: int, rng: Random) -> dict[str, Any]:
    """Return parameters of `rule`."""
    size, period = rng.randint(1, n + 2), rng.choice(PERIODS)
    lr = {"server_lr": rng.choice([1.0, 0.5])}
    times = {"update_times": [rng.choice(TIMINGS) for _ in range(n)]} if rng.random() < 0.5 else {}
    match rule:
        case "area":
            when: dict[str, Any] = rng.choice(
                [{"every": size}, {"criterion": "period", "period": period}]
            )
            return when | rng.choice([{}, {"lr": 0.2}]) | lr
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
            # Longer than any training, and no multiple of what else happens at.
            return {"period": 377 * MS, "sample": n, "debias": debias} | lr
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


def duration(time: int) -> str:
    return f"{time / MS:.3f}".rstrip("0").rstrip(".") + "ms"


def timing(values: Any) -> Any:
    if len(values) == 1:
        return duration(values[0])
    return {"distribution": "trace", "values": [duration(value) for value in values]}


def name_of(client: int) -> str:
    return NAMES[client]


@dataclass
class Replay:
    """Leads the kit's reference through a run."""

    setting: Setting
    updates: Sequence[UpdateApplied]
    reference: Reference = field(default_factory=Reference)
    ends: dict[str, Vector] = field(default_factory=dict)
    """y_i of each member of area, shape (d,): the end of its last training, or the model that it joined
    with."""
    sends: dict[tuple[str, int], int] = field(default_factory=dict)
    """The reference's number of each dispatch, by client and the testbed's number."""

    def __post_init__(self) -> None:
        setting = self.setting
        self.present = [*setting.present]
        clients = {name_of(i): Client(1 / len(setting.centers), 1) for i in range(len(setting.centers))}
        start = np.zeros(len(setting.centers[0]))
        names = [name_of(client) for client in self.present]
        draws = cast("Sequence[Sequence[str]]", self._draws())
        given = adapter.Setting(
            setting.rule, setting.parameters, clients, names, start, draws, intervals=[]
        )
        self.reference.start(given)
        self.ends = dict.fromkeys(names, start)

    @property
    def models(self) -> list[Vector]:
        return self.reference._rule.models

    @property
    def made(self) -> list[int]:
        return [round(at) for at in self.reference._rule.made]

    def run(self) -> None:
        times = {step.at for step in self.setting.scenario}
        times |= {time for u in self.updates for time in (us(u.dispatched), us(u.arrived))}
        for at in sorted(times):
            for step in self.setting.scenario:
                if step.at == at:
                    self._happen(step)
            if self.setting.rule == "favano":  # its updates answer the tick of this instant
                self.reference.model(at)
            arrived = [update for update in self.updates if us(update.arrived) == at]
            for update in sorted(arrived, key=self._order):
                self._receive(update)
            self.reference.model(at)
            for update in self.updates:
                if us(update.dispatched) == at:
                    self.sends[update.client, update.dispatch] = len(self.sends) + 1
                    self.reference.model(at, update.client)
        self.reference.model(self.setting.after)

    def _order(self, update: UpdateApplied) -> tuple[int, str]:
        """In the order of the devices; what answers a request of this instant comes later."""
        return (0 if self.setting.rule == "defedavg_iid" else update.applied_version, update.client)

    def _happen(self, step: Step) -> None:
        name = name_of(step.client)
        if step.verb in ("join", "restart"):
            self.present = sorted([*self.present, step.client])
            self.reference.join(name, step.at)
            self.ends.setdefault(name, self.models[-1])
        else:
            self.present.remove(step.client)
            is_goodbye = step.verb == "leave" and self.setting.rule == "area"
            self.reference.leave(name, step.at, self.ends.pop(name) if is_goodbye else None)

    def _receive(self, update: UpdateApplied) -> None:
        base = self.models[update.base_version]
        center = np.array(self.setting.centers[NAMES.index(update.client)])
        lr = self.setting.parameters.get("lr", self.setting.lr)
        end = base + (1 - (1 - lr) ** update.steps) * (center - base)
        is_gradient = self.setting.rule == "asysg"
        self.reference.receive(
            ClientUpdate(
                client=update.client,
                at=us(update.arrived),
                dispatch=self.sends[update.client, update.dispatch],
                base_version=update.base_version,
                base=base,
                kind="gradient" if is_gradient else "model",
                vector=base - center if is_gradient else end,
                trained=None if is_gradient else end,
                samples=1,
                steps=update.steps,
                effective_steps=1.0,
                sent=us(update.dispatched),
                uploaded=us(update.arrived),
            )
        )
        self.ends[update.client] = end

    def _draws(self) -> Iterator[list[str]]:
        """Yield the clients of each round: all members, or, if the rule draws with replacement, those
        that the weights of the updates tell."""
        if self.setting.rule != "defedavg_niid":
            while True:
                yield [name_of(client) for client in self.present]
        count = self.setting.parameters["sample"]
        rounds: defaultdict[int, list[str]] = defaultdict(list)
        for update in self.updates:
            times = round(update.weight * count / self.setting.parameters["server_lr"])
            rounds[update.applied_version] += [update.client] * times
        for _, drawn in sorted(rounds.items()):
            assert len(drawn) == count
            assert {NAMES.index(name) for name in drawn} <= {*self.present}
            yield drawn
        while True:
            yield []


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def disagreement(setting: Setting, folder: Path) -> str | None:
    run = simulate(topology(setting), runs=folder)
    records = [*events.read(run.path / "events.jsonl")]
    updates = [record for record in records if isinstance(record, UpdateApplied)]
    made = {
        record.version: us(record.at) for record in reversed(records) if isinstance(record, VersionMade)
    }
    recorded = [made[version] for version in sorted(made) if version > 0]
    replay = Replay(setting, updates)
    replay.run()
    (vector,) = load_file(run.path / "models" / "final.safetensors").values()
    spread = np.ptp([*setting.centers, [0.0] * len(vector)])
    found = None
    if replay.made[1:] != pytest.approx(recorded, abs=1):
        found = f"versions at {replay.made[1:]} in the reference, at {recorded} in the testbed"
    elif not np.allclose(vector, replay.models[-1], rtol=1e-5, atol=1e-4 * spread):
        found = f"reference ends at {replay.models[-1]}, testbed at {vector}"
    found = found or next(faulty_times(setting, updates, [0, *recorded]), None)
    return found and f"{topology(setting)}\n{found}"


def faulty_times(setting: Setting, updates: list[UpdateApplied], made: list[int]) -> Iterator[str]:
    """Yield what happened at another time than it should, or not at all."""
    if len(made) == 1:
        yield "there is no version"
    restless = {step.client for step in setting.scenario}
    for client in range(len(setting.timings)):
        own = [update for update in updates if update.client == name_of(client)]
        own.sort(key=lambda update: update.train_start)
        yield from faulty_trainings(setting, client, own, is_restless=client in restless)
        if client not in restless:
            yield from faulty_dispatches(setting, client, own, made)
    for number, step in enumerate(setting.scenario):
        later = (other.at for other in setting.scenario[number + 1 :] if other.client == step.client)
        stays = next(later, setting.after) - step.at
        sent = {us(update.dispatched) for update in updates if update.client == name_of(step.client)}
        if (
            step.verb in ("join", "restart")
            and setting.replies_at_once
            and stays > 5 * max(setting.timings[step.client])
            and not sent & {step.at - 1, step.at, step.at + 1}
        ):
            yield f"nothing was sent to the client that joined: {step}"


def faulty_trainings(
    setting: Setting, client: int, own: list[UpdateApplied], *, is_restless: bool
) -> Iterator[str]:
    """Yield updates of `client` that were trained or sent at another time than they should."""
    timing, free = setting.timings[client], 0
    for number, update in enumerate(own):
        start, end = us(update.train_start), us(update.train_end)
        took = [timing[number % len(timing)]]
        if is_restless or setting.rule in ("defedavg_iid", "defedavg_niid"):
            took = [*timing]  # some trainings are in no record
        if update.steps == setting.steps and not any(abs(end - start - one) <= 1 for one in took):
            yield f"training took {end - start}, expected one of {took}: {update}"
        if setting.rule not in ON_REQUEST and us(update.arrived) != end:
            yield f"arrived late: {update}"
        if start < max(us(update.dispatched), free):
            yield f"trained before it could: {update}"
        free = end


def faulty_dispatches(
    setting: Setting, client: int, own: list[UpdateApplied], made: list[int]
) -> Iterator[str]:
    """Yield updates whose model was sent to `client`, which is always present, at another time than it
    should, and updates that are missing."""
    for before, update in pairwise([None, *own]):
        assert update is not None
        sent = made[update.base_version]
        if setting.replies_at_once:
            sent = us(before.arrived) if before else 0
        elif before and setting.rule not in {*ON_REQUEST, "defedavg_iid"}:
            sent = made[before.applied_version]
        if abs(us(update.dispatched) - sent) > 1:
            yield f"dispatched at another time than {sent}: {update}"
    if setting.replies_at_once:
        ends = accumulate(islice(cycle(setting.timings[client]), setting.after))
        due = sum(1 for _ in takewhile(lambda end: end < made[-1] - 1, ends))
        if len(own) < due:
            yield f"{name_of(client)} has {len(own)} updates, expected {due}"


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_run_equals_the_reference(seed: int, tmp_path: Path) -> None:
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
def test_rare_case_equals_the_reference(case: str, tmp_path: Path) -> None:
    found = disagreement(CASES[case], tmp_path)
    assert found is None, found
