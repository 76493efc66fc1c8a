"""Reasons against a run's validity; times are seconds of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from agents.events import Disrupted, WrongSum
from testbed.fidelity import host_load
from testbed.fidelity import table as fidelity_table
from testbed.fidelity.figures import Carried, DeviceFidelity, Fidelity, Figure
from testbed.fidelity.host_load import FreeCores, HostSample, Sampler, cpu_times, summary
from testbed.fidelity.validity import StepDone, TrainingSpan, Validity, verdict


def host(
    seconds: int = 30,
    *,
    server: Sequence[float] = (),
    foreign: float = 0.0,
    elsewhere: float = 0.0,
    devices: float = 0.5,
    steal: float = 0.0,
    late: Sequence[float] = (),
) -> list[HostSample]:
    """A sample for each second; `server` and `late` are those of the first ones."""
    busy = [*server, *[0.3] * (seconds - len(server))]
    lateness = [*late, *[0.001] * (seconds - len(late))]
    return [
        HostSample(
            at=at + 1.0,
            seconds=1.0,
            server_load=busy[at],
            foreign=foreign,
            elsewhere=elsewhere,
            device_busy=devices,
            steal=steal,
            tick_lateness=lateness[at],
        )
        for at in range(seconds)
    ]


QUIET = host()
NOTHING = Fidelity(())


def device(
    name: str = "pi",
    measured: float = 20.0,
    demand: Figure = Figure(0.25, 0.26),  # noqa: B008
    wanted: float | None = 20.0,
    observed: float = 30.0,
    round_trips: int = 500,
    **figures: Figure,
) -> DeviceFidelity:
    every = dict.fromkeys(("cpu", "up", "down", "rtt", "jitter", "loss"), Figure()) | figures
    return DeviceFidelity(
        name,
        "pis",
        every,
        measured=measured,
        demand=demand,
        wanted=wanted,
        present=30.0,
        observed=observed,
        used=0.2,
        probes=1,
        round_trips=round_trips,
    )


def judged(*devices: DeviceFidelity) -> Validity:
    return verdict(QUIET, Fidelity(devices))


def reason(found: Validity) -> str:
    assert found.verdict == "not valid"
    (only,) = found.reasons
    return only


def test_undisturbed_run_is_valid() -> None:
    assert verdict(QUIET, NOTHING) == Validity()
    fidelity = Fidelity((device(cpu=Figure(0.25, 0.24), up=Figure(5e6, 4.8e6)),))
    found = verdict(host(devices=1.0), fidelity, steps=[StepDone("crash of pi", 20.0, 20.1)])
    assert found.as_dict() == {"valid": True, "reasons": [], "unjudged": []}
    assert Validity.from_dict(found.as_dict()) == found


def test_resumed_run_is_judged_as_a_whole() -> None:
    """A last leg in which all was well does not make good what came before, and none that ended
    without a verdict is called valid."""
    busy = Validity(reasons=("other work",), unjudged=("links",))
    assert Validity().after(busy) == busy
    assert busy.after(busy) == busy
    assert Validity().after(Validity()).valid is True
    lost = Validity().after(Validity(), without=2)
    assert lost.unjudged == ("2 earlier legs of the run: ended without a verdict",)
    assert lost.valid is None


def test_lack_of_evidence_is_not_valid() -> None:
    assert verdict([], NOTHING) == Validity(
        (), ("the load of this host: it was sampled for 0.0 s, which is too short",)
    )
    unseen = [replace(one, server_load=None, foreign=None, elsewhere=None) for one in QUIET]
    assert verdict(unseen, NOTHING).unjudged == (
        "other work, and waiting servers: the run's processes cannot be seen from this host",
    )
    silent = [device(f"pi-{n}", observed=5.0) for n in (1, 2)]
    assert judged(*silent).unjudged == ("pi-1, CPU: telemetry covers only 5 of 30 s (and 1 more)",)
    uncounted = device(cpu=Figure(0.25), measured=0.0, wanted=None)
    assert judged(uncounted).unjudged == (
        "pi, CPU: it was never busy, and this kernel does not count waiting for a CPU",
    )
    unprobed = replace(device(up=Figure(5e6)), probes=0)
    assert judged(unprobed).unjudged == ("pi, its link: it was never measured",)
    found = verdict([], Fidelity((device(cpu=Figure(0.25, 0.1)),)))
    assert found.valid is False
    assert (judged(unprobed).valid, judged(unprobed).verdict) == (None, "not judged")


def test_failed_actions_make_a_run_not_valid() -> None:
    failures = [
        "pi could not carry out an order: no tbf",
        "router could not carry out an order: none",
    ]
    assert reason(verdict(QUIET, NOTHING, failures=failures[:1])) == failures[0]
    assert reason(verdict(QUIET, NOTHING, failures=failures)) == f"{failures[0]} (and 1 more)"


def test_wrong_masked_sum_makes_a_run_not_valid() -> None:
    wrong = [WrongSum(4.26, ("a", "b"), ("b", "c", "d")), WrongSum(9.0, ("a", "b"), ("a", "c", "d"))]
    told = "a sum of masked updates was wrong at 4.3 s (updates of a, b; answers of b, c, d)"
    assert reason(verdict(QUIET, NOTHING, wrong_sums=wrong[:1])) == told
    assert reason(verdict(QUIET, NOTHING, wrong_sums=wrong)) == f"{told} (and 1 more)"


def test_disruption_makes_a_run_not_valid() -> None:
    """A disruption recorded again at its end counts once; the longest is named."""
    first, over = (Disrupted(at, 12.0, "nothing arrived") for at in (22.0, 34.06))
    found = verdict(QUIET, NOTHING, disruptions=[first, over, Disrupted(60.0, 50.0, "nothing arrived")])
    assert reason(found) == "nothing arrived from 12.0 to 34.1 s (and 1 more)"


def test_simultaneous_standstills_are_one_reason() -> None:
    stood = "the aggregator stood still"
    noticed = [Disrupted(5.0, 2.0, stood), Disrupted(7.1, 1.6, stood), Disrupted(7.0, 2.0, stood)]
    assert reason(verdict(QUIET, NOTHING, disruptions=noticed)) == f"{stood} from 1.6 to 7.1 s"


def test_disruption_whose_end_was_not_seen_has_no_duration() -> None:
    altered = "the rate of the uplink of pi was altered from outside"
    found = verdict(QUIET, NOTHING, disruptions=[Disrupted(5.4, 5.4, altered)])
    assert reason(found) == f"{altered} at 5.4 s"


def test_link_below_its_rate_makes_a_run_not_valid() -> None:
    slow = Carried(10.0, 0.95, (12.0, 14.1, 0.31))
    found = verdict(QUIET, Fidelity((replace(device(), carried={"down": slow}),)))
    assert reason(found) == (
        "the downlink of pi carried 31% of its rate from 12 to 14 s, while packets waited"
    )
    assert verdict(QUIET, Fidelity((replace(device(), carried={"down": Carried(10.0, 0.95)}),))).valid


def test_saturated_server_makes_a_run_not_valid() -> None:
    assert verdict(host(server=[1.0] * 5), NOTHING).valid  # evaluations
    assert verdict(host(4, server=[1.0] * 2), NOTHING).valid  # the end of a short run
    assert verdict(host(server=[0.9] * 30), NOTHING).valid
    assert reason(verdict(host(server=[0.95, 0.97, 0.99] * 4), NOTHING)) == (
        "aggregator, broker or router ran or waited for a CPU without a pause for 12 of 30 s: updates "
        "waited for the server"
    )


def test_other_work_on_other_cores_leaves_a_run_unjudged() -> None:
    assert verdict(host(elsewhere=0.15), NOTHING).valid
    found = verdict(host(elsewhere=0.3), NOTHING)
    assert found.valid is None
    assert found.unjudged == (
        "the cost of steps: other work took 30% of this host's CPU time, and may have slowed down "
        "caches and memory",
    )


def test_other_work_on_device_cores_makes_a_run_not_valid() -> None:
    assert verdict(host(foreign=0.11), NOTHING).valid
    assert reason(verdict(host(foreign=0.16), NOTHING)) == (
        "other work on this host took 16% of the devices' cores: a training step may have cost more "
        "than on a quiet host"
    )


def test_stolen_time_makes_a_run_not_valid() -> None:
    assert verdict(host(steal=0.04), NOTHING).valid
    assert reason(verdict(host(steal=0.07), NOTHING)) == (
        "the hypervisor took 7% of this machine's CPU time: devices were slower than their shares say"
    )


def test_late_timers_make_a_run_not_valid() -> None:
    assert verdict(host(late=[1.5]), NOTHING).valid  # a hiccup
    assert reason(verdict(host(late=[0.1, 0.3, 0.45]), NOTHING)) == (
        "timers were up to 0.45 s late, in 2 of 30 s: the host was too slow"
    )
    assert reason(verdict(host(late=[0.1, 0.3, 6.0]), NOTHING)) == (
        "this host stood still for 6.0 s at 3 s, while the run clock continued"
    )


def test_wrong_cpu_share_makes_a_run_not_valid() -> None:
    assert judged(device(cpu=Figure(0.25, 0.226))).valid
    assert judged(device(measured=2.0, cpu=Figure(0.25, 0.1))).valid
    assert judged(device(cpu=Figure(0.25, None))).valid
    starved = device("pi-1", cpu=Figure(0.25, 0.2))
    assert reason(verdict(host(devices=0.99), Fidelity((starved, device("pi-2"))))) == (
        "pi-1 got 0.2 of a core, 20.0% less than the requested 0.25; the devices' cores were full for "
        "30 of 30 s"
    )
    unlimited = device("pi-2", cpu=Figure(0.25, 1.0))
    assert reason(verdict(host(devices=0.99), Fidelity((starved, unlimited)))) == (
        "pi-2 got 1 of a core, 300.0% more than the requested 0.25 (and 1 more)"
    )


def test_devices_waiting_for_a_core_make_a_run_not_valid() -> None:
    assert judged(device(demand=Figure(0.25, 0.226))).valid
    assert judged(device(demand=Figure(0.25, 0.9))).valid  # short bursts fit into the quota
    assert judged(device(demand=Figure(0.25, 0.1), wanted=0.4)).valid
    never_busy = device(cpu=Figure(0.25), demand=Figure(0.25, 0.0025), measured=0.0)
    assert reason(judged(never_busy)) == "pi got 0.0025 of a core, 99.0% less than the requested 0.25"


def test_wrong_link_makes_a_run_not_valid() -> None:
    near = device("near", up=Figure(5e6, 4.6e6), rtt=Figure(0.01, 0.0119), loss=Figure(0.01, 0.0))
    assert judged(near).valid
    far = device("far", down=Figure(5e6, 4e6), rtt=Figure(0.06, 0.078))
    assert reason(judged(near, far)) == "the round trip of far was 30.0% more than requested"


def test_unrequested_loss_or_delay_makes_a_run_not_valid() -> None:
    assert judged(device(up=Figure(256e3), loss=Figure(None, 0.02), rtt=Figure(None, 0.013))).valid
    assert judged(device(loss=Figure(None, 0.2), round_trips=5)).valid  # one of five
    assert judged(device(loss=Figure(0.19, 0.25), round_trips=500)).valid
    lossy = [device("a", loss=Figure(None, 0.41)), device("b", loss=Figure(0.1, 0.57))]
    assert reason(judged(lossy[0])) == "a lost 41.0% of its round trips, but no loss was requested"
    assert reason(judged(*lossy)) == (
        "b lost 57.0% of its round trips, but 10.0% was requested (and 1 more)"
    )
    assert not judged(device(loss=Figure(0.19, 0.0))).valid
    slow = device(up=Figure(1e6), rtt=Figure(None, 0.25))
    assert reason(judged(slow)) == "round trips of pi took 250 ms, but no delay was requested"


def test_uncertain_clock_of_another_host_makes_a_run_not_valid() -> None:
    slow = device(rtt=Figure(0.04, 0.04))
    near = Fidelity((slow,), {"b": 0.0009, "c": 0.0001})
    assert verdict(QUIET, near).valid
    assert near.as_dict()["clocks"] == {"b": {"uncertainty": 0.0009}, "c": {"uncertainty": 0.0001}}
    assert fidelity_table.summary(near).endswith("clocks: within 0.9 ms of this host's (b)")
    far = verdict(QUIET, Fidelity((slow,), {"b": 0.0011, "c": 0.0012}))
    assert reason(far).startswith(
        "times of c may be off by 1.2 ms, at most 1 ms is allowed (and 1 more)"
    )
    quick = device(rtt=Figure(0.004, 0.004))
    found = verdict(QUIET, Fidelity((slow, quick), {"b": 0.0003}))
    assert reason(found).startswith("times of b may be off by 0.3 ms, at most 0.2 ms is allowed")
    unknown = Fidelity((slow,), {"b": math.inf})
    assert not verdict(QUIET, unknown).valid
    assert unknown.as_dict()["clocks"] == {"b": {"uncertainty": None}}


def trained(times: Sequence[float]) -> list[TrainingSpan]:
    """One training after the other, each with its seconds per step."""
    return [TrainingSpan(1.0 * at, at + 0.9, pace) for at, pace in enumerate(times)]


def test_slower_trainings_within_a_run_make_it_not_valid() -> None:
    def found(*trainings: list[TrainingSpan]) -> Validity:
        return verdict(QUIET, NOTHING, trainings=trainings)

    assert found().valid
    assert found(trained([1.0, 1.1, 0.9, 1.2] * 10), trained([7.0] * 40)).valid
    assert found(trained([1.0] * 20 + [5.0] * 3 + [1.0] * 17)).valid  # a hiccup
    assert found(trained([1.0] * 6 + [2.7] * 6)).valid  # too few to tell
    assert reason(found(trained([1.0] * 20 + [2.7] * 20))) == (
        "trainings took 0.37 times as long from 0 to 10 s as in the rest of the run: something "
        "disturbed the devices"
    )
    short = [TrainingSpan(at / 40, (at + 0.9) / 40, 1.0 + at // 30) for at in range(40)]
    assert reason(found(short)).startswith("trainings took 2 times as long from 0.74 to 0.99 s as in ")
    assert reason(found(trained([1.0] * 30 + [1.5] * 10))) == (
        "trainings took 1.5 times as long from 30 to 39 s as in the rest of the run: something "
        "disturbed the devices"
    )


def test_late_scenario_steps_make_a_run_not_valid() -> None:
    steps = [
        StepDone("set of pi-1", 20.0, 20.75),
        StepDone("crash of pi-2", 30.5, 32.0),
        StepDone("restart of pi-2", 40.0, 40.25),
    ]
    assert reason(verdict(QUIET, NOTHING, steps=steps)) == (
        "the scenario's step at 30.5 s (crash of pi-2) was 1.5 s late (and 1 more)"
    )


def test_every_reason_is_listed() -> None:
    off = Fidelity((device(cpu=Figure(0.25, 0.2), up=Figure(1e6, 2e6)),))
    samples = host(server=[1.0] * 30, steal=0.5)
    found = verdict(samples, off, steps=[StepDone("join of pi", 1.0, 9.0)])
    assert len(found.reasons) == 5


def test_load_on_other_hosts_is_reported_by_host() -> None:
    others = {"b": host(foreign=0.4), "c": host(), "d": host(seconds=2)}
    found = verdict(QUIET, NOTHING, others=others)
    assert reason(found).startswith("b: other work on this host took 40% of the devices' cores")
    assert found.unjudged == ("d: its load was sampled for 2.0 s: too short",)
    assert verdict(QUIET, NOTHING, others={"c": host()}).valid


def test_kernel_cpu_counters_are_parsed() -> None:
    stat = "cpu  3 3 3 3 3 3 3 3 0 0\ncpu0 100 0 50 1000 25 0 0 10 0 0\ncpu1 1 2 3 4 5 6 7 8 9 10\n"
    assert [*cpu_times(stat.replace("cpu1", "cpu6"))] == [0, 6]  # the others are offline
    first, second = cpu_times(stat).values()
    assert (first.user, first.system, first.idle, first.steal) == (1.0, 0.5, 10.0, 0.1)
    assert second.steal == 0.08


class Times(NamedTuple):
    """One CPU's counters, as psutil has them on Linux."""

    user: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0
    nice: float = 0.0


def test_sampler_returns_differences_since_the_last_sample() -> None:
    first = [Times(10.0, 5.0, 100.0), Times(user=50.0), Times(), Times()]
    second = [
        Times(10.25, 5.25, 100.125, 0.25, nice=0.125),  # half of it busy: the rest gives way
        Times(user=50.125, idle=0.5, steal=0.25, nice=0.125),  # to devices that is load
        Times(user=1.0, guest=1.0),
        Times(user=9.0),  # nobody's
    ]
    third = [second[0], second[1]._replace(idle=0.4), Times(user=2.0, guest=2.0), Times()]
    looks: list[list[Any]] = [first, second, third]
    used = iter([5.0, 5.5, 9.0])
    numbers = (0, 2, 4, 6)  # the others are offline
    sampler = Sampler(
        {0, 2, 4},
        {2, 4},
        own=lambda: next(used),
        read=lambda: dict(zip(numbers, looks.pop(0), strict=True)),
    )
    assert sampler.sample(at=1.0, tick_lateness=0.5) is None
    found = sampler.sample(at=2.0, tick_lateness=0.01)
    assert found is not None
    assert found.elsewhere == pytest.approx(10.375 / 12, abs=0.001)  # this process used next to nothing
    assert found == HostSample(
        at=2.0,
        seconds=1.0,
        server_load=None,
        foreign=0.375,  # of 2 s, 0.25 were stolen, 0.5 idle, and 0.5 the devices'
        elsewhere=found.elsewhere,
        device_busy=0.75,
        steal=0.25 / 3,
        tick_lateness=0.01,
    )
    again = sampler.sample(at=2.5, tick_lateness=0.0)
    assert again is not None
    # The kernel's counters stepped back: how much of that was whose is unknown.
    assert (again.seconds, again.foreign, again.device_busy) == (0.5, None, 1.0)


def test_lagging_kernel_counters_do_not_count_as_stolen_time() -> None:
    """Idle time is counted late: 2 % of a CPU, and in the first sample 2 of 7 counted hundredths."""
    looks = iter([Times(), Times(user=0.05, steal=0.02), Times(user=0.1, steal=0.04, idle=1.86)])
    sampler = Sampler({0}, {0}, own=lambda: 0.0, read=lambda: {0: next(looks)})
    found = [sampler.sample(float(at), 0.0) for at in range(3)]
    assert [one.steal for one in found if one is not None] == pytest.approx([0.02, 0.01], abs=0.001)


@pytest.mark.parametrize(("devices", "other"), [({0}, 0.0), ({1}, 0.1)])
def test_own_servers_on_a_single_core_are_no_other_work(devices: set[int], other: float) -> None:
    """This process is the controller. With a core of its own, that of the devices is for them alone."""
    idle = iter([0.0, 0.0, 0.9, 0.9])

    def read() -> dict[int, Times]:
        return {cpu: Times(user=time.process_time(), idle=next(idle)) for cpu in (0, 1)}

    sampler = Sampler({0} | devices, devices, own=lambda: 0.0, read=read)
    sampler.sample(0.0, 0.0)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    found = sampler.sample(1.0, 0.0)
    assert found is not None
    assert found.foreign == pytest.approx(other, abs=0.02)


@pytest.mark.parametrize("later", [(0, 1), (0, 1, 7)])
def test_other_work_is_unknown_if_a_cpu_has_no_counter(later: tuple[int, ...]) -> None:
    """CPU 7 is offline, at least at first, or has another number in this container."""
    looks = [{0: Times(), 1: Times()}, {number: Times(user=0.5, idle=0.5) for number in later}]
    sampler = Sampler({0, 1, 7}, {1}, own=lambda: 0.0, read=lambda: looks.pop(0))
    sampler.sample(0.0, 0.0)
    found = sampler.sample(1.0, 0.0)
    assert found is not None
    assert (found.foreign, found.elsewhere) == (None, None)
    assert verdict([replace(one, foreign=None) for one in QUIET], NOTHING).unjudged == (
        "other work: the kernel's counters do not show which processes used the devices' cores",
    )


@pytest.mark.parametrize("nice", [0, 5])
def test_server_load_is_its_busiest_thread_without_evaluations(nice: int, tmp_path: Path) -> None:
    """This holds for a run started with `nice` too."""

    def thread(number: int, priority: int, ran: float, waited: float) -> None:
        folder = tmp_path / "10" / "task" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        fields = " ".join(["0"] * 15)
        (folder / "stat").write_text(f"{number} (python (3)) S {fields} {priority} 1\n")
        (folder / "schedstat").write_text(f"{int(ran * 1e9)} {int(waited * 1e9)} 7\n")

    thread(1, nice, 1.0, 2.0)
    thread(2, 19, 0.0, 0.0)
    sampler = Sampler({0}, {0}, lambda: [10, 11], proc=tmp_path, dilation=2.0)  # 11 has ended
    sampler.sample(0.0, 0.0)
    thread(1, nice, 1.25, 2.25)
    thread(2, 19, 1.0, 0.0)
    found = sampler.sample(0.5, 0.0)
    assert found is not None
    assert found.server_load == 0.5


@pytest.mark.parametrize(
    ("busy", "stolen", "expected"),
    [
        (0.02, 0.0, "Quiet host: other work uses 2% of the run's 2 cores"),
        (
            0.1,
            0.03,
            "Not quite quiet: other work uses 10% of the run's 2 cores, the hypervisor takes 3%. The "
            "run may not be valid",
        ),
        (
            0.5,
            0.0,
            "Busy host: other work uses 50% of the run's 2 cores. The run will probably not be valid: "
            "wait until other work is done",
        ),
    ],
)
def test_expected_verdict_for_a_host(
    busy: float, stolen: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = (
        [Times(user=busy * n, steal=stolen * n, idle=(1 - busy - stolen) * n)] * 2 for n in range(3)
    )
    monkeypatch.setattr(host_load, "_counters", lambda: dict(enumerate(next(looks))))
    monkeypatch.setattr(FreeCores, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(FreeCores, "SECONDS", 0.02)
    monkeypatch.setattr(FreeCores, "LONGEST", 0.03)
    monkeypatch.setattr("time.process_time", lambda: 7.0)
    assert FreeCores({0, 1}).expectation() == expected


def test_expectation_is_reported_after_a_long_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = (dict(enumerate([Times(user=0.5 * n, idle=0.5 * n)] * 2)) for n in (0, 6, 6, 6))
    monkeypatch.setattr(host_load, "_counters", lambda: next(looks))
    free = FreeCores({0, 1})
    monkeypatch.setattr(free, "_begin", time.monotonic() - 6)
    assert free.expectation().startswith("Busy host: other work uses 50% of the run's 2 cores")


def test_host_with_an_uncounted_core_is_not_called_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = ({0: Times(idle=float(n)), 2: Times(idle=float(n))} for n in range(4))
    monkeypatch.setattr(host_load, "_counters", lambda: next(looks))
    for name in ("QUIET_SECONDS", "SECONDS", "LONGEST"):
        monkeypatch.setattr(FreeCores, name, 0.01)
    expected = "The load of this host is unknown: the kernel's counters do not show it"
    assert FreeCores({1, 2}).expectation() == expected


def test_load_is_summarised() -> None:
    (first,) = host(1, server=[0.5], devices=1.0, late=[0.25])
    samples = [replace(first, foreign=None), *host(2)]
    assert summary(samples) == {
        "server_load": 0.3667,
        "foreign": 0.0,
        "elsewhere": 0.0,
        "device_busy": 0.6667,
        "steal": 0.0,
        "tick_lateness": 0.25,
    }
    assert summary([])["foreign"] is None


def test_sampler_reads_this_host() -> None:
    sampler = Sampler({0}, set(range(psutil.cpu_count() or 1)))
    sampler.sample(0.0, 0.0)
    found = sampler.sample(1.0, 0.0)
    assert found is not None
    assert all(0.0 <= load <= 1.0 for load in (found.device_busy, found.steal))
