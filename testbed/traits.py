"""The runtimes and what each of them can do: one row each. Code asks for a trait, never for a name.

To add a runtime: a module (`testbed.runtimes.Emulator` says with what in it) and a row in RUNTIMES. The
table imports nothing of the runtimes, so that topology and plan can read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from testbed.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    module: str
    """Name of the module: a `testbed.runtimes.Emulator`, or a `testbed.runtimes.Simulator`."""
    simulated: bool = False
    """Whether the clock is simulated: nothing of the host is dealt out, limited, measured or judged."""
    cgroups: bool = False
    """Whether the kernel's control groups limit the CPU: by a quota per period, which has a least."""
    images: bool = False
    """Whether the agents run in images of ours, and not with the packages of this host."""
    gpus: bool = False
    """Whether a device can have a GPU of the host, or a fraction of one."""
    lossless: str = ""
    """Why no link can lose packets, as in `whose links are TCP relays`; empty: links can."""
    shaper: str | None = None
    """What makes the links; None: netem or the router, as `testbed.plan.shaper` chooses."""
    shaper_why: str = ""
    """Why that one."""
    many_hosts: bool = False
    """Whether devices are on several machines, of which this one is one."""
    devices_probe: bool = False
    """Whether each device measures its own link, and the run clock waits for that."""
    counts_bytes: Literal["always", "linked", "never"] = "never"
    """Whether telemetry has the bytes that devices send and receive: `linked`, where they have links."""
    unresumable: str = ""
    """Why an interrupted run cannot go on, and what to do instead; empty: it can."""
    lack: str = ""
    """What is the matter where it is not available."""
    notice: str = ""
    """What is said before a run."""


RUNTIMES: dict[str, Traits] = {
    "docker": Traits(
        module="testbed.runtimes.docker.runtime",
        cgroups=True,
        images=True,
        gpus=True,
        devices_probe=True,
        counts_bytes="always",
        lack="no Docker engine that can run devices answers",
    ),
    "swarm": Traits(
        module="testbed.runtimes.swarm.runtime",
        cgroups=True,
        images=True,
        many_hosts=True,
        devices_probe=True,
        counts_bytes="always",
        lack="this machine's engine manages no Swarm, or does not answer",
    ),
    "process": Traits(
        module="testbed.runtimes.process.runtime",
        lossless="whose links are TCP relays",
        shaper="relay",
        shaper_why="processes have no network of their own",
        counts_bytes="linked",
        notice="devices are local processes. They are stopped and continued to keep their CPU shares, "
        "and a relay makes their links; memory is not limited",
    ),
    "virtual": Traits(
        module="testbed.virtual.run",
        simulated=True,
        shaper="model",
        unresumable="its seed gives it again from the start",
    ),
}
"""By name; `auto` takes the first that is available, of those with a real clock on this host alone."""


def traits(name: str) -> Traits:
    """Of the runtime of that name. Raises BadInputError where there is none."""
    if name not in RUNTIMES:
        raise BadInputError(f"no runtime is called {name!r}, expected {runtime_names()}")
    return RUNTIMES[name]


def is_simulated(name: Any) -> bool:
    """Whether `name`, from a manifest that may have none yet, is a runtime with a simulated clock."""
    return name in RUNTIMES and RUNTIMES[name].simulated


def refuse_simulated(name: str | None) -> None:
    """Raise BadInputError where a command that needs a runtime with a real clock is given another."""
    if is_simulated(name):
        raise BadInputError(
            f"--runtime {name}: expected auto, {runtime_names(lambda t: not t.simulated)}"
        )


def emulated_runtime_names() -> list[str]:
    """Names of the runtimes with a real clock: first those with many hosts, of whose runs a part is on
    this one, where another runtime would find it and take it for all."""
    names = [name for name, found in RUNTIMES.items() if not found.simulated]
    return sorted(names, key=lambda name: not RUNTIMES[name].many_hosts)


def runtime_names(which: Callable[[Traits], bool] = lambda _: True) -> str:
    """Names of all that are `which`, as in `process or virtual`."""
    *others, last = [name for name, found in RUNTIMES.items() if which(found)]
    return f"{', '.join(others)} or {last}" if others else last
