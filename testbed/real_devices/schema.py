"""Keys of device groups whose `hosts` are real devices, reached by SSH. Nothing of a real device is
emulated. With `shape: true`, its kernel limits its CPU and its link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from testbed.topology.fields import Model, expecting, needs_trust, optional
from testbed.topology.yamlfile import Where

if TYPE_CHECKING:  # they import this module
    from testbed.topology.devices import DeviceGroup
    from testbed.topology.schema import Topology

_USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])"
_DESTINATION = re.compile(rf"(?:{_USER}@{_HOST}|ssh://(?:{_USER}@)?{_HOST}(?::[0-9]{{1,5}})?)")
"""A destination never begins with `-`, so that `ssh` cannot take it for an option."""
_EMULATED = (
    *("cpu", "profile", "gflops", "timing", "memory", "gpu", "image", "link", "access", "segment"),
    *("think", "power", "energy", "thermal", "placement"),
)
_SHAPED = ("cpu", "link")
"""Keys that limit a real device with `shape: true`."""
_VERBS = {
    "set": "its limits do not change",
    "disconnect": "its network is not cut off",
    "charge": "its battery is its own",
    "unplug": "its battery is its own",
}
"""Verb of the scenario -> reason why it does not apply to a real device."""


def is_ssh_host(host: str) -> bool:
    """Whether it is a real device, and not the name of a node."""
    return "@" in host or host.startswith("ssh://")


class RealDeviceKeys(Model):
    hosts: Annotated[tuple[str, ...], needs_trust("devices on other machines")] | None = optional(
        "Real devices, one per entry, reached by SSH: [pi@raspi-1, ssh://raspi-2]. Or, with a Swarm, "
        "names of the nodes on which the devices may run. Default: any node",
        hidden=True,
        min_length=1,
    )
    python: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9/~._+-]+$"),
            expecting("a Python interpreter such as /usr/bin/python3.11"),
        ]
        | None
    ) = optional(
        "Path of the Python interpreter on a real device. It must have the agents' packages, unless "
        "container is set. Default: a virtual environment that is made on the device once",
        hidden=True,
    )
    container: Annotated[Literal["docker", "podman"], expecting("docker or podman")] | None = optional(
        "Engine on a real device that runs the client in a container of the agents' image. Default: "
        "the client is a process of the SSH user",
        hidden=True,
    )
    shape: bool = optional(
        "Whether cpu and link limit a real device, by its kernel's control groups and traffic control. "
        "Takes root there",
        default=False,
        hidden=True,
    )

    @property
    def is_real(self) -> bool:
        return any(map(is_ssh_host, self.hosts or ()))


def is_destination(host: str) -> bool:
    return _DESTINATION.fullmatch(host) is not None


def problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    real: set[str] = set()
    shaped: set[str] = set()
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index)
        if not group.is_real:
            for key in ("python", "container", "shape"):
                if getattr(group, key):
                    yield (*where, key), "applies to real devices only: remove it, or add hosts"
            continue
        real.update(group.device_names)
        yield from _group_problems(group, where)
        for number, host in enumerate(group.hosts or ()):
            if group.shape and group.link is not None and host in shaped:
                yield (
                    (*where, "hosts", number),
                    f"the link of {host} is shaped for another device: remove link from one of the two",
                )
            elif group.shape and group.link is not None:
                shaped.add(host)
    if not real:
        return
    if topology.server.address is None:
        yield (
            ("devices",),
            "some are real devices, which have to reach the broker: add the address of this host on "
            "their network, such as server: {address: 192.168.1.10}",
        )
    if topology.dilation != 1:
        yield ("dilation",), "real devices run in real time: remove this, or the real devices"
    for index, entry in enumerate(topology.scenario):
        named = [name for name in topology.devices_of(entry.targets) if name in real]
        if named and entry.verb in _VERBS:
            yield (
                ("scenario", index, entry.verb),
                f"{named[0]} is a real device, and {_VERBS[entry.verb]}: name other devices",
            )


def _group_problems(group: DeviceGroup, where: Where) -> Iterator[tuple[Where, str]]:
    hosts = group.hosts or ()
    for number, host in enumerate(hosts):
        if not is_ssh_host(host):
            yield (
                (*where, "hosts", number),
                f"{host} is the name of a node, and others are real devices: make a group of each, or "
                f"write ssh://{host} for a real device",
            )
        elif not is_destination(host):
            yield (
                (*where, "hosts", number),
                f"found {host!r}, expected user@host, or ssh://[user@]host[:port]",
            )
    if group.count is not None and group.count != len(hosts):
        yield (
            (*where, "count"),
            f"found {group.count}, but hosts has {len(hosts)}: each real device is one device, so "
            "remove count",
        )
    found = [key for key in _EMULATED if getattr(group, key) is not None]
    found += [] if group.has_plain_speed else ["speed"]
    for key in found:
        if key in _SHAPED and group.shape:
            continue
        if key == "link" and group.link is not None and not group.link.shaping_keys:
            continue
        more = ", or add shape: true, which limits it there" if key in _SHAPED else ""
        yield (
            (*where, key),
            f"{group.name} is a real device, of which nothing is emulated: remove it{more}",
        )
    if group.shape:
        yield from _shape_problems(group, where)
    if group.availability is not None:
        yield (
            (*where, "availability"),
            f"{group.name} is a real device, whose network is not cut off: remove it, or use leave and "
            "join in scenario",
        )


def _shape_problems(group: DeviceGroup, where: Where) -> Iterator[tuple[Where, str]]:
    if group.cpu is None and group.link is None:
        yield (*where, "shape"), "has no effect: add cpu or link, or remove it"
    if group.container is not None:
        yield (
            (*where, "container"),
            "a client in a container cannot be limited by shape: remove one of the two",
        )
    if group.link is not None and group.link.trace is not None:
        yield (
            (*where, "link", "trace"),
            f"{group.name} is a real device, whose link does not change: remove it",
        )
