"""Energy and batteries in virtual time: closed forms, exact to the nanosecond and the femtojoule."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents import events
from agents.config import LocalTraining
from agents.device_actions import DeviceAction, PowerOff, PowerOn
from agents.energy import EnergyConfig, femtojoules, to_joules
from agents.energy.messages import RoundEnergy
from testbed.energy import simulated
from testbed.energy.simulated import DeviceEnergy, FleetEnergy
from testbed.errors import RunFailedError
from testbed.plan import PlannedDevice
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.view import View
from testbed.virtual import faults

MODEL = 2600
"""Bytes of a message with a model, at most."""


def energy(capacity: str | None = None, charger: Any = None, **settings: Any) -> dict[str, Any]:
    """Energy of a device that draws 2 W idle, and 5 W while it trains."""
    figures: dict[str, Any] = {"idle": "2W", "core": "3W"}
    for key in ("sent", "received"):
        if key in settings:
            figures[key] = settings.pop(key)
    if capacity is not None:
        figures["battery"] = {"capacity": capacity, **settings}
    return figures if charger is None else {**figures, "charger": charger}


@dataclass
class Outcome:
    """Records and accounts of a run."""

    directory: RunDirectory
    records: list[events.Record]
    switches: list[tuple[str, DeviceAction, int]]
    """Device, action and nanosecond of each power-off and return."""
    fleet: list[FleetEnergy] = field(default_factory=list)

    def one(self, name: str = "a") -> DeviceEnergy:
        return self.fleet[0].devices[name]

    def applied(self, client: str = "a") -> list[float]:
        updates = [r for r in self.records if isinstance(r, events.UpdateApplied)]
        return [update.applied for update in updates if update.client == client]

    def rounds(self, outcome: str, client: str = "a") -> list[RoundEnergy]:
        rounds = [r for r in self.records if isinstance(r, RoundEnergy)]
        return [one for one in rounds if (one.client, one.outcome) == (client, outcome)]

    def samples(self, client: str = "a") -> list[dict[str, Any]]:
        lines = self.directory.telemetry.read_text().splitlines()
        return [one for one in map(json.loads, lines) if one["device"] == client]

    @property
    def ended(self) -> events.RunEnded:
        (ended,) = (r for r in self.records if isinstance(r, events.RunEnded))
        return ended


class Runner:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._runs = 0
        self._fleets: list[FleetEnergy] = []
        self._switches: list[tuple[str, DeviceAction, int]] = []
        act, fleet = faults.act, FleetEnergy

        def spy(world: faults.World, name: str, action: DeviceAction, now: int) -> None:
            if isinstance(action, PowerOff | PowerOn):
                self._switches.append((name, action, now))
            act(world, name, action, now)

        def make(*args: Any) -> FleetEnergy:
            self._fleets.append(fleet(*args))
            return self._fleets[-1]

        monkeypatch.setattr(faults, "act", spy)
        monkeypatch.setattr(simulated, "FleetEnergy", make)

    def __call__(
        self,
        a: dict[str, Any] | None,
        scenario: Sequence[dict[str, Any]] = (),
        device: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Outcome:
        """Run `a` with the energy `a`, and b, which takes 100 s for an update and has no energy."""
        self._runs += 1
        self._fleets, self._switches = [], []
        first = {"name": "a", **(device or {"timing": "1s"}), **({} if a is None else {"energy": a})}
        topology = {
            "name": "t",
            "task": {"name": "quadratic", "centers": [[0.0], [1.0]], "local": {"steps": 10, "lr": 0.1}},
            "rule": {"name": "fedbuff", "buffer_size": 1},
            "devices": [first, {"name": "b", "timing": "100s"}],
            "scenario": list(scenario),
            "evaluate": {"every": "5s"},
            "stop": {"after": "20s"},
            "runtime": {"name": "virtual"},
            "virtual": {"step_time": "50ms"},
        }
        folder = self._folder / str(self._runs)
        folder.mkdir()
        path = folder / "topology.yaml"
        path.write_text(yaml.safe_dump(topology | changes))
        parsed, plan = preparing.plan_file(path, Options())
        directory = RunDirectory.create(folder, "run")
        up.run(parsed, plan, directory, Options(), View())
        return Outcome(directory, list(events.read(directory.events)), self._switches, self._fleets)


@pytest.fixture
def virtual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(tmp_path, monkeypatch)


def assert_conserved(one: DeviceEnergy) -> None:
    assert one.rounds + one.in_progress + one.idle == one.account.consumed


def test_device_at_a_duty_powers_off_at_the_computed_nanosecond(virtual: Runner) -> None:
    # It trains for 0.6 s of each second: 0.6 · 5 W + 0.4 · 2 W. Two seconds take 7.6 J.
    duty = {"timing": "600ms", "think": "400ms"}
    found = virtual(energy("10.000000001J"), device=duty)
    assert found.switches == [("a", PowerOff(), 2_000_000_000 + 480_000_001)]
    assert found.applied() == [1, 2]
    assert [one.energy_j for one in found.rounds("sent")] == [3.0, 3.0]
    (lost,) = found.rounds("lost")
    assert lost.energy_j == pytest.approx(2.4)
    acted = [r for r in found.records if isinstance(r, events.Acted)]
    assert [(one.source, one.details) for one in acted] == [("battery", {"action": "poweroff"})]
    unfinished = [r for r in found.records if isinstance(r, events.RoundUnfinished)]
    assert [(one.client, one.dispatch) for one in unfinished if one.client == "a"] == [
        ("a", lost.dispatch)
    ]
    assert found.one().idle == femtojoules(2 * 0.4 * 2)
    assert_conserved(found.one())
    assert found.samples()[-1]["energy"] == {
        "consumed": pytest.approx(10.0),
        "transferred": 0.0,
        "power": 0.0,
        "is_on": False,
        "level": 0.0,
        "supplied": 0.0,
        "charging": 0.0,
    }


def test_cpu_share_scales_the_power_of_the_cpu(virtual: Runner) -> None:
    # Half a core, 10 steps of 50 ms: a second of 5 W. At a quarter of a core the CPU draws 1.5 W.
    worker = {"cpu": 0.5}
    found = virtual(energy("100J"), device=worker, stop={"updates": 2})
    assert found.one().account.consumed == femtojoules(10)
    slow = [{"at": "0s", "set": "a", "cpu": 0.25}]
    found = virtual(energy("100J"), slow, device=worker, stop={"updates": 2})
    assert found.one().account.consumed == femtojoules(4 * 3.5)
    assert_conserved(found.one())
    # A minimum duration beside a CPU share: the device waits without work for the rest of it.
    found = virtual(energy("100J"), device={"cpu": 0.5, "timing": "1500ms"}, stop={"updates": 2})
    assert [one.energy_j for one in found.rounds("sent")] == [6.0, 6.0]


def test_device_returns_when_it_is_charged(virtual: Runner) -> None:
    settings = {"initial": 0.5, "power_off_at": 0.1, "return_at": 0.3}
    found = virtual(energy("10J", "1W", **settings))
    # 4 J above the threshold at 4 W net: 1 s. Then 2 J at 1 W: 2 s. Then 2 J at 4 W: 0.5 s.
    assert [(action, at / 1e9) for _, action, at in found.switches[:4]] == [
        (PowerOff(), 1.0),
        (PowerOn(), 3.0),
        (PowerOff(), 3.5),
        (PowerOn(), 5.5),
    ]
    # It powers off in the instant in which its first update is ready: the update is lost.
    assert found.applied() == []
    assert len(found.rounds("lost")) == sum(action == PowerOff() for _, action, _ in found.switches)
    assert_conserved(found.one())
    account = found.one().account
    assert account.stored == femtojoules(5) + account.supplied - account.consumed


@pytest.mark.parametrize(
    ("rtt", "capacity", "applied"),
    [
        ("2s", "8J", []),  # empty at 2.5 s, with the update on its way
        ("2s", "9J", []),  # empty at 3 s, the nanosecond at which the update would have arrived
        ("2s", "9.000001J", [3.0]),
    ],
)
def test_update_on_its_way_is_lost_with_the_power(
    rtt: str, capacity: str, applied: list[float], virtual: Runner
) -> None:
    # The model arrives at 1 s, with 2 J gone; the update leaves at 2 s, and arrives at 3 s.
    found = virtual(energy(capacity), device={"timing": "1s", "link": {"rtt": rtt}})
    assert found.applied() == applied
    assert len(found.switches) == 1
    assert_conserved(found.one())


def test_bytes_cost_energy_and_may_empty_the_battery(virtual: Runner) -> None:
    bytes_each = 1e6 / MODEL  # at most 1 J per message
    figures = energy("100J", sent=f"{bytes_each:.0f}J/MB", received=f"{2 * bytes_each:.0f}J/MB")
    found = virtual(figures, stop={"updates": 3})
    account = found.one().account
    updates = [r for r in found.records if isinstance(r, events.UpdateApplied)]
    sent = sum(update.bytes for update in updates) * round(bytes_each) / 1e6
    assert 0 < sent < 3
    received = account.transferred - femtojoules(sent)
    assert received > 0
    assert account.consumed == femtojoules(3 * 5) + account.transferred
    assert sum(one.energy_j for one in found.rounds("sent")) == pytest.approx(
        to_joules(account.consumed) - to_joules(found.one().idle), abs=1e-5
    )
    assert_conserved(found.one())
    # Enough for the first training and its model, but not to send the update.
    left = to_joules(received) / 3 + 5 + sent / 6
    found = virtual({**figures, "battery": {"capacity": f"{left:.6f}J"}})
    assert found.switches == [("a", PowerOff(), 10**9)]
    assert (found.applied(), len(found.rounds("lost")), found.rounds("sent")) == ([], 1, [])
    assert_conserved(found.one())


def test_model_that_arrives_at_once_may_empty_the_battery(virtual: Runner) -> None:
    found = virtual(energy("1J", received="10000J/MB"))
    assert found.switches == [("a", PowerOff(), 0)]
    assert (found.applied(), len(found.rounds("lost"))) == ([], 1)
    unfinished = [r for r in found.records if isinstance(r, events.RoundUnfinished)]
    assert [(one.client, one.until) for one in unfinished if one.client == "a"] == [("a", 0.0)]
    assert_conserved(found.one())


def test_empty_battery_at_the_start_keeps_the_device_away_until_it_is_charged(virtual: Runner) -> None:
    charger = {"schedule": [["0s", "0W"], ["4s", "2W"]]}
    found = virtual(energy("10J", charger, initial=0, return_at=0.2))
    (started,) = (r for r in found.records if isinstance(r, events.RunStarted))
    assert (started.clients, started.missing) == (("b",), ("a",))
    assert [(action, at / 1e9) for _, action, at in found.switches[:2]] == [
        (PowerOn(), 5.0),  # 2 J at 2 W from 4 s on
        (PowerOff(), pytest.approx(5 + 2 / 3)),
    ]
    acted = [r for r in found.records if isinstance(r, events.Acted)]
    assert [(one.at, one.details["action"]) for one in acted[:2]] == [(0, "poweroff"), (5, "poweron")]


def test_crash_pause_and_leave_while_the_device_is_off(virtual: Runner) -> None:
    settings = {"initial": 0.5, "return_at": 0.1}
    figures = energy("10J", "1W", **settings)  # off at 1.25 s, back at 2.25 s, and so on
    down = virtual(figures, [{"at": "2s", "crash": "a", "restart_after": "1s"}])
    assert [at / 1e9 for _, _, at in down.switches[:3]] == [1.25, 2.25, 3 + 0.25 / 4]
    (restart,) = (
        r for r in down.records if isinstance(r, events.Acted) and r.details["action"] == "restart"
    )
    assert restart.at == 3
    # Between 2.25 s and 3 s it is on without a client: 2 W against 1 W of the charger. 1 J − 0.75 J are
    # left at 3 s, when the client starts again, which draws 5 W.
    ready = [r.at for r in down.records if isinstance(r, events.ClientStatus) and r.state == "ready"]
    assert 3 in ready
    assert 2.25 not in ready
    for entry in ({"at": "2s", "leave": "a"}, {"at": "2s", "crash": "a"}):
        gone = virtual(figures, [entry])
        assert gone.applied() == [1]
        assert_conserved(gone.one())
    left = virtual(figures, [{"at": "2s", "leave": "a"}])
    assert [at / 1e9 for _, _, at in left.switches] == [1.25]
    assert left.one().account.stored == femtojoules(0.75)  # nothing is charged after it has left
    again = virtual(figures, [{"at": "2s", "leave": "a"}, {"at": "4s", "join": "a"}])
    assert [(action, at / 1e9) for _, action, at in again.switches[:2]] == [
        (PowerOff(), 1.25),
        (PowerOn(), 4.25),
    ]
    paused = virtual(figures, [{"at": "500ms", "pause": "a", "for": "10s"}])
    # Half of the training, then 2 W against 1 W: 5 − 2 − 3 · 1.
    assert [at / 1e9 for _, _, at in paused.switches[:2]] == [3.5, 4.5]
    assert_conserved(paused.one())


def test_scenario_sets_charges_and_unplugs(virtual: Runner) -> None:
    found = virtual(
        energy("100J"),
        [
            {"at": "1500ms", "set": "a", "battery": "5%"},  # 5 J: empty 1 s later
            {"at": "3s", "charge": "a", "watts": "10W"},  # back at 10 J, after 1 s
            {"at": "5s", "unplug": "a"},
            {"at": "6s", "set": "a", "battery": "0%"},
            {"at": "8s", "set": "a", "battery": "50%"},
        ],
        stop={"after": "9s"},
    )
    assert [(action, at / 1e9) for _, action, at in found.switches] == [
        (PowerOff(), 2.5),
        (PowerOn(), 4.0),
        (PowerOff(), 6.0),
        (PowerOn(), 8.0),
    ]
    assert found.applied() == [1, 2, 5, 9]
    assert_conserved(found.one())


def test_own_charger_is_plugged_in_again_by_charge(virtual: Runner) -> None:
    found = virtual(energy("10J", "5W"), [{"at": "1s", "unplug": "a"}, {"at": "2s", "charge": "a"}])
    assert found.switches == []
    assert found.one().account.stored == femtojoules(5)


@pytest.mark.parametrize("loses", [False, True])
def test_power_off_erases_the_disk_only_if_requested(
    loses: bool, virtual: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    act = faults.act

    def spy(world: faults.World, name: str, action: DeviceAction, now: int) -> None:
        act(world, name, action, now)
        if isinstance(action, PowerOff):
            found.append(world.device(name).memory)

    monkeypatch.setattr(faults, "act", spy)
    virtual(energy("14J", loses_memory=loses), rule={"name": "area", "criterion": "every", "every": 1})
    assert [memory is None for memory in found] == [loses]


@pytest.mark.parametrize("charger", [None, {"schedule": [["0s", "0W"], ["1h", "0W"]]}])
def test_run_whose_devices_stay_off_is_reported_and_does_not_hang(charger: Any, virtual: Runner) -> None:
    alone = {"name": "a", "timing": "1s", "energy": energy("8J", charger)}
    two = [alone, {**alone, "name": "b"}]
    if charger is None:
        found = virtual(None, devices=two, stop={"after": "20s"})
        assert (found.ended.reason, found.ended.at) == ("no clients left", 1.6)
    else:
        with pytest.raises(RunFailedError, match="nothing can happen"):
            virtual(None, devices=two, stop={"updates": 100})
        found = virtual(None, devices=two, stop={"after": "20s"})
        assert (found.ended.reason, found.ended.at) == ("after", 20)
        notes = [r.message for r in found.records if isinstance(r, events.Note)]
        assert any("nothing can happen" in note for note in notes)


def test_run_waits_for_the_charger_if_all_devices_are_off(virtual: Runner) -> None:
    charger = {"schedule": [["0s", "0W"], ["12h", "10W"]]}
    alone = {"name": "a", "timing": "1s", "energy": energy("8J", charger, return_at=1)}
    found = virtual(None, devices=[alone, {**alone, "name": "b"}], stop={"updates": 4})
    assert found.ended.reason == "updates"
    assert found.switches[2][2] == 43_200_800_000_000
    assert found.applied() == [1, 43_201.8]


def test_counting_of_energy_does_not_change_the_other_records(virtual: Runner) -> None:
    plain, counted = virtual(None), virtual(energy())
    assert not plain.directory.telemetry.exists()
    kept = [r for r in counted.records if not isinstance(r, RoundEnergy | events.RunStarted)]
    # As texts, because NaN differs from NaN.
    assert str(kept) == str([r for r in plain.records if not isinstance(r, events.RunStarted)])
    assert counted.one().account.consumed == femtojoules(20 * 5)
    assert_conserved(counted.one())


def test_energy_is_conserved_in_random_runs(virtual: Runner) -> None:
    draw = random.Random(7)  # noqa: S311
    verbs: list[dict[str, Any]] = [
        {"crash": "a", "restart_after": "700ms"},
        {"pause": "a", "for": "900ms"},
        {"disconnect": "a", "for": "1100ms"},
        {"leave": "a"},
        {"join": "a"},
        {"set": "a", "battery": "40%"},
        {"set": "a", "cpu": 0.2},
        {"charge": "a", "watts": "7W"},
        {"unplug": "a"},
    ]
    for _ in range(12):
        times = sorted(draw.uniform(0.5, 15) for _ in range(8))
        scenario = [{"at": f"{at:.6f}s", **draw.choice(verbs)} for at in times]
        if next((key for e in scenario for key in e if key in ("leave", "join")), "") == "join":
            scenario.insert(0, {"at": "0s", "leave": "a"})
        charger = {"schedule": [[f"{k}s", f"{draw.randrange(9)}W"] for k in range(0, 20, 2)]}
        links = [{"link": {"up": "100kbit", "rtt": "80ms"}}, {"link": {"down": "80kbit"}}, {}]
        received = draw.choice(["5J/MB", "20000J/MB"])  # some models take a third of the battery
        found = virtual(
            energy("14J", charger, sent="9J/MB", received=received),
            scenario,
            device={"cpu": 0.5, **draw.choice(links)},
        )
        one = found.one()
        assert_conserved(one)
        assert one.account.is_on or one.account.stored < one.account.capacity
        states = [action for _, action, _ in found.switches]
        assert states == [(PowerOff(), PowerOn())[k % 2] for k in range(len(states))]
        joules = sum(r.energy_j for r in found.records if isinstance(r, RoundEnergy))
        assert joules == pytest.approx(to_joules(one.rounds), abs=1e-4)


def _device_energy() -> DeviceEnergy:
    config = EnergyConfig(idle=2.0, busy=3.0, sent=1.0)
    return DeviceEnergy(
        PlannedDevice(
            name="a", group="a", cpu=None, memory=0, local=LocalTraining(steps=1), energy=config
        ),
        0,
    )


def test_round_is_lost_when_its_update_is_replaced_in_the_send_buffer() -> None:
    one = _device_energy()
    for sequence in (1, 2):
        assert not [*one.begin_training(10 * sequence, sequence, dispatch=sequence)]
        one.end_training(10 * sequence + 5)
    (lost,) = one.begin_training(30, 3, dispatch=3)
    assert (lost.dispatch, lost.outcome) == (1, "lost")
    (sent,) = one.send_update(40, 2, sent=1, received=0)
    assert sent.dispatch == 2


def test_work_that_comes_in_a_pause_is_done_after_it() -> None:
    """40 ns of 100 are done before the pause; 50 more come in it."""
    one = _device_energy()
    one.compute(0, 100, 100)
    one.freeze(40)
    one.compute_more(60, 50)
    one.thaw(1_000)
    one.advance(2_000)
    assert one.account.consumed == one.account.idle * 2_000 + one.account.busy * 150
