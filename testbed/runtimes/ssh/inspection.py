"""Real devices without a run: what they have, what a run would do there, and removal of what runs keep
there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agents.device import link
from agents.remote import container
from agents.texts import make_printable
from testbed.errors import HostError
from testbed.plan import Plan, PlannedDevice
from testbed.runtimes.ssh import environment
from testbed.runtimes.ssh.connection import Connections, SshTarget, in_parallel, shown
from testbed.runtimes.ssh.environment import ClientContainer
from testbed.runtimes.ssh.hosts import container_of, target_of
from testbed.topology import Topology

_MAX_CHARACTERS = 1_000
_CACHE = "~/.cache/edge-fl-testbed"


def describe(hosts: Sequence[str]) -> dict[str, str | HostError]:
    """Return what each device has, as a sentence, or why it cannot take part in a run."""
    connections, lines = Connections(), environment.requirement_lines(())

    def look(host: str) -> str:
        report = environment.check(connections, SshTarget(host), lines, own_python=False)
        installed = "is installed" if report.get("installed") is True else "is not installed yet"
        address = str(report.get("seen") or "an address of this host")
        return make_printable(
            f"Python {report.get('python')} on {report.get('machine')}, "
            f"{report['free'] / 2**30:.1f} GiB free; the environment {installed}. It sees this host at "
            f"{address}: write server: {{address: {address}}} in the topology. "
            f"{_shaping(connections, SshTarget(host), address)}",
            _MAX_CHARACTERS,  # in one line
        )

    return in_parallel({host: partial(look, host) for host in hosts})


def _shaping(connections: Connections, target: SshTarget, address: str) -> str:
    """Return a sentence on whether `shape: true` can limit the device, which sees this host at
    `address`."""
    shape = {"server": address, "link": True, "netem": False, "cpu": (100_000, 100_000)}
    request = {"modules": [], "environment": "none", "servers": [], "shape": shape}
    try:
        why = connections.call(target, "check", request).get("unshapeable")
    except HostError as error:
        why = error
    return (
        "shape: true can limit it" if why is None else f"shape: true cannot limit it: {shown(str(why))}"
    )


def clean(hosts: Sequence[str]) -> dict[str, str | HostError]:
    """Remove environments, and what ended runs have left. Return what is left, or why it could not be
    removed."""
    connections = Connections()

    def remove(host: str) -> str:
        kept = connections.call(SshTarget(host), "clean", {}).get("kept")
        if isinstance(kept, list) and kept:
            names = ", ".join(shown(str(one)) for one in kept[:5])
            raise HostError(f"{host}: {names} belongs to a live run: end it with testbed down")
        return f"everything in {_CACHE} is removed"

    return in_parallel({host: partial(remove, host) for host in hosts})


def _container_lines(contained: ClientContainer | None, folder: str) -> list[str]:
    if contained is None:
        return []
    user = ["--user=UID:GID"]
    command = container.command(contained.engine, contained.image, Path(folder), user)
    return [f"           {shlex.join(command)}"]


def _shape_lines(device: PlannedDevice) -> list[str]:
    shape, limited = device.shape, device.as_shaped
    if shape is None:
        return []
    lines = []
    if limited.cpu is not None:
        group = f"CGROUP/edge-fl-testbed-RUN-{device.name}"
        lines.append(f"quota {limited.quota} of {limited.period} µs in {group}")
    if limited.link is not None:
        made = link.commands(limited.link, "INTERFACE", netem=shape.needs_netem, ifb="IFB")
        lines += map(shlex.join, made)
    return [f"           {line}" for line in lines]


def dry_run(plan: Plan, topology: Topology) -> list[str]:
    """Lines on the commands that a run would run for its real devices."""
    wanted = environment.requirement_lines(topology.requirements)
    name = environment.environment_name(wanted)
    size = len(environment.archive(None))
    lines = []
    for device in plan.real_devices:
        target, folder = target_of(device), f"{_CACHE}/runs/RUN/{device.name}"
        contained = container_of(device, topology)
        python = device.python or f"{_CACHE}/environments/{name}/bin/python"
        if contained is not None:
            python = target.python
        lines += [
            f"{device.name}: {shlex.join(target.command)}",
            "  the same command each time; its standard input has agents/remote/program.py, a request,",
            "  and files. There it does this:",
            "  check    reports Python, free space, missing packages; connects to "
            f"{plan.server[0] if plan.server else ''}, port {plan.server[1] if plan.server else ''}",
            f"  install  unpacks the agents ({size / 1000:.0f} kB) into {folder}",
        ]
        if contained is not None:
            lines.append(f"  load     once: {contained.engine} load, with {contained.image}")
        elif device.python is None:
            first = shlex.join(environment.attempts(wanted)[0])
            lines += [
                f"           once: {target.python} -m venv {_CACHE}/environments/{name}",
                f"           once: {python} -m pip install {first}",
            ]
        lines += [
            "  measure  measures round trips and rates to this host",
            "  start    writes init.json, client.json (mode 0600), broker.pem, shard.safetensors; runs",
            f"           {python} -m agents.remote.keeper SETTINGS",
            *_container_lines(contained, folder),
            *_shape_lines(device),
            "  watch    reports the state and compares the clocks, until the end of the run",
            f"  remove   ends all, sends log and unacknowledged updates, deletes {folder}",
        ]
    return lines
