"""Hand-made samples and hand-computed figures; times are seconds, the run clock starts at 1000."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agents import events
from agents.timing.clock import in_device_time
from testbed.fidelity import LegClock, measure
from testbed.fidelity.figures import (
    Carried,
    DeviceFidelity,
    Figure,
    Interval,
    Requested,
    RequestedCpu,
    RequestedLink,
)
from testbed.fidelity.requested import trainings
from testbed.fidelity.validity import TrainingSpan
from tests.testbed import record_factories

EPOCH = 1000.0
Sample = dict[str, Any]


def usage(
    rates: Iterable[tuple[float, int, int]], at: float = 0.0, start: tuple[float, int, int] = (2.0, 5, 4)
) -> list[Sample]:
    """Samples a second apart of a device that in each second takes so much CPU (seconds), runs in so
    many periods and is throttled in so many. Its counters are at `start` when the run is at `at`."""
    counts = [start]
    for rate in rates:
        cpu, periods, throttled = (have + more for have, more in zip(counts[-1], rate, strict=True))
        counts.append((cpu, int(periods), int(throttled)))
    return [
        {
            "device": "pi",
            "at": EPOCH + at + second,
            "cpu": cpu,
            "periods": periods,
            "throttled_periods": throttled,
        }
        for second, (cpu, periods, throttled) in enumerate(counts)
    ]


def bare(rates: Iterable[float]) -> list[Sample]:
    """Samples without throttling counters, as in the process runtime."""
    samples = usage((rate, 0, 0) for rate in rates)
    return [{key: sample[key] for key in ("device", "at", "cpu")} for sample in samples]


def probe(at: float, **values: object) -> Sample:
    return {"device": "pi", "at": EPOCH + at, "probe": values}


def pi(
    samples: Iterable[Mapping[str, Any]],
    *cpu: RequestedCpu,
    link: tuple[RequestedLink, ...] = (),
    trained: Sequence[Interval] = (),
    away: tuple[Interval, ...] = (),
    clock: LegClock | None = None,
) -> DeviceFidelity:
    asked = Requested("pi", "pis", cpu or (RequestedCpu(0.25, 0.01),), link, away)
    return measure(
        [asked], samples, clock or LegClock(EPOCH), {"pi": [TrainingSpan(*one) for one in trained]}
    ).devices[0]


BUSY = (0.25, 100, 97)
"""A second of a quarter of a core in periods of 10 ms."""
IDLE = (0.02, 10, 0)


def test_cpu_share_is_measured_while_the_kernel_throttles() -> None:
    got = pi(usage([BUSY, IDLE, BUSY, IDLE, IDLE, BUSY]))
    assert got.figures["cpu"].requested == 0.25
    assert got.figures["cpu"].got == pytest.approx(0.25)
    assert got.figures["cpu"].error == pytest.approx(0.0)
    assert got.measured == pytest.approx(3.0)
    assert got.used == pytest.approx((3 * 0.25 + 3 * 0.02) / 6)


def test_unthrottled_periods_are_left_out() -> None:
    """The device ran in 40 of 100 periods of 10 ms, and used 0.09 s in these: 0.225 of a core."""
    got = pi(usage([(0.09, 40, 39)] * 10))
    assert got.figures["cpu"].got == pytest.approx(0.225)
    assert got.figures["cpu"].error == pytest.approx(-10.0)
    assert got.measured == pytest.approx(4.0)


def test_starved_device_is_detected_during_training() -> None:
    """Nobody throttles a device that gets less than its quota."""
    starved = usage([(0.1, 100, 0)] * 8)
    assert pi(starved).figures["cpu"].got is None
    got = pi(starved, trained=[(0.5, 3.0), (3.02, 6.5)])  # from 1 to 6 s all but 20 ms of one second
    assert got.figures["cpu"].got == pytest.approx(0.1)
    assert got.figures["cpu"].error == pytest.approx(-60.0)
    assert got.measured == pytest.approx(5.0)


def test_without_throttling_counters_training_times_are_used() -> None:
    samples = bare([0.25, 0.25, 0.24, 0.26, 0.01])
    got = pi(samples, trained=[(0.0, 1.5), (1.2, 2.96), (3.06, 4.0)])  # the fourth second lacks 6 %
    assert got.figures["cpu"].got == pytest.approx((0.25 + 0.25 + 0.24) / 3)
    assert got.measured == pytest.approx(3.0)
    assert pi(samples).figures["cpu"].got is None
    assert pi(samples, trained=[(math.nan, 2.0), (3.0, 1.0)]).figures["cpu"].got is None


def demanding(rates: Sequence[tuple[float, float, float]], start: float = 0.5) -> list[Sample]:
    """Samples a second apart: CPU of the device, and how long its client's thread ran and waited."""
    samples = bare(cpu for cpu, _, _ in rates)
    ran = waited = start
    for sample, (_, more, longer) in zip(samples, [(0.0, 0.0, 0.0), *rates], strict=True):
        ran, waited = ran + more, waited + longer
        sample |= {"ran": ran, "waited": waited}
    return samples


def test_device_that_often_waits_is_judged_by_its_share_when_runnable() -> None:
    got = pi(demanding([(0.1, 0.1, 0.3)] * 4))
    assert got.figures["cpu"].got is None
    assert got.demand.got == pytest.approx(0.25)
    assert got.wanted == pytest.approx(1.6)
    assert got.present == got.observed == pytest.approx(4.0)
    assert [name for name, _ in pi(demanding([(0.1, 0.1, 0.9)] * 4)).judged_figures()] == ["cpu"]
    assert list(pi(demanding([(0.1, 0.1, 0.0)] * 4)).judged_figures()) == []


def test_demand_is_at_most_the_elapsed_time() -> None:
    """Suspended while it waits for a core, a process waits twice."""
    got = pi(demanding([(0.25, 0.25, 1.1)] * 4))
    assert got.demand.got == pytest.approx(0.25)


def test_demand_is_in_device_time() -> None:
    """At dilation 4 a host of one core gives a device two cores: it ran half of the host's time."""
    sample = {"device": "pi", "at": 8.0, "cpu": 4.0, "ran": 4.0, "waited": 4.0}
    assert in_device_time(sample, 4.0) == {**sample, "at": 2.0, "ran": 1.0, "waited": 1.0}


def test_new_client_process_restarts_the_demand_counters() -> None:
    samples = demanding([(0.1, 0.1, 0.3)] * 4)
    for sample in samples[2:]:
        sample["ran"] -= 0.6
    got = pi(samples)
    assert got.wanted == pytest.approx(1.2)
    assert got.demand.got == pytest.approx(0.25)


def test_waiting_device_without_a_demand_counter_is_not_judged() -> None:
    got = pi(usage([IDLE] * 10))
    assert got.figures["cpu"] == Figure(0.25, None)
    assert got.figures["cpu"].error is None
    assert got.measured == 0.0
    assert got.used == pytest.approx(0.02)
    assert list(got.judged_figures()) == []
    assert (got.demand.got, got.wanted) == (None, None)
    assert list(got.unjudged()) == [
        "CPU: it was never busy, and this kernel does not count waiting for a CPU"
    ]
    assert list(pi(usage([BUSY] * 10)).unjudged()) == []


def test_device_without_enough_telemetry_is_not_judged() -> None:
    samples = usage([BUSY] * 4)
    assert list(pi(samples, clock=LegClock(EPOCH, end=10.0)).unjudged()) == [
        "CPU: telemetry covers only 4 of 10 s"
    ]
    assert list(pi(samples, away=((4.0, 10.0),), clock=LegClock(EPOCH, end=10.0)).unjudged()) == []
    assert list(pi([], clock=LegClock(EPOCH, end=2.0)).unjudged()) == []
    assert list(pi([], clock=LegClock(EPOCH, end=3.0)).unjudged()) == [
        "CPU: telemetry covers only 0 of 3 s"
    ]


def test_demand_is_that_of_the_phase_with_the_longest_wait() -> None:
    phases = RequestedCpu(0.25), RequestedCpu(0.5, at=4.0)
    got = pi(demanding([(0.1, 0.1, 0.3)] * 4 + [(0.2, 0.2, 0.6)] * 4), *phases)
    assert got.demand.requested == 0.5
    assert got.demand.got == pytest.approx(0.25)


def test_restart_resets_the_counters() -> None:
    before = usage([BUSY] * 3)  # to 3 s
    # Up again at 5 s without a limit, which is set when it is ready, half way to 7 s.
    after = usage([(0.9, 0, 0), (0.6, 50, 49), BUSY, BUSY], at=5.0, start=(0.1, 0, 0))
    got = pi(before + after)
    assert got.figures["cpu"].got == pytest.approx(0.25)
    assert got.measured == pytest.approx(5.0)
    assert got.used == pytest.approx((3 * 0.25 + 0.1 + 0.9 + 0.6 + 2 * 0.25) / 9)


def test_startup_in_a_surviving_container_is_not_measured() -> None:
    """The device was killed at 3 s and restarted at once, without its quota until it was ready at 5.2
    s."""
    start = [(0.8, 0, 0), (0.9, 0, 0), (0.4, 80, 80)]
    samples = usage([BUSY] * 3 + start + [BUSY] * 4)
    assert pi(samples).figures["cpu"].got == pytest.approx((7 * 0.25 + 0.4) / 7.8)
    got = pi(samples, away=((3.0, 5.2),))
    assert got.figures["cpu"].got == pytest.approx(0.25)
    assert got.measured == pytest.approx(7.0)


def test_each_requested_share_is_measured_and_the_worst_shown() -> None:
    """From 4 s on 0.125 is requested, and half a second later 0.15 is available."""
    low = (0.15, 50, 50)  # periods of 20 ms
    change = RequestedCpu(0.125, 0.02, at=4.0)
    samples = usage([BUSY] * 4 + [(0.19, 50, 50)] + [low] * 5)
    got = pi(samples, RequestedCpu(0.25, 0.01), change)
    assert got.figures["cpu"].requested == 0.125
    assert got.figures["cpu"].got == pytest.approx(0.15)
    assert got.figures["cpu"].error == pytest.approx(20.0)
    assert got.measured == pytest.approx(5.0)  # not the second in which it settled
    # What rests on less than three seconds is not the device's figure.
    got = pi(samples[:8], RequestedCpu(0.25, 0.01), change)
    assert got.figures["cpu"].requested == 0.25
    assert got.measured == pytest.approx(4.0)


def test_paused_device_is_not_measured() -> None:
    """The device was paused from 2.5 to 6 s during a training, and sent nothing."""
    samples = usage([BUSY] * 2) + usage([BUSY] * 3, at=7.0, start=(2.51, 215, 198))
    got = pi(samples, trained=[(0.5, 9.5)], away=((2.5, 6.0),))
    assert got.figures["cpu"].got == pytest.approx(0.25)
    assert got.measured == pytest.approx(5.0)
    frozen_for_ever = pi(samples, trained=[(0.5, 9.5)], away=((7.0, math.inf),))
    assert frozen_for_ever.measured == pytest.approx(7.0)


def test_only_samples_within_the_run_count() -> None:
    samples = usage([(1.0, 0, 0)] * 3 + [BUSY] * 10, at=-3.0)
    got = pi(reversed(samples), clock=LegClock(EPOCH, begin=2.0, end=8.0))
    assert got.figures["cpu"].got == pytest.approx(0.25)
    assert got.measured == pytest.approx(6.0)
    assert got.used == pytest.approx(0.25)


def test_invalid_samples_are_skipped() -> None:
    samples = usage([BUSY] * 4)
    rubbish: list[Sample] = [
        {},
        {"device": "pi", "at": EPOCH + 1},
        {"device": ["pi"], "at": EPOCH + 1, "cpu": 1.0},
        {"device": "pi", "at": True, "cpu": 1.0},
        {"device": "pi", "at": EPOCH + 1, "cpu": 10**400},
        {"device": "pi", "at": EPOCH + 1, "cpu": math.nan},
        {"device": "pi", "at": EPOCH + 1, "cpu": "much"},
        {"device": "pi", "at": EPOCH + 1, "cpu": -1.0},
        {"device": "other", "at": EPOCH + 1, "cpu": 1.0},
        samples[2],  # sent twice
        probe(1.0, up="fast", rtt=None),
    ]
    assert pi(rubbish + samples).figures == pi(samples).figures
    silent = pi([])
    assert (silent.measured, silent.used, silent.probes) == (0.0, None, 0)


def test_training_intervals_come_from_the_updates() -> None:
    """Each of 3 s, that of `pi` at 25 % of a core."""
    records: list[events.Record] = [
        record_factories.update("pi", 5.25, training=3.0),
        events.VersionMade(7.0, 1, 1),
        record_factories.update("nano", 6.25, training=3.0),
        record_factories.update("pi", 11.25, training=3.0),
    ]
    changed = (RequestedCpu(0.2, 0.01), RequestedCpu(0.1, 0.01, 4.0))
    asked = [Requested("pi", "pis", (RequestedCpu(0.25, 0.01),)), Requested("nano", "nanos", changed)]
    assert trainings(asked, records) == {
        "pi": [TrainingSpan(2.0, 5.0, 0.0375), TrainingSpan(8.0, 11.0, 0.0375)],
        "nano": [TrainingSpan(3.0, 6.0, None)],
    }


LINK = RequestedLink(up=5e6, down=20e6, delay=0.03, jitter=0.003, loss=0.1)


def test_link_figures_come_from_the_probes() -> None:
    """Delays and losses are those of both ways."""
    got = pi(
        [
            probe(1.0, up=4.75e6, down=20e6, rtt=0.066, jitter=0.002, loss=0.19),
            probe(2.0, up=1e6),  # disturbed by an update
            probe(3.0, up=5e6),
        ],
        link=(LINK,),
    )
    assert got.probes == 3
    assert got.figures["up"].got == pytest.approx(4.75e6)
    assert got.figures["up"].error == pytest.approx(-5.0)
    assert got.figures["down"].error == pytest.approx(0.0)
    assert got.figures["rtt"].requested == pytest.approx(0.06)
    assert got.figures["rtt"].error == pytest.approx(10.0)
    assert got.figures["jitter"].requested == pytest.approx(0.003 * math.sqrt(2 / 3))
    assert got.figures["loss"].error == pytest.approx(0.0)
    assert [name for name, _ in got.judged_figures()] == [
        "rtt"
    ]  # of packets that are lost the rate tells less
    same = pi([probe(1.0, up=4e6, down=2e7, rtt=0.066)], link=(replace(LINK, loss=0.0),))
    assert [name for name, _ in same.judged_figures()] == ["up", "down", "rtt"]


def test_figure_that_was_not_requested_has_no_error() -> None:
    probes = [probe(1.0, up=900e6, rtt=0.0002)]
    got = pi(probes, link=(RequestedLink(down=1e6),))
    assert got.figures["rtt"].error is None
    assert list(got.judged_figures()) == []
    assert pi(probes).figures["up"].got == 900e6
    assert pi([], link=(LINK,)).figures["up"] == Figure(5e6, None)


def test_probe_before_the_run_is_compared_with_the_initial_link() -> None:
    links = (LINK, RequestedLink(up=1e6, at=10.0))
    for first in (0.0, 2.0):
        got = pi([probe(-3.0, rtt=0.06)], link=(replace(LINK, at=first), *links[1:]))
        assert got.figures["rtt"].error == pytest.approx(0.0)
    late = pi(
        [probe(-3.0, rtt=0.06), probe(20.5, rtt=9.0)], link=(LINK,), clock=LegClock(EPOCH, end=20.0)
    )
    assert late.probes == 1
    # The clock of a resumed run continues at 60 s; the containers get what was set at 10 s when it does.
    links = (LINK, replace(LINK, up=1_000_000, at=10.0))
    got = pi([probe(57.0, up=5e6)], link=links, clock=LegClock(EPOCH, begin=60.0))
    assert got.figures["up"] == Figure(5e6, 5e6)


def test_link_change_without_effect_is_detected() -> None:
    links = (LINK, RequestedLink(up=1e6, delay=0.0295, at=10.0))
    probes = [probe(at, up=5e6, rtt=0.0605) for at in (1.0, 3.0, 5.0, 10.2, 12.0)]
    got = pi(probes, link=links)
    assert got.figures["up"].requested == 1e6
    assert got.figures["up"].error == pytest.approx(400.0)
    assert "rtt" not in dict(got.judged_figures())  # 2 ms are what a device takes to answer


def carrying(*looks: tuple[float, float, float, float]) -> list[Sample]:
    """Samples with what the uplink has carried: at, busy seconds, bytes that left, bytes allowed."""
    return [
        {
            "device": "pi",
            "at": EPOCH + at,
            "cpu": 0.0,
            "uplink": {"busy": busy, "left": left, "allowed": allowed},
        }
        for at, busy, left, allowed in looks
    ]


def test_link_is_measured_while_packets_are_queued() -> None:
    found = pi(carrying((0, 0.0, 0, 0), (1, 0.4, 380, 400), (2, 0.5, 490, 500)))
    assert found.carried == {"up": Carried(0.5, 0.98)}
    assert found.as_dict()["up_carried"] == {"asked": 1.0, "got": 0.98, "error": -2.0, "busy": 0.5}
    assert pi(carrying((0, 0.0, 0, 0), (1, 0.0, 0, 0))).carried == {"up": Carried(0.0, None)}


def test_link_slow_for_two_seconds_is_detected() -> None:
    """In the second from 1 to 2 s it carries 80 %, as it does for half of the next; then packets wait
    for part of the time alone."""
    slow = carrying(
        (0, 0, 0, 0), (1, 1, 100, 100), (2, 2, 180, 200), (3, 3, 260, 300), (4, 3.5, 270, 350)
    )
    assert pi(slow).carried["up"].slow == (1.0, 3.0, 0.8)
    short = carrying((0, 0, 0, 0), (1, 1, 100, 100), (2, 2, 180, 200), (3, 2.5, 200, 250))
    assert pi(short).carried["up"].slow is None
    stood_still = carrying((0, 0, 0, 0), (4, 0, 0, 0), (5, 5, 100, 500))
    assert pi(stood_still).carried["up"].slow == (0.0, 5.0, 0.2)
    restarted = carrying((0, 5, 500, 500), (1, 6, 500, 600), (2, 0, 0, 0), (3, 1, 0, 100))
    assert pi(restarted).carried["up"].slow is None


def test_implausible_queue_telemetry_is_ignored() -> None:
    odd: list[Any] = [{"busy": -1.0, "left": 1, "allowed": 1}, {"busy": "1"}, [], {"busy": 1.0}]
    samples = [
        {"device": "pi", "at": EPOCH + at, "cpu": 0.0, "uplink": one} for at, one in enumerate(odd)
    ]
    assert pi(samples).carried == {}
