"""The key `energy` of a topology: how it is read, planned and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agents.device_actions import from_json, to_json
from agents.energy import BatteryConfig, Charger, ChargerConfig, EnergyConfig
from testbed import topology, traits
from testbed.energy.schema import read_csv
from testbed.errors import BadInputError
from testbed.plan import HostResources, catalog, plan
from testbed.topology import profiles
from testbed.topology.scenario import timeline

HOST = HostResources(cores=(0, 1), memory=2**34)
TRACE = ["time,watts", "0,0", "60,1", "120,2", "180,0.5", "240,0", "300,0"]


def parse(
    energy: str, device: str = "timing: 1s", more: str = "", file: str = "<text>"
) -> topology.Topology:
    return topology.parse(
        "name: fleet\n"
        "task: {name: digits-logreg, flops_per_step: 1e6, local: {steps: 20}}\n"
        "rule: {name: fedasync}\n"
        f"devices: [{{name: pi, {device}, energy: {energy}}}]\n"
        f"stop: {{updates: 10}}\n{more}",
        file,
    )


def planned(energy: str, device: str = "timing: 1s", more: str = "") -> EnergyConfig | None:
    read = parse(energy, device, more)
    return plan(read, "virtual", HOST, catalog.read(read)).devices[0].energy


def refusal(energy: str, device: str = "timing: 1s", more: str = "") -> str:
    with pytest.raises(BadInputError) as refused:
        planned(energy, device, more)
    return str(refused.value)


def test_settings_are_read_with_units_and_planned() -> None:
    battery = "{capacity: 18Wh, initial: 50%, power_off_at: 5%}"
    found = planned(
        f"{{idle: 2W, core: 750mW, cores: 4, sent: 5J/MB, battery: {battery}, charger: 10W}}"
    )
    assert found == EnergyConfig(
        idle=2,
        busy=3,
        sent=5,
        battery=BatteryConfig(capacity=64_800, initial=0.5, power_off_at=0.05, return_at=0.15),
        charger=ChargerConfig(times=[0.0], watts=[10.0]),
    )
    assert planned("{idle: 2W, core: 1W}", "cpu: 1.5") == EnergyConfig(idle=2, busy=2)
    assert planned("false") is None


def test_settings_survive_writing_and_reading_of_the_topology() -> None:
    read = parse(
        "{idle: 2W, core: 0.75W, received: 80mJ/MB, battery: {capacity: 250mWh}, charger: {schedule: "
        "[[22h, 10W], [6h, 0W]], clock: 20h}}"
    )
    assert topology.parse(read.to_yaml()).devices == read.devices
    assert "energy" not in parse("false").to_yaml()


def test_figures_come_from_the_profile_and_missing_ones_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    profiles.user_file().parent.mkdir()
    profiles.user_file().write_text(
        "devices:\n"
        "  own: {cores: 4, energy: {idle: 3W, core: 1W, sent: 1J/MB, capacity: 10Wh}}\n"
        "  bare: {cores: 4}\n"
    )
    profile = "profile: own, cpu: 0.5"
    assert planned("true", profile) == EnergyConfig(idle=3, busy=4, sent=1)
    own = planned("{idle: 2W, battery: {initial: 10%}}", profile)
    assert own == EnergyConfig(
        idle=2, busy=4, sent=1, battery=BatteryConfig(capacity=36_000, initial=0.1)
    )
    message = refusal("{core: 1W}", "profile: bare, cpu: 0.5")
    assert "devices[0].energy" in message
    assert "idle is missing, and the profile bare has none" in message
    assert "core is missing" not in message


BATTERY = "{idle: 2W, core: 1W, battery: {capacity: 1Wh}}"
CHARGED = BATTERY.removesuffix("}") + ", charger: "


@pytest.mark.parametrize(
    ("energy", "expected"),
    [
        ("{idle: -2W, core: 1W}", "energy.idle"),
        ("{idle: 2, core: 1W}", "expected a power with its unit"),
        ("{idle: 2W, core: 1W, sent: 5J}", "expected an energy per MB"),
        ("{core: 1W}", "idle is missing: add it, such as idle: 2W"),
        ("{idle: 2W, core: 1W, battery: {}}", "battery.capacity is missing"),
        ("{idle: 2W, core: 1W, battery: {capacity: 0Wh}}", "expected an energy above zero"),
        (
            "{idle: 2W, core: 1W, battery: {capacity: 1Wh, power_off_at: 20%, return_at: 10%}}",
            "battery.return_at: found 0.1, expected more than power_off_at, which is 0.2: raise",
        ),
        ("{idle: 2W, core: 1W, charger: 5W}", "charger: has no effect without a battery"),
        ("yes please", "expected true, or settings such as"),
        (f"{CHARGED}{{}}}}", "devices[0].energy.charger: found none of watts, schedule and trace"),
        (f"{CHARGED}{{watts: 1W, trace: a.csv}}}}", "found watts and trace, expected exactly one"),
        (f"{CHARGED}{{watts: 1W, clock: 3h}}}}", "clock: needs schedule"),
        (f"{CHARGED}{{watts: 1W, loop: false}}}}", "loop: needs trace"),
        (f"{CHARGED}{{schedule: [[25h, 1W]]}}}}", "has 25 h, expected times of day below 24h"),
        (f"{CHARGED}{{schedule: [[6h, 1W], [6h, 2W]]}}}}", "schedule: has 6 h twice"),
        (f"{CHARGED}{{schedule: [[22h, 1W], [6h, 2W], [4h, 0W]]}}}}", "has times out of order"),
        (f"{CHARGED}{{trace: no-such-file.csv}}}}", "no-such-file.csv: No such file"),
    ],
)
def test_wrong_settings_are_refused_with_a_fix(energy: str, expected: str) -> None:
    assert expected in refusal(energy)


def test_schedule_begins_at_the_clock_of_the_run_and_repeats_daily() -> None:
    found = planned(
        "{idle: 2W, core: 1W, battery: {capacity: 1Wh}, charger: "
        "{schedule: [[22h, 10W], [6h, 0W]], clock: 23h}}"
    )
    assert found is not None
    assert found.charger == ChargerConfig(
        times=[0.0, 7 * 3600, 23 * 3600], watts=[10, 0, 10], period=24 * 3600
    )
    hours = Charger(found.charger)
    powers = [hours.power(hour * 3600 * 10**9)[0] / 1e6 for hour in (0, 6, 7, 22, 23, 30, 31)]
    assert powers == [10, 10, 0, 0, 10, 10, 0]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["time,power", "0,1"], "line 1: found the columns 'time, power'"),
        (["time,watts"], "line 1: no row follows the header"),
        (["time,watts", "5,1"], "line 2: time is 5 in the first row, expected 0"),
        (["time,watts", "0,1", "9,2", "3,1"], "line 4: time is 3, expected more than 9"),
        (["time,watts", "0,1", "9,"], "line 3: watts is empty, a gap in the trace"),
        (["time,watts", "0,-1"], "line 2: watts is '-1', expected a number from 0"),
        ([*TRACE[:4], "600,3", *(f"{600 + 60 * k},3" for k in range(1, 20))], "line 5: time is 600"),
    ],
)
def test_damaged_trace_is_refused_with_its_line(lines: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match="line") as refused:
        read_csv(lines, loop=True)
    assert expected in str(refused.value)


def test_trace_of_a_charger_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "solar.csv").write_text("\n".join(TRACE))
    read = parse(f"{CHARGED}{{trace: solar.csv}}}}", file=str(tmp_path / "fleet.yaml"))
    (device,) = plan(read, "virtual", HOST, catalog.read(read)).devices
    assert device.energy is not None
    assert device.energy.charger == ChargerConfig(
        times=[0, 60, 120, 180, 240, 300], watts=[0, 1, 2, 0.5, 0, 0], period=360
    )


def test_scenario_acts_on_batteries() -> None:
    read = parse(
        BATTERY,
        more="scenario:\n"
        "- {at: 1s, set: pi, battery: 20%}\n"
        "- {at: 2s, charge: pi, watts: 10W}\n"
        "- {at: 3s, unplug: pi}\n",
    )
    actions = [step.action for step in timeline(read.scenario, None, read.devices, 0)]
    assert [to_json(action) for action in actions] == [
        {"action": "battery", "level": 0.2},
        {"action": "charge", "watts": 10.0},
        {"action": "unplug"},
    ]
    assert [from_json(to_json(action)) for action in actions] == actions


@pytest.mark.parametrize(
    ("energy", "entry", "expected"),
    [
        ("false", "set: pi, battery: 20%", "scenario[0].set: pi has no battery"),
        ("{idle: 2W, core: 1W}", "unplug: pi", "scenario[0].unplug: pi has no battery"),
        (BATTERY, "charge: pi", "scenario[0].charge: pi has no charger: add watts"),
        (BATTERY, "unplug: pi, watts: 3W", "watts: applies to charge, not to unplug"),
        (BATTERY, "set: pi, battery: 120%", "scenario[0].battery"),
    ],
)
def test_scenario_without_the_battery_that_it_needs_is_refused(
    energy: str, entry: str, expected: str
) -> None:
    assert expected in refusal(energy, more=f"scenario: [{{at: 1s, {entry}}}]")


def test_runtime_that_counts_no_energy_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without = replace(traits.RUNTIMES["docker"], lacks=frozenset({"energy"}))
    monkeypatch.setitem(traits.RUNTIMES, "docker", without)
    with pytest.raises(BadInputError, match=r"does not count energy yet.*virtual runtime"):
        plan(parse(BATTERY, "cpu: 0.5"), "docker", HOST)
