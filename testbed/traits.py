"""Table of the runtimes and their abilities. Code asks for a trait, never for a runtime's name.

To add a runtime, write a module that implements `testbed.runtimes.Emulator`, and add a row to RUNTIMES.
The table does not import the runtimes, so that `testbed.topology` and `testbed.plan` can import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from testbed.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    module: str
    """Dotted name. The module implements `Emulator` or `Simulator` of `testbed.runtimes`."""
    simulated: bool = False
    """If the clock is simulated, no resources of the host are assigned, limited or measured, and runs
    get no verdict."""
    cgroups: bool = False
    """Whether control groups limit the CPU of devices, by a quota per period. The quota has a
    minimum."""
    images: bool = False
    """Whether the agents run in the testbed's images, not with the Python packages of this host."""
    gpus: bool = False
    """Whether a device can use a GPU of the host, or a fraction of one."""
    lossless_reason: str = ""
    """Clause such as `whose links are TCP relays`; empty if links can lose packets."""
    shaper: str | None = None
    """Mechanism that emulates links; None if `testbed.plan.machines` chooses between netem and the
    router."""
    shaper_why: str = ""
    many_hosts: bool = False
    devices_probe: bool = False
    """Whether each device measures its own link before the run clock starts."""
    counts_bytes: Literal["always", "linked", "never"] = "never"
    """Whether telemetry has the bytes that devices send and receive. `linked`: only if the devices have
    links."""
    unresumable_reason: str = ""
    """Reason why an interrupted run cannot be resumed, and what to do instead."""
    real_devices: bool = False
    """Whether real devices (`hosts` with SSH destinations) can join a run."""
    lacks: frozenset[str] = frozenset()
    """Features of devices that the runtime does not have, by their keys in the topology."""
    lack: str = ""
    """Clause for the error if the runtime is not available. It says what this machine lacks."""
    notice: str = ""
    """Printed before each run."""


RUNTIMES: dict[str, Traits] = {
    "docker": Traits(
        module="testbed.runtimes.docker.runtime",
        real_devices=True,
        cgroups=True,
        images=True,
        gpus=True,
        devices_probe=True,
        counts_bytes="always",
        lack="no Docker engine that can run devices answers",
    ),
    "swarm": Traits(
        module="testbed.runtimes.swarm.runtime",
        real_devices=True,
        cgroups=True,
        images=True,
        many_hosts=True,
        devices_probe=True,
        counts_bytes="always",
        lack="this machine's engine manages no Swarm, or does not answer",
    ),
    "process": Traits(
        module="testbed.runtimes.process.runtime",
        real_devices=True,
        lossless_reason="whose links are TCP relays",
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
        unresumable_reason="the same seed repeats it from the start",
    ),
}
"""`auto` selects the first available runtime that has a real clock and uses only this host."""


def traits(name: str) -> Traits:
    """Raises BadInputError."""
    if name not in RUNTIMES:
        raise BadInputError(f"no runtime is called {name!r}, expected {runtime_names()}")
    return RUNTIMES[name]


def is_simulated(name: Any) -> bool:
    """False if `name` is None, as in the early manifest of a run."""
    return name in RUNTIMES and RUNTIMES[name].simulated


def refuse_simulated(name: str | None) -> None:
    """Raises BadInputError."""
    if is_simulated(name):
        raise BadInputError(
            f"--runtime {name}: expected auto, {runtime_names(lambda t: not t.simulated)}"
        )


def emulated_runtime_names() -> list[str]:
    """Runtimes with many hosts come first, because the part of their run on this host could otherwise be
    taken for a run of another runtime."""
    names = [name for name, found in RUNTIMES.items() if not found.simulated]
    return sorted(names, key=lambda name: not RUNTIMES[name].many_hosts)


def runtime_names(which: Callable[[Traits], bool] = lambda _: True) -> str:
    """Join the names to a text such as `process or virtual`."""
    *others, last = [name for name, found in RUNTIMES.items() if which(found)]
    return f"{', '.join(others)} or {last}" if others else last
