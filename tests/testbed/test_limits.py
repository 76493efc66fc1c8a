"""Limits that the kernel enforces against those that were requested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from agents.fields import NO_LIMIT
from agents.wire.messages import CgroupLimits
from testbed.fidelity import LegClock, measure
from testbed.fidelity.figures import Requested, RequestedCpu, RequestedLimits, differences
from testbed.fidelity.validity import verdict

WANTED = RequestedLimits(quota=2500, period=10_000, shares=2500, cpus="1-2", memory=2**29)
V1 = CgroupLimits(quota=2500, period=10_000, shares=2500, cpus="1,2", memory=2**29, swap=0)
V2 = structs.replace(V1, shares=None, weight=96)
EPOCH = 1000.0


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (V1, []),
        (V2, []),
        (structs.replace(V2, weight=204), []),  # by the newer conversion
        (structs.replace(V2, swap=None), []),  # it cannot be judged
        (structs.replace(V2, memory=2**29 - 4096), []),  # whole pages
        (structs.replace(V2, swap=NO_LIMIT), ["it may swap (without limit), requested no swap"]),
        (structs.replace(V2, swap=4096), ["it may swap (4096 bytes), requested no swap"]),
        (structs.replace(V2, quota=NO_LIMIT), ["its CPU quota is none, requested 2500 of 10000 µs"]),
        (
            structs.replace(V2, quota=26_000, period=100_000),
            ["its CPU quota is 26000 of 100000 µs, requested 2500 of 10000 µs"],
        ),
        (structs.replace(V1, shares=1024), ["its CPU shares are 1024, requested 2500"]),
        (structs.replace(V2, weight=100), ["its CPU weight is 100, requested 96 or 204"]),
        (structs.replace(V1, cpus=""), ["its cores are all, requested 1-2"]),
        (structs.replace(V1, cpus="0-2"), ["its cores are 0-2, requested 1-2"]),
        (
            structs.replace(V2, memory=None),
            ["this kernel cannot limit memory, requested 536870912 bytes"],
        ),
        (
            structs.replace(V1, memory=NO_LIMIT),
            ["its memory limit is without limit, requested 536870912 bytes"],
        ),
    ],
)
def test_differences_of_limits_are_described(found: CgroupLimits, expected: list[str]) -> None:
    assert list(differences(WANTED, found)) == expected


def read(at: float, limits: CgroupLimits) -> dict[str, Any]:
    plain = {name: value for name, value in structs.asdict(limits).items() if value is not None}
    return {"device": "pi", "at": EPOCH + at, "limits": plain}


def wrong(requested: Requested, *samples: dict[str, Any]) -> tuple[str, ...]:
    return measure([requested], samples, LegClock(EPOCH, end=60.0), {}).devices[0].wrong_limits


def pi(*more: RequestedCpu, away: tuple[tuple[float, float], ...] = ()) -> Requested:
    return Requested("pi", "pi", (RequestedCpu(0.25, 0.01, limits=WANTED), *more), away=away)


HALF = replace(WANTED, quota=5000, shares=5000)
HALF_FOUND = structs.replace(V1, quota=5000, shares=5000)
SWAPS = "it may swap (without limit), requested no swap"


def test_limit_lost_during_the_run_is_a_reason() -> None:
    samples = read(-1.0, V1), read(7.0, structs.replace(V1, swap=NO_LIMIT))
    found = measure([pi()], samples, LegClock(EPOCH, end=60.0), {})
    assert found.devices[0].wrong_limits == (SWAPS,)
    assert verdict([], found).reasons == (f"the kernel has other limits for pi: {SWAPS}",)
    assert found.devices[0].as_dict()["wrong_limits"] == [SWAPS]


def test_change_without_effect_is_a_reason() -> None:
    changed = pi(RequestedCpu(0.5, 0.01, at=20.0, limits=HALF))
    assert wrong(changed, read(-1.0, V1), read(20.8, HALF_FOUND)) == ()
    assert wrong(changed, read(-1.0, V1), read(19.2, HALF_FOUND)) == ()  # the engine answered later
    assert len(wrong(changed, read(-1.0, V1), read(16.9, HALF_FOUND))) == 2
    assert wrong(changed, read(-1.0, V1)) == (
        "its CPU quota is 2500 of 10000 µs, requested 5000 of 10000 µs",
        "its CPU shares are 2500, requested 5000",
    )


def test_limits_are_not_judged_while_a_device_is_down_or_starting() -> None:
    without = structs.replace(V1, quota=NO_LIMIT, shares=2)
    restarted = pi(away=((10.0, 14.0),))
    assert wrong(restarted, read(-1.0, V1), read(12.0, without), read(14.4, V1)) == ()
    assert len(wrong(restarted, read(-1.0, V1), read(12.0, without))) == 2


def test_limits_that_were_never_read_leave_a_run_unjudged() -> None:
    found = measure([pi()], [], LegClock(EPOCH, end=60.0), {})
    assert found.devices[0].wrong_limits == ()
    assert "pi, its limits: they were never read from the kernel" in verdict([], found).unjudged


def test_swap_that_the_kernel_cannot_limit_leaves_a_run_unjudged() -> None:
    found = measure([pi()], [read(-1.0, structs.replace(V1, swap=None))], LegClock(EPOCH, end=60.0), {})
    assert found.devices[0].wrong_limits == ()
    told = "pi, its swap: this host has swap, and its kernel cannot limit it"
    assert told in verdict([], found).unjudged


def test_invalid_limit_samples_are_ignored() -> None:
    sample = {"device": "pi", "at": EPOCH + 1, "limits": {"quota": "all", "period": 1}}
    assert wrong(pi(), read(-1.0, V1), sample) == ()
