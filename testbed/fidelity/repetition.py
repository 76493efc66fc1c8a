"""Repetition of measurements before the run clock starts, while other work disturbs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from testbed.fidelity.host_load import HostSample
from testbed.host import other_work
from testbed.host.other_work import CpuReading

PAUSES = (2.0, 5.0, 10.0)
"""Seconds before each repetition."""
_BUSY_CORES, _BUSY_SHARE = 0.1, 0.05
"""Use by others above which a host is busier than its plan, which gives them nothing: in cores of this
host, and as a share of another host's cores."""
_NAMED = 3
"""Maximum number of programs that a sentence names."""


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Work on a host that is not of the run."""

    text: str
    """Programs and their use, such as `others use 1.3 of 2 cores: python3 (1234) 0.9`."""
    is_busy: bool | None
    """True if the host is busier than its plan; None if its load is unknown."""


def on_this_host(before: CpuReading, now: CpuReading, groups: Collection[str], cores: int) -> OtherWork:
    """`groups`: names in the paths of the run's control groups. `cores`: of this host."""
    used = other_work.used_between(before, now, other_work.is_of_run(now, groups))
    return from_seconds(used, now.at - before.at, cores)


def from_seconds(used: Mapping[str, float], seconds: float, cores: int) -> OtherWork:
    """`used`: CPU seconds of programs, the largest first."""
    total = math.fsum(used.values()) / seconds
    named = [f"{name} {one / seconds:.2g}" for name, one in [*used.items()][:_NAMED]]
    who = f": {', '.join(named)}" if total > _BUSY_CORES else ""
    return OtherWork(f"others use {total:.2g} of {cores} cores{who}", total > _BUSY_CORES)


def on_another_host(host: str, sample: HostSample | None) -> OtherWork:
    """Return the other work on another host, by its counters, which do not name programs. `sample`: None
    if they have not been read twice yet."""
    if sample is None or sample.foreign is None:
        return OtherWork(f"the load of {host} is not known", None)
    share = sample.foreign + sample.steal
    return OtherWork(f"others use {share:.0%} of {host} (not known who)", share > _BUSY_SHARE)


def pause(count: int, work: Sequence[OtherWork]) -> float | None:
    """Seconds before a wrong measurement is repeated; None if it was made often enough, or no host was
    busy, so that nothing but the testbed can be the cause. `count`: measurements so far. `work`: on each
    host during the last one."""
    if count > len(PAUSES) or all(one.is_busy is False for one in work):
        return None
    return PAUSES[count - 1]
