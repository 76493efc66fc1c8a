"""The controller's core alone, driven through random runs without a clock."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents import events
from agents.config import AccessLink
from agents.energy import BatteryConfig, EnergyConfig
from agents.mqtt.topics import AGGREGATOR
from agents.wire import messages
from testbed.fidelity import LegClock, measure
from testbed.fidelity.host_load import OtherWork
from testbed.plan.agent_configs import RunSpec
from testbed.run import inputs
from testbed.run.core import ControllerCore
from testbed.run.inputs import INPUTS, REACTIONS, ControllerPhase, WrongPhaseError
from testbed.rundir.live_files import Samples
from tests.testbed.record_factories import update
from tests.testbed.test_controller import AS_REQUESTED
from tests.testbed.test_process_runtime import spec

MORE = """
scenario:
  - {at: 1s, set: d-1, cpu: 0.05}
  - {at: 2s, crash: d-2, restart_after: 1s}
  - {at: 3s, join: d-3}
  - {at: 4s, pause: d-1, for: 1s}
start: {timeout: 60s, quorum: 50%}
"""
NAMES = ("d-1", "d-2", "d-3", AGGREGATOR, "router", "broker")
ANSWERED = (
    inputs.Act, inputs.ApplyLimit, inputs.Obey, inputs.StartAgain, inputs.MeasureAgain, inputs.BeginRun,
)  # fmt: skip


def made(folder: Path) -> RunSpec:
    """A run of three devices that count their energy, and whose links are measured."""
    run = spec(folder, devices=3, more=MORE)
    energy = EnergyConfig(idle=1.0, busy=1.0, battery=BatteryConfig(capacity=10.0))
    link = AccessLink(up=1_000_000)
    devices = tuple(replace(one, link=link, energy=energy) for one in run.plan.devices)
    return replace(run, plan=replace(run.plan, devices=devices, runtime="docker", device_cpus="1"))


class RandomRun:
    """A shell that makes up what happens to a run."""

    def __init__(self, run: RunSpec, seed: int) -> None:
        self._run, self._random = run, random.Random(seed)  # noqa: S311
        self.core = ControllerCore(run)
        self.at, self.over = 100.0, False
        self.done: list[inputs.ControllerAction] = []
        self._codes: dict[str, int] = {}
        self._is_begun = False

    def play(self, inputs_at_most: int) -> None:
        self._pass(inputs.Connected(self.at))
        for _ in range(inputs_at_most):
            if self.over:
                return
            self.at += self._random.choice([0.0, 0.1, 0.1, 1.0])
            self._pass(self._random.choice(self._possible())())

    def _possible(self) -> list[Any]:
        common = [self._message, self._message, self._ended, self._watched, self._stood_still]
        ticks = [self._tick, self._tick_over] * 3
        phase = self.core.run.phase
        if phase is ControllerPhase.INTERRUPTED:
            return [self._record, self._last]
        if phase in (ControllerPhase.RUNNING, ControllerPhase.ENDED):
            return [*common, *ticks, self._record, self._command, self._interrupt_rarely]
        if phase is ControllerPhase.STARTING:
            return [*common, *ticks, self._record]
        return [*[self._message] * 20, *common, *ticks]

    def _pass(self, event: inputs.ControllerInput) -> None:
        answers: list[inputs.ControllerInput] = []
        try:
            actions = self.core.handle(event)
            self.core.validate()
        except Exception as error:
            stories = "; ".join(map(self.core.story, NAMES))
            raise AssertionError(f"{event}: {error} ({stories})") from error
        for action in actions:
            self.done.append(action)
            answers += self._answers(action)
            if isinstance(action, inputs.EndRun | inputs.FailRun):
                self.over = True
                return
        for answer in answers:
            if not self.over:
                self._pass(answer)

    def _answers(self, action: inputs.ControllerAction) -> Iterator[inputs.ControllerInput]:
        fails = self._random.random() < 0.2
        match action:
            case inputs.Act(source="scenario") if fails:
                yield inputs.ActionDone(self.at, action, (), "the device has ended")
            case inputs.StartAgain(component):
                self._codes.pop(component, None)
                yield inputs.ActionDone(self.at, action)
            case inputs.MeasureAgain(devices):
                orders = [(name, messages.MeasureOrder([name])) for name in devices]
                yield inputs.ActionDone(self.at, action, orders)
            case inputs.ReadLinks(is_first):
                if is_first:
                    samples = Samples(self._run.directory.telemetry)
                    yield inputs.EarlierRecords(self.at, [], samples)
                yield self._links()
            case inputs.ReadLastRecords():
                yield inputs.LastRecordsRead(self.at)
            case _ if isinstance(action, ANSWERED):
                yield inputs.ActionDone(self.at, action)

    def _links(self) -> inputs.LinksRead:
        found = measure((), (), LegClock(0.0), {})
        wrong = self._random.sample(["d-1", "d-2"], self._random.randint(0, 2))
        return inputs.LinksRead(self.at, found, (), wrong, (), [OtherWork("others", is_busy=True)])

    def _message(self) -> inputs.ControllerInput:
        names, name = self.core.run.topics, self._random.choice(NAMES[:4])
        states = ["ready"] * 20 + ["joining", "offline"]
        if name == AGGREGATOR and self.core.run.has_started:
            states.append("over")
        told: list[tuple[str, Any]] = [
            (names.status(name), self._random.choice(states)),
            (names.failure(name), "it broke"),
            (names.telemetry(name), "{}"),
        ]
        if name != AGGREGATOR:
            beside = {"device": name, "at": max(0.0, self.at - self._random.random())}
            stuck = {"since": beside["at"], "disturbance": "it stood still"}
            for fields in (
                {"cpu": 1.0, "memory": 1},
                {"probe": {"up": 1e6}},
                {"probe": {"up": 1e6}},
                {"limits": AS_REQUESTED},
                {"limits": AS_REQUESTED},
                {**stuck, "is_over": self._random.random() < 0.5},
                {"energy": {"consumed": 1.0, "transferred": 0.0, "power": 1.0}},
                {"powered": self._random.random() < 0.5, "level": 0.5},
            ):
                told += [(names.telemetry(name), json.dumps({**beside, **fields}))]
        topic, text = self._random.choice(told)
        return inputs.MessageArrived(self.at, topic, text.encode())

    def _ended(self) -> inputs.ControllerInput:
        if self._random.random() < (0.1 if self.core.run.has_started else 0.01):
            name = self._random.choice(NAMES[:5] if self._random.random() < 0.1 else NAMES[:3])
            self._codes[name] = self._random.choice([0, 1, 137])
        return inputs.ProcessesEnded(self.at, dict(self._codes))

    def _watched(self) -> inputs.ControllerInput:
        stopped = {name for name in NAMES if self._random.random() < 0.1}
        hanging = {
            name: "code" for name in self.core.supervision.watched() if self._random.random() < 0.1
        }
        return inputs.ProcessesWatched(self.at, stopped, hanging)

    def _record(self) -> inputs.ControllerInput:
        run, at = self.core.run, self.core.run.device_time(self.at)
        record: events.Record
        if run.epoch is None and not self._is_begun:
            self._is_begun = True
            record = events.RunStarted(self._random.choice([0.0, 2.5]), 1e9, ("d-1", "d-2"), ("d-3",))
        elif run.ended is None and self._random.random() < 0.05:
            reason = self._random.choice(["after", "no clients left", "interrupted"])
            record = events.RunEnded(at, reason, 1, 1)
            self._codes |= dict.fromkeys(NAMES[:4], 0)
        else:
            device = self._random.choice(NAMES[:3])
            actions = ["crash", "restart", "pause", "resume", "join", "leave", "poweroff", "poweron"]
            action = {"action": self._random.choice(actions)}
            source: Any = self._random.choice(["hand", "scenario", "battery", "aggregator"])
            state = self._random.choice(["ready", "offline", "joining"])
            records: list[events.Record] = [
                events.Acted(at, device, source, 0.0, action),
                events.ClientStatus(at, device, state),
                update(device, at),
            ]
            record = self._random.choice(records)
        return inputs.RecordRead(self.at, 1e9, record)

    def _last(self) -> inputs.ControllerInput:
        self.over = True
        return inputs.LastRecordsRead(self.at)

    def _command(self) -> inputs.ControllerInput:
        names = [*NAMES[:3], "nobody"]
        actions: list[dict[str, Any]] = [{"action": "crash"}, {"action": "dance"}, {"cpu": 5.0}]
        command = {"action": "set", **self._random.choice(actions), "device": self._random.choice(names)}
        return inputs.CommandGiven(self.at, command)

    def _stood_still(self) -> inputs.ControllerInput:
        return inputs.StoodStill(self.at, self.at - 4)

    def _tick(self) -> inputs.ControllerInput:
        return inputs.Tick(self.at)

    def _tick_over(self) -> inputs.ControllerInput:
        return inputs.TickOver(self.at)

    def _interrupt_rarely(self) -> inputs.ControllerInput:
        return inputs.Interrupted(self.at) if self._random.random() < 0.05 else self._tick()


def published(actions: Sequence[inputs.ControllerAction], topic: str) -> list[bytes]:
    return [one.payload for one in actions if isinstance(one, inputs.Publish) and one.topic == topic]


def test_random_runs_keep_the_state_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same inputs have the same actions, without a clock; and runs come to every kind of end."""

    def clock() -> float:
        raise AssertionError("the core has looked at a clock")

    run, phases = made(tmp_path), set[ControllerPhase]()
    ends = set[type[inputs.ControllerAction]]()
    for name in ("monotonic", "time"):
        monkeypatch.setattr(time, name, clock)
    for seed in range(150):
        first, again = RandomRun(run, seed), RandomRun(run, seed)
        first.play(400)
        again.play(400)
        assert first.done == again.done
        ends |= {type(first.done[-1])} & {inputs.EndRun, inputs.FailRun}
        phases.add(first.core.run.phase)
        aggregator = first.core.run.topics.control(AGGREGATOR)
        begun = [place for place, one in enumerate(first.done) if isinstance(one, inputs.BeginRun)]
        assert len(begun) <= 1
        before = first.done[: begun[0]] if begun else first.done
        assert published(before, aggregator) == []
        assert published(first.done, aggregator)[:1] == ([b'{"do":"start"}'] if begun else [])
        restarts = [one for one in first.done if isinstance(one, inputs.StartAgain)]
        assert len(restarts) <= 3
    assert ends == {inputs.EndRun, inputs.FailRun}
    assert {ControllerPhase.WAITING, ControllerPhase.ENDED, ControllerPhase.INTERRUPTED} <= phases


def test_table_has_every_input_in_every_phase() -> None:
    assert {*REACTIONS} == {*INPUTS}
    assert {len(row) for row in REACTIONS.values()} == {len(ControllerPhase)}
    assert {reaction for row in REACTIONS.values() for reaction in row} == {*"HIX"}
    assert [*ControllerPhase] == [*range(len(ControllerPhase))]


@pytest.mark.parametrize("phase", ControllerPhase)
def test_ignored_inputs_do_nothing_and_illegal_ones_are_errors(
    phase: ControllerPhase, tmp_path: Path
) -> None:
    core = ControllerCore(spec(tmp_path))
    core.run.phase = phase
    found = measure((), (), LegClock(0.0), {})
    some: tuple[inputs.ControllerInput, ...] = (
        inputs.Connected(1.0),
        inputs.MessageArrived(1.0, core.run.topics.failure("d-1"), b"it broke"),
        inputs.ProcessesEnded(1.0, {"d-1": 0}),
        inputs.EarlierRecords(1.0, [], Samples(tmp_path / "none")),
        inputs.LinksRead(1.0, found, ()),
        inputs.CommandGiven(1.0, {"device": "d-1", "action": "crash"}),
        inputs.ActionDone(1.0, inputs.ApplyLimit("d-1")),
        inputs.TickOver(1.0),
        inputs.Interrupted(1.0),
    )
    for event in some:
        match REACTIONS[type(event)][phase]:
            case "X":
                with pytest.raises(WrongPhaseError, match=f"{type(event).__name__} .*{phase}"):
                    core.handle(event)
            case "I":
                assert core.handle(event) == []
                assert (core.run.failures, core.run.exit_codes, core.run.orders) == ([], {}, [])
        assert core.run.phase is phase or REACTIONS[type(event)][phase] == "H"
        core = ControllerCore(core.run.spec)
        core.run.phase = phase


def test_inconsistent_state_is_reported(tmp_path: Path) -> None:
    core = ControllerCore(spec(tmp_path))
    core.run.epoch = 5.0
    core.run.unmeasured.add("stranger")
    with pytest.raises(AssertionError, match=r"launching: the run clock has started at 5.0; .*stranger"):
        core.validate()
