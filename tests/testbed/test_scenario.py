from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import config
from agents.device_actions import (
    Action,
    Crash,
    Disconnect,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetCpu,
    SetLink,
)
from agents.timing import durations
from agents.timing.durations import DISTRIBUTIONS, DurationDistribution
from agents.timing.nanoseconds import SECOND, from_seconds, to_seconds
from testbed.errors import BadInputError
from testbed.topology import scenario, validation_errors, yamlfile
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import Model
from testbed.topology.scenario import Churn, Heat, ScenarioEntry, Step, timeline


class _Fleet(Model):
    devices: tuple[DeviceGroup, ...]
    scenario: tuple[ScenarioEntry, ...] = ()
    churn: Churn | None = None

    def timeline(self, seed: int = 7, horizon: float | None = None) -> list[Step]:
        end = None if horizon is None else from_seconds(horizon)
        heat = {
            name: Heat(group.cpu, group.thermal)
            for group in self.devices
            for name in group.device_names
            if group.cpu is not None and group.thermal is not None
        }
        return list(timeline(self.scenario, self.churn, self.devices, seed, end, heat))

    def endless(self, seed: int = 7) -> Iterator[Step]:
        return timeline(self.scenario, self.churn, self.devices, seed)


DEVICES = """
devices:
  - {name: fast, cpu: 0.5}
  - {name: slow, count: 3, cpu: 0.1}
  - {name: late, count: 2, cpu: 0.1}
"""


def _read(text: str) -> _Fleet:
    """Read the text as testbed.topology reads a file."""
    document = yamlfile.parse(text)
    fleet = validation_errors.validate(_Fleet, document)
    problems = [*scenario.problems(fleet.scenario, fleet.churn, fleet.devices, document.source)]
    if problems:
        raise document.source.error(problems)
    return fleet


def _scenario(*entries: str) -> _Fleet:
    return _read(DEVICES + "scenario:\n" + "".join(f"  - {entry}\n" for entry in entries))


def _available(text: str, count: int = 1) -> _Fleet:
    return _read(f"devices: [{{name: nano, count: {count}, cpu: 1, availability: {text}}}]")


def _steps(*steps: tuple[float, str, Action]) -> list[Step]:
    return [Step(from_seconds(at), device, action) for at, device, action in steps]


def test_every_action_becomes_steps_in_order_of_time() -> None:
    fleet = _scenario(
        "{at: 10s, set: slow, cpu: 0.05}",
        "{at: 12s, set: fast, cpu: 1, link: {up: 1mbit}}",
        "{at: 20s, crash: slow-1, restart_after: 5s}",
        "{at: 24s, pause: [fast, slow-2], for: 3s}",
        "{at: 30s, disconnect: fast, for: 4s}",
        "{at: 40s, leave: slow-3}",
        "{at: 32s, join: late-1}",
        "{at: 50s, crash: slow-2}",
    )
    assert fleet.timeline() == _steps(
        (10.0, "slow-1", SetCpu(0.05)),
        (10.0, "slow-2", SetCpu(0.05)),
        (10.0, "slow-3", SetCpu(0.05)),
        (12.0, "fast", SetCpu(1.0)),
        (12.0, "fast", SetLink({"up": 1_000_000})),
        (20.0, "slow-1", Crash()),
        (24.0, "fast", Pause()),
        (24.0, "slow-2", Pause()),
        (25.0, "slow-1", Restart()),
        (27.0, "fast", Resume()),
        (27.0, "slow-2", Resume()),
        (30.0, "fast", Disconnect()),
        (32.0, "late-1", Join()),
        (34.0, "fast", Reconnect()),
        (40.0, "slow-3", Leave()),
        (50.0, "slow-2", Crash()),
    )
    assert scenario.absent_at_start(fleet.scenario, fleet.devices) == {"late-1"}
    assert fleet.timeline(horizon=20.0) == fleet.timeline()[:5]


def test_steps_of_one_time_keep_the_file_order() -> None:
    fleet = _scenario(
        "{at: 3s, pause: slow-2, for: 2s}",
        "{at: 5s, crash: [slow-3, fast, slow], restart_after: 1s}",
        "{at: 5s, set: fast, cpu: 1}",
        "{at: 5s, disconnect: fast, for: 1s}",
    )
    at_five = [(step.device, step.action) for step in fleet.timeline() if step.at == 5 * SECOND]
    assert at_five == [
        ("slow-2", Resume()),
        ("slow-3", Crash()),
        ("fast", Crash()),
        ("slow-1", Crash()),
        ("slow-2", Crash()),
        ("fast", SetCpu(1.0)),
        ("fast", Disconnect()),
    ]


@pytest.mark.parametrize(
    ("entry", "at", "ended"),
    [
        ("{at: 100ms, pause: fast, for: 200ms}", "300ms", Resume()),
        ("{at: 100ms, disconnect: fast, for: 700ms}", "800ms", Reconnect()),
        ("{at: 1100ms, crash: fast, restart_after: 2200ms}", "3300ms", Restart()),
        ("{at: 300ms, pause: fast, for: 600ms}", "900ms", Resume()),
    ],
)
def test_end_of_an_action_at_another_entrys_time_keeps_the_file_order(
    entry: str, at: str, ended: Action
) -> None:
    """In floating-point seconds 0.1 + 0.2 would be after 0.3, and 0.3 + 0.6 before 0.9."""
    set_cpu = f"{{at: {at}, set: fast, cpu: 1}}"
    for entries, actions in (
        ((entry, set_cpu), [ended, SetCpu(1.0)]),
        ((set_cpu, entry), [SetCpu(1.0), ended]),
    ):
        (first, second) = _scenario(*entries).timeline()[1:]
        assert [first.action, second.action] == actions
        assert first.at == second.at


def test_sums_of_drawn_times_are_whole_nanoseconds() -> None:
    """Ten times 0.1 s is 1 s: what is drawn meets what the file says, and the file comes first."""
    fleet = _read(
        "devices: [{name: nano, cpu: 1, availability: {on: 100ms, off: 100ms, start: on}}]\n"
        "scenario: [{at: 1s, set: nano, cpu: 0.5}]"
    )
    at_one = [step.action for step in fleet.timeline(horizon=1.05) if step.at == SECOND]
    assert at_one == [SetCpu(0.5), Reconnect()]
    looped = _available("{trace: [[0s, on], [100ms, off]], loop: 300ms}")
    assert [step.at for step in looped.timeline(horizon=1.0)] == [
        at * SECOND // 10 for at in (1, 3, 4, 6, 7, 9)
    ]


def test_link_change_keeps_unmentioned_fields() -> None:
    fleet = _scenario(
        "{at: 1s, set: fast, link: {rtt: 10ms, jitter: 20ms}}",
        "{at: 2s, set: fast, link: {up: null, down: 2mbit}}",
    )
    first, second = (step.action for step in fleet.timeline())
    assert isinstance(first, SetLink)
    assert isinstance(second, SetLink)
    link = config.AccessLink(up=5_000_000, down=1_000, rtt=0.1, loss=0.5).with_changes(first.changes)
    assert link == config.AccessLink(5_000_000, 1_000, rtt=0.01, jitter=0.02, loss=0.5)
    assert link.with_changes(second.changes) == replace(link, up=None, down=2_000_000)
    assert config.AccessLink().with_changes(second.changes) == config.AccessLink(None, 2_000_000)


def test_overlapping_actions_are_merged() -> None:
    fleet = _scenario(
        "{at: 10s, pause: fast, for: 10s}",
        "{at: 12s, pause: fast, for: 1s}",
        "{at: 15s, pause: fast, for: 10s}",
        "{at: 30s, crash: fast, restart_after: 3s}",
        "{at: 31s, crash: fast, restart_after: 1s}",
        "{at: 31s, disconnect: fast, for: 1s}",
    )
    assert fleet.timeline() == _steps(
        (10.0, "fast", Pause()),
        (25.0, "fast", Resume()),
        (30.0, "fast", Crash()),
        (31.0, "fast", Disconnect()),
        (32.0, "fast", Reconnect()),
        (33.0, "fast", Restart()),
    )


def test_actions_on_an_absent_device_are_skipped() -> None:
    fleet = _scenario(
        "{at: 1s, crash: [fast, late-1], restart_after: 5s}",
        "{at: 2s, set: late-1, cpu: 1}",
        "{at: 3s, disconnect: late, for: 10s}",
        "{at: 4s, join: late-1}",
        "{at: 7s, leave: late-1}",
        "{at: 8s, leave: late-1}",
        "{at: 9s, join: late-1}",
        "{at: 10s, join: late-1}",
    )
    assert [step for step in fleet.timeline() if step.device == "late-1"] == _steps(
        (2.0, "late-1", SetCpu(1.0)),
        (4.0, "late-1", Join()),
        (4.0, "late-1", Disconnect()),
        (7.0, "late-1", Leave()),
        (9.0, "late-1", Join()),
        (9.0, "late-1", Disconnect()),
        (13.0, "late-1", Reconnect()),
    )


def test_device_that_crashed_for_good_may_rejoin() -> None:
    fleet = _scenario(
        "{at: 1s, crash: fast, restart_after: 9s}",
        "{at: 2s, crash: [fast, slow-1]}",
        "{at: 3s, crash: slow, restart_after: 1s}",
        "{at: 5s, join: [fast, slow-1]}",
    )
    assert fleet.timeline() == _steps(
        (1.0, "fast", Crash()),
        (2.0, "slow-1", Crash()),
        (3.0, "slow-2", Crash()),
        (3.0, "slow-3", Crash()),
        (4.0, "slow-2", Restart()),
        (4.0, "slow-3", Restart()),
        (5.0, "fast", Join()),
        (5.0, "slow-1", Join()),
    )
    assert not scenario.absent_at_start(fleet.scenario, fleet.devices)


def test_device_that_leaves_before_it_joins_is_present_at_the_start() -> None:
    fleet = _scenario("{at: 9s, join: [slow, late]}", "{at: 5s, leave: slow-2}")
    gone = scenario.absent_at_start(fleet.scenario, fleet.devices)
    assert gone == {"slow-1", "slow-3", "late-1", "late-2"}


CHURN = """
churn: {rate: 2/min, downtime: {distribution: exponential, mean: 10s}, devices: [slow]}
"""


def test_churn_has_the_requested_rate_and_downtime() -> None:
    steps = _read(DEVICES + CHURN).timeline(horizon=200_000.0)
    assert {step.device for step in steps} == {"slow-1", "slow-2", "slow-3"}
    for device in ("slow-1", "slow-2", "slow-3"):
        own = [step for step in steps if step.device == device]
        assert [step.action for step in own[:4]] == [Crash(), Restart(), Crash(), Restart()]
        times = [0.0, *(to_seconds(step.at) for step in own)]
        spans = np.diff(times)
        up, down = spans[::2], spans[1::2]
        assert len(up) > 4500  # 200000 s in cycles of 40 s
        for drawn, mean in ((up, 30.0), (down, 10.0)):
            error = mean / math.sqrt(len(drawn))
            assert drawn.mean() == pytest.approx(mean, abs=4 * error)
            assert drawn.std() == pytest.approx(mean, rel=0.1)  # exponential


def test_churn_depends_on_seed_and_device() -> None:
    fleet = _read(DEVICES + CHURN)
    steps = fleet.timeline(seed=1, horizon=1000.0)
    assert fleet.timeline(seed=1, horizon=1000.0) == steps
    assert fleet.timeline(seed=2, horizon=1000.0) != steps
    one = _read(DEVICES + CHURN.replace("[slow]", "slow-2"))
    assert one.timeline(seed=1, horizon=1000.0) == [s for s in steps if s.device == "slow-2"]


def test_downtime_does_not_change_the_times_between_crashes() -> None:
    def ups(downtime: str) -> list[float]:
        text = CHURN.replace("{distribution: exponential, mean: 10s}", downtime)
        steps = _read(DEVICES + text.replace("[slow]", "fast")).endless()
        times = [0.0, *(to_seconds(step.at) for step in itertools.islice(steps, 9))]
        return [later - earlier for earlier, later in itertools.pairwise(times)][::2]

    assert ups("1s") == pytest.approx(ups("{distribution: lognormal, median: 5s, sigma: 1}"))


def test_churn_is_endless_and_lazy() -> None:
    everyone = _read(DEVICES + "churn: {rate: 3/h, downtime: 1s}")
    steps = list(itertools.islice(everyone.endless(), 10))
    assert len(steps) == 10
    assert steps == everyone.timeline(horizon=1e5)[:10]


@pytest.mark.parametrize("away", ["crash", "leave"])
def test_device_that_left_for_good_has_no_further_steps(away: str) -> None:
    fleet = _read(DEVICES + f"scenario: [{{at: 1h, {away}: slow}}]" + CHURN)
    steps = list(fleet.endless())  # which ends
    assert len(steps) > 100
    assert max(step.at for step in steps) == 3600 * SECOND
    for device in ("slow-1", "slow-2", "slow-3"):
        own = [step.action for step in steps if step.device == device]
        if away == "crash":
            assert own == list(itertools.islice(itertools.cycle([Crash(), Restart()]), len(own)))
            assert own[-1] == Crash()
        else:
            assert own[-1] == Leave()


def test_availability_follows_a_trace() -> None:
    once = _available("{trace: [[0s, on], [10s, off], [15s, off], [20s, on]]}")
    assert once.timeline() == _steps((10.0, "nano-1", Disconnect()), (20.0, "nano-1", Reconnect()))
    again = _available("{trace: [[0s, off], [10s, on]], loop: 30s}")
    assert again.timeline(horizon=61.0) == _steps(
        (0.0, "nano-1", Disconnect()),
        (10.0, "nano-1", Reconnect()),
        (30.0, "nano-1", Disconnect()),
        (40.0, "nano-1", Reconnect()),
        (60.0, "nano-1", Disconnect()),
    )


def test_on_and_off_periods_alternate() -> None:
    fleet = _available("{on: 10s, off: {distribution: trace, values: [1s, 2s]}, start: on}")
    assert fleet.timeline(horizon=24.0) == _steps(
        (10.0, "nano-1", Disconnect()),
        (11.0, "nano-1", Reconnect()),
        (21.0, "nano-1", Disconnect()),
        (23.0, "nano-1", Reconnect()),
    )
    late = _available("{on: 10s, off: 5s, start: off}").timeline(horizon=6.0)
    assert late == _steps((0.0, "nano-1", Disconnect()), (5.0, "nano-1", Reconnect()))


def test_fraction_of_available_devices_matches_the_means() -> None:
    exponential = "{{distribution: exponential, mean: {}s}}"
    fleet = _available(f"{{on: {exponential.format(30)}, off: {exponential.format(10)}}}", count=1000)
    for until in (1e-9, 50.0):
        off: set[str] = set()
        for step in fleet.timeline(horizon=until):
            (off.discard if step.action == Reconnect() else off.add)(step.device)
        assert len(off) == pytest.approx(250, abs=4 * math.sqrt(1000 * 0.25 * 0.75))


MEANS: list[DurationDistribution] = [
    durations.Constant(2.0),
    durations.Exponential(mean=2.0),
    durations.Exponential(rate=4.0),
    durations.Lognormal(2.0, 0.5),
    durations.Normal(1.0, 0.0),
    durations.Normal(1.0, 2.0, low=0.5),
    durations.Pareto(1.0, 3.0),
    durations.DurationTrace((1.0, 2.0, 6.0)),
    durations.Uniform(1.0, 4.0),
]


@pytest.mark.parametrize("distribution", MEANS, ids=repr)
def test_means_match_those_of_samples(distribution: DurationDistribution) -> None:
    draw = distribution.sampler(np.random.default_rng(3))
    drawn = [draw() for _ in range(30_000)]
    assert distribution.expectation == pytest.approx(statistics.fmean(drawn), rel=0.02)


def test_every_distribution_has_a_mean() -> None:
    assert {type(distribution) for distribution in MEANS} == set(DISTRIBUTIONS.values())
    assert durations.Pareto(1.0, 1.0).expectation == math.inf


def _told(text: str) -> str:
    with pytest.raises(BadInputError) as refused:
        _read(text)
    *_, count = str(refused.value).splitlines()
    assert count == "<text>: 1 error"
    return str(refused.value)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{at: 1s, crash: slwo}", "7:21: scenario[0].crash: found 'slwo'"),
        ("{at: 1s, crash: [fast, slow-4]}", "7:28: scenario[0].crash[1]: found 'slow-4', "),
        ("{at: 1s, crash: xyz}", "found 'xyz', expected a device or a group such as fast"),
        ("{at: 1s, crash: 5}", "7:21: scenario[0].crash: found 5"),
        ("{at: 1s, crash: []}", "scenario[0].crash: found a list"),
        ("{at: 1s, crash: [5]}", "7:22: scenario[0].crash[0]: found 5, expected a text"),
        ("{at: -1s, crash: fast}", "7:10: scenario[0].at: found '-1s'"),
        ("{at: 5, crash: fast}", "7:10: scenario[0].at: found 5, expected a duration with its unit"),
        ("{crash: fast}", "7:5: scenario[0]: at is missing"),
        ("{at: 1s}", "7:5: scenario[0]: found none of set, crash, pause, disconnect, leave, join"),
        ("{at: 1s, crash: fast, leave: slow}", "7:5: scenario[0]: found crash and leave"),
        ("{at: 1s, crahs: fast, join: late}", "7:14: scenario[0].crahs: unknown key"),
        (
            "{at: 1s, set: fast}",
            "7:19: scenario[0].set: changes nothing: add cpu, link or battery, such as",
        ),
        ("{at: 1s, set: fast, cpu: 0}", "scenario[0].cpu: found 0"),
        ("{at: 1s, set: fast, link: {}}", "7:31: scenario[0].link: found nothing to change, expected a"),
        ("{at: 1s, set: fast, link: {class: lte}}", "scenario[0].link.class"),
        ("{at: 1s, set: fast, link: {rtt: 1s, delay: 1s}}", "7:41: scenario[0].link.delay: unknown key"),
        ("{at: 1s, set: fast, link: {up: 5}}", "scenario[0].link.up: found 5"),
        ("{at: 1s, set: fast, link: {upp: 5kbit}}", "scenario[0].link.upp: unknown key"),
        ("{at: 1s, crash: fast, cpu: 1}", "7:32: scenario[0].cpu: applies to set, not to crash"),
        ("{at: 1s, pause: fast, for: 1s, restart_after: 1s}", "scenario[0].restart_after"),
        ("{at: 1s, crash: fast, for: 1s}", "7:32: scenario[0].for: applies to pause and disconnect"),
        ("{at: 1s, leave: fast, for: 1s}", "for: applies to pause and disconnect, not to leave"),
        ("{at: 1s, pause: fast}", "7:21: scenario[0].pause: has no duration"),
        ("{at: 1s, disconnect: fast}", "scenario[0].disconnect: has no duration: add for"),
        ("{at: 1s, pause: fast, for: 0s}", "scenario[0].for: found '0s'"),
        ("{at: 0s, join: [fast, slow, late]}", "6:1: scenario: every device joins later"),
        (
            "{at: 1s, crash: fast, restart_after: 1s}\n  - {at: 2s, join: fast}",
            "7:10: scenario[0].at: fast is absent until it joins at 2 s: write a later time",
        ),
        ("{at: 1s, pause: fast, for: 1s}\n  - {at: 2s, join: fast}", "fast is absent until it"),
    ],
)
def test_invalid_scenarios_are_refused(entry: str, told: str) -> None:
    assert told in _told(f"{DEVICES}scenario:\n  - {entry}\n")


def test_ambiguous_device_name_is_refused() -> None:
    devices = "devices: [{name: pi, cpu: 1}, {name: pi, count: 2, cpu: 1}]\n"
    told = "scenario[0].leave: found 'pi', which is both a device and a group: rename one of the two"
    assert told in _told(devices + "scenario: [{at: 1s, leave: pi}]")


@pytest.mark.parametrize(
    ("churn", "told"),
    [
        ("{rate: 2/min, downtime: 1s, devices: slo}", "6:45: churn.devices: found 'slo'"),
        ("{rate: 2, downtime: 1s}", "6:15: churn.rate: found 2, expected a number above zero"),
        ("{rate: 0/s, downtime: 1s}", "churn.rate: found '0/s'"),
        ("{rate: 2/day, downtime: 1s}", "churn.rate: found '2/day', expected a number above zero"),
        ("{rate: 2/min}", "6:8: churn: downtime is missing; add it"),
        ("{rate: 2/min, downtime: 10}", "churn.downtime: found 10"),
        (
            "{rate: 2/min, downtime: {distribution: constant, value: 1s, mean: 1s}}",
            "downtime.mean: unknown key",
        ),
        ("{rate: 2/min, downtme: 1s, downtime: 1s}", "churn.downtme: unknown key"),
    ],
)
def test_invalid_churn_is_refused(churn: str, told: str) -> None:
    assert told in _told(f"{DEVICES}churn: {churn}\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{on: 1s}", "availability: found neither trace nor both on and off"),
        ("{on: 1s, of: 1s, off: 1s}", "availability.of: unknown key; did you mean off?"),
        ("{on: 1, off: 1s}", "availability.on: found 1, expected a duration such as 200ms, or"),
        ("{on: 1s, off: 1s, start: of}", "availability.start: found 'of'"),
        ("{on: 0s, off: 0s}", "availability: both on and off last 0 s"),
        (
            "{on: 1s, off: {distribution: pareto, scale: 1s, shape: 1}}",
            "availability.off: has no finite mean, from which",
        ),
        ("{trace: [[0s, on]], on: 1s}", "availability.on: cannot be combined with trace"),
        ("{on: 1s, off: 1s, loop: 1s}", "availability.loop: needs trace"),
        ("{trace: []}", "availability.trace: has no entry"),
        ("{trace: [[1s, on]]}", "availability.trace: begins at 1 s, expected its first time"),
        ("{trace: [[0s, on], [0s, off]]}", "availability.trace: has 0 s after 0 s"),
        ("{trace: [[0s]]}", "availability.trace[0]: found a list"),
        ("{trace: [[0s, yes]]}", "availability.trace[0][1]: found 'yes', expected on or off"),
        ("{trace: [[0s, on], [9s, off]], loop: true}", "loop: found true, expected the duration"),
        (
            "{trace: [[0s, on], [9s, off]], loop: 9s}",
            "loop: found 9 s, expected more than the last time",
        ),
        ("{trace: [[0s, on]], loop: 9s}", "loop: has nothing to repeat"),
    ],
)
def test_invalid_availability_is_refused(text: str, told: str) -> None:
    assert told in _told(f"devices: [{{name: nano, cpu: 1, availability: {text}}}]")


HOT = """
devices:
  - {name: hot, count: 2, cpu: 0.5, thermal: {after: 5min, to: 0.5}}
  - {name: cool, cpu: 0.5}
"""


def test_thermal_throttling_lowers_the_share_permanently() -> None:
    assert _read(HOT).timeline() == _steps((300, "hot-1", SetCpu(0.25)), (300, "hot-2", SetCpu(0.25)))


def test_thermal_throttling_applies_to_the_current_share() -> None:
    entries = (
        "{at: 10s, set: hot, cpu: 0.4}",
        "{at: 300s, set: hot-2, cpu: 0.2}",  # at the same time, and before the heat
        "{at: 301s, set: hot-1, cpu: 0.1}",  # stands as it is
    )
    fleet = _read(HOT + "scenario:\n" + "".join(f"  - {entry}\n" for entry in entries))
    assert fleet.timeline() == _steps(
        (10, "hot-1", SetCpu(0.4)),
        (10, "hot-2", SetCpu(0.4)),
        (300, "hot-2", SetCpu(0.2)),
        (300, "hot-1", SetCpu(0.2)),
        (300, "hot-2", SetCpu(0.1)),
        (301, "hot-1", SetCpu(0.1)),
    )


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cpu: 1, thermal: {after: 5m, to: 0.5}", "thermal.after: found '5m', expected"),
        ("cpu: 1, thermal: {after: 0s, to: 0.5}", "thermal.after: found '0s'"),
        ("cpu: 1, thermal: {after: 5s, to: 0}", "thermal.to: found 0, expected a share above 0"),
        ("cpu: 1, thermal: {after: 5s, to: 2}", "thermal.to: found 2, expected a share"),
        ("cpu: 1, thermal: {after: 5s}", "thermal: to is missing"),
        ("timing: 1s, thermal: {after: 5s, to: 0.5}", "thermal: has no effect"),
    ],
)
def test_invalid_thermal_settings_are_refused(device: str, told: str) -> None:
    assert told in _told(f"devices: [{{name: a, {device}}}]")


def test_parsed_scenario_is_written_unchanged() -> None:
    text = """
devices:
  - {name: nano, cpu: 1, availability: {on: 1min, off: {distribution: exponential, mean: 2s}}}
  - {name: pi, cpu: 1, availability: {trace: [[0s, on], [1s, off]], loop: 2s}}
scenario:
  - {at: 1s, set: [nano, pi], cpu: 0.5, link: {up: null, rtt: 5ms}}
  - {at: 0s, crash: nano, restart_after: 0s}
  - {at: 2s, pause: nano, for: 1500ms}
churn: {rate: 2/min, downtime: 10s, devices: nano}
"""
    fleet = _read(text)
    written = yamlfile.write(fleet.model_dump(mode="json", by_alias=True))
    assert _read(written) == fleet
    data = yamlfile.parse(written).data
    assert data["scenario"] == (
        {"at": "1s", "set": ("nano", "pi"), "cpu": 0.5, "link": {"up": None, "rtt": "5ms"}},
        {"at": "0s", "crash": ("nano",), "restart_after": "0s"},
        {"at": "2s", "pause": ("nano",), "for": "1500ms"},
    )
    assert data["churn"]["rate"] == "2/min"


def test_json_schema_has_the_scenario_keys() -> None:
    schema = _Fleet.model_json_schema()
    entry = schema["$defs"]["ScenarioEntry"]
    assert {"required": ["crash"]} in entry["oneOf"]
    assert entry["properties"]["for"]["description"].startswith("With pause or disconnect")
    json.dumps(schema)


def _times() -> st.SearchStrategy[str]:
    return st.integers(0, 30).map(lambda at: f"{at}s")


def _entries() -> st.SearchStrategy[dict[str, Any]]:
    targets = st.sampled_from([("a",), ("b-1",), ("b",), ("b-2", "a")])

    def entry(verb: str, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({"at": _times(), verb: targets, **more})

    lasting = st.integers(1, 9).map(lambda seconds: f"{seconds}s")
    return st.one_of(
        entry("set", cpu=st.just(0.5)),
        entry("crash"),
        entry("crash", restart_after=_times()),
        entry("pause", **{"for": lasting}),
        entry("disconnect", **{"for": lasting}),
        entry("leave"),
        entry("join"),
    )


@settings(max_examples=60)
@given(st.lists(_entries(), max_size=8), st.booleans(), st.integers(0, 99))
def test_timeline_is_ordered_and_switches_alternate(
    entries: list[dict[str, Any]], churned: bool, seed: int
) -> None:
    fleet = _Fleet.model_validate(
        {
            "devices": (
                {"name": "a", "cpu": 1, "availability": {"on": "5s", "off": "1s"}},
                {"name": "b", "cpu": 1, "count": 2},
            ),
            "scenario": tuple(entries),
            "churn": {"rate": "6/min", "downtime": "2s"} if churned else None,
        }
    )
    steps = fleet.timeline(seed, horizon=60.0)
    assert [step.at for step in steps] == sorted(step.at for step in steps)
    ends: dict[Action, Action] = {Restart(): Crash(), Resume(): Pause(), Reconnect(): Disconnect()}
    gone = set(scenario.absent_at_start(fleet.scenario, fleet.devices))
    held: set[tuple[str, Action]] = set()
    for device, action in ((step.device, step.action) for step in steps):
        if isinstance(action, SetCpu):
            continue
        if action == Join():  # after a crash for good, too
            assert device in gone or (device, Crash()) in held
            gone.discard(device)
            held = {key for key in held if key[0] != device}
            continue
        assert device not in gone
        if action == Leave():
            gone.add(device)
        elif action in ends:
            held.remove((device, ends[action]))
        else:
            assert (device, action) not in held
            held.add((device, action))
