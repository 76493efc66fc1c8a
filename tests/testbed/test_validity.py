"""What is held against a run; times are seconds of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil

from testbed.fidelity.figures import DeviceFidelity, Fidelity, Figure
from testbed.fidelity.validity import HostSample, Sampler, StepDone, Validity, verdict


def host(
    seconds: int = 30,
    *,
    server: Sequence[float] = (),
    devices: float = 0.5,
    steal: float = 0.0,
    late: Sequence[float] = (),
) -> list[HostSample]:
    """A sample for each second; `server` and `late` are those of the first ones."""
    busy = [*server, *[0.3] * (seconds - len(server))]
    lateness = [*late, *[0.001] * (seconds - len(late))]
    return [HostSample(at + 1.0, 1.0, busy[at], devices, steal, lateness[at]) for at in range(seconds)]


def device(name: str = "pi", measured: float = 20.0, **figures: Figure) -> DeviceFidelity:
    every = dict.fromkeys(("cpu", "up", "down", "rtt", "jitter", "loss"), Figure()) | figures
    return DeviceFidelity(name, "pis", every, measured, 0.2, 1)


def reason(found: Validity) -> str:
    assert not found.valid
    (only,) = found.reasons
    return only


def test_a_run_that_nothing_speaks_against_is_valid() -> None:
    assert verdict([]) == Validity(valid=True)
    fidelity = Fidelity((device(cpu=Figure(0.25, 0.24), up=Figure(5e6, 4.8e6)),))
    found = verdict(host(devices=1.0), fidelity, [StepDone("crash of pi", 20.0, 20.1)])
    assert found.as_dict() == {"valid": True, "reasons": []}


def test_what_could_not_be_done_speaks_against_a_run() -> None:
    failures = ["pi could not do as it was told: no tbf", "router could not do as it was told: no queue"]
    assert reason(verdict(host(), failures=failures[:1])) == failures[0]
    assert reason(verdict(host(), failures=failures)) == f"{failures[0]} (and 1 more)"


def test_a_server_without_cpu_to_spare_makes_updates_wait() -> None:
    assert verdict(host(server=[1.0] * 5)).valid  # evaluations
    assert verdict(host(4, server=[1.0] * 2)).valid  # the end of a short run
    assert verdict(host(server=[0.9] * 30)).valid
    assert reason(verdict(host(server=[0.95, 0.97, 0.99] * 4))) == (
        "the aggregator's and broker's cores were 97% busy for 12 of 30 s: updates may have waited for "
        "the server"
    )


def test_time_that_the_hypervisor_took() -> None:
    assert verdict(host(steal=0.04)).valid
    assert reason(verdict(host(steal=0.07))) == (
        "the hypervisor took 7% of this machine's CPU time: devices were slower than their shares say"
    )


def test_timers_that_come_late() -> None:
    assert verdict(host(late=[1.5])).valid  # a hiccup
    assert reason(verdict(host(late=[0.1, 0.3, 0.45]))) == (
        "timers came up to 0.45 s late, in 2 of 30 s: the host could not keep up"
    )
    assert reason(verdict(host(late=[0.1, 0.3, 6.0]))) == (
        "this host stood still for 6.0 s at 3 s, while the run's clock went on"
    )


def test_devices_that_got_another_share_than_asked() -> None:
    assert verdict([], Fidelity((device(cpu=Figure(0.25, 0.226)),))).valid
    assert verdict([], Fidelity((device(measured=2.0, cpu=Figure(0.25, 0.1)),))).valid
    assert verdict([], Fidelity((device(cpu=Figure(0.25, None)),))).valid
    starved = device("pi-1", cpu=Figure(0.25, 0.2))
    assert reason(verdict(host(devices=0.99), Fidelity((starved, device("pi-2"))))) == (
        "pi-1 got 0.2 of a core where 0.25 was asked, 20.0% less; the devices' cores were full for "
        "30 of 30 s"
    )
    unlimited = device("pi-2", cpu=Figure(0.25, 1.0))
    assert reason(verdict(host(devices=0.99), Fidelity((starved, unlimited)))) == (
        "pi-2 got 1 of a core where 0.25 was asked, 300.0% more (and 1 more)"
    )


def test_links_that_were_not_as_asked() -> None:
    near = device("near", up=Figure(5e6, 4.6e6), rtt=Figure(0.01, 0.0119), loss=Figure(0.01, 0.0))
    assert verdict([], Fidelity((near,))).valid
    far = device("far", down=Figure(5e6, 4e6), rtt=Figure(0.06, 0.078))
    assert reason(verdict([], Fidelity((near, far)))) == (
        "the round trip of far was 30.0% more than asked"
    )


def test_steps_of_the_scenario_that_came_late() -> None:
    steps = [
        StepDone("set of pi-1", 20.0, 20.75),
        StepDone("crash of pi-2", 30.5, 32.0),
        StepDone("restart of pi-2", 40.0, 40.25),
    ]
    assert reason(verdict([], None, steps)) == (
        "the scenario's step at 30.5 s (crash of pi-2) came 1.5 s late (and 1 more)"
    )


def test_every_reason_is_told() -> None:
    off = Fidelity((device(cpu=Figure(0.25, 0.2), up=Figure(1e6, 2e6)),))
    found = verdict(host(server=[1.0] * 30, steal=0.5), off, [StepDone("join of pi", 1.0, 9.0)])
    assert len(found.reasons) == 5


class Times(NamedTuple):
    """One CPU's counters, as psutil has them on Linux."""

    user: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0
    nice: float = 0.0


def test_the_sampler_tells_what_happened_since_the_last_look() -> None:
    first = [Times(10.0, 5.0, 100.0), Times(user=50.0), Times(), Times()]
    second = [
        Times(10.25, 5.25, 100.125, 0.25, nice=0.125),  # half of it busy: the rest gives way
        Times(user=50.125, idle=0.5, steal=0.25, nice=0.125),  # to devices that is load
        Times(user=1.0, guest=1.0),
        Times(user=9.0),  # nobody's
    ]
    third = [second[0], second[1]._replace(idle=0.4), Times(user=2.0, guest=2.0), Times()]
    looks: list[list[Any]] = [first, second, third]
    sampler = Sampler({0, 7}, {1, 2}, lambda: looks.pop(0))  # CPU 7 is offline
    assert sampler.sample(at=1.0, tick_lateness=0.5) is None
    assert sampler.sample(at=2.0, tick_lateness=0.01) == HostSample(
        at=2.0,
        seconds=1.0,
        infrastructure_busy=0.5,
        device_busy=0.75,
        steal=0.25 / 3,
        tick_lateness=0.01,
    )
    again = sampler.sample(at=2.5, tick_lateness=0.0)
    assert again is not None
    assert (again.seconds, again.infrastructure_busy, again.device_busy) == (0.5, 0.0, 1.0)


def test_the_sampler_reads_this_host() -> None:
    sampler = Sampler({0}, set(range(psutil.cpu_count() or 1)))
    sampler.sample(0.0, 0.0)
    found = sampler.sample(1.0, 0.0)
    assert found is not None
    assert all(
        0.0 <= load <= 1.0 for load in (found.infrastructure_busy, found.device_busy, found.steal)
    )
