"""Services of a Swarm, made of the specifications of containers (`testbed.runtimes.docker.containers`).

What a Swarm's service cannot have (control group of its own, swap, CPU quota of any period) the engine
of its node sets once the container is there. Objects of a run carry its labels, whatever their names:
these have at most 63 characters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from testbed.runtimes.docker.containers import Container, Network
from testbed.runtimes.process.log_writer import LOG_BYTES

_MOST_CHARACTERS = 63
_SECOND = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFile:
    """A secret or a configuration that the Swarm carries to a container."""

    id: str
    name: str
    target: str
    """Path in the container."""
    user: int = 0
    mode: int = 0o400

    def reference(self, kind: str) -> dict[str, Any]:
        """As the API has it; `kind` is `Secret` or `Config`."""
        owner = {"UID": f"{self.user}", "GID": f"{self.user}"}
        file = {"Name": self.target, **owner, "Mode": self.mode}
        return {f"{kind}ID": self.id, f"{kind}Name": self.name, "File": file}


@dataclass(frozen=True, slots=True)
class Volume:
    """A folder of the node's engine, by its name."""

    name: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Where a service runs, and what it has there beside its container's specification."""

    nodes: tuple[str, ...] = ()
    """Constraints, such as `node.id == x`."""
    everywhere: bool = False
    """One task on each such node; else one in all."""
    binds: bool = False
    """Whether the container's mounts are of the node's own files."""
    secrets: Sequence[ServiceFile] = ()
    configs: Sequence[ServiceFile] = ()
    volumes: Sequence[Volume] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """Addresses by host name, of what the network's own names do not tell."""
    cores: float = 0.0
    """Reserved, so that no other service gets them promised."""


def short(name: str) -> str:
    """`name` as objects of a Swarm may be called."""
    name = name.replace(".", "_")
    if len(name) <= _MOST_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"testbed-{digest}-{name[-40:].lstrip('-')}"


def network(made: Network) -> dict[str, Any]:
    """Arguments of `create_network`: an overlay, or, where it has options of a bridge, a bridge on each
    node, for itself."""
    local = bool(made.options)
    return {
        "name": short(made.name),
        "driver": "bridge" if local else "overlay",
        "scope": "swarm",
        "internal": made.internal,
        "options": dict(made.options) or None,
        "labels": dict(made.labels),
    }


def service(container: Container, options: ServiceOptions) -> dict[str, Any]:
    """Arguments of `create_service` for `container`."""
    labels = dict(container.labels)
    return {
        "task_template": {
            "ContainerSpec": _container(container, options, labels),
            "Resources": {
                "Limits": {"Pids": container.pids, "MemoryBytes": container.memory or 0},
                "Reservations": {
                    "NanoCPUs": round(options.cores * _SECOND),
                    "MemoryBytes": container.memory or 0 if options.cores else 0,
                },
            },
            # Who ends has ended: clients are started again by their init, and a run knows what it lost.
            "RestartPolicy": {"Condition": "none"},
            "Placement": {"Constraints": list(options.nodes)},
            "LogDriver": {
                "Name": "json-file",
                "Options": {"max-size": f"{LOG_BYTES}", "max-file": "2"},
            },
            "Networks": [
                {"Target": short(one.network), "Aliases": list(one.aliases)}
                for one in container.networks
            ],
        },
        "name": short(container.name),
        "labels": labels,
        "mode": {"Global": {}} if options.everywhere else {"Replicated": {"Replicas": 1}},
        # Names lead to the task itself: a virtual address would need the kernel's ip_vs on each node.
        "endpoint_spec": {"Mode": "dnsrr"},
    }


def _container(
    container: Container, options: ServiceOptions, labels: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "Image": container.image,
        "Labels": labels,
        **({"Command": list(container.command)} if container.command else {}),
        "Hostname": container.component,
        "User": f"{container.user}:{container.group}",
        "Env": [f"{name}={value}" for name, value in container.environment.items()],
        "ReadOnly": container.read_only,
        "CapabilityDrop": list(container.cap_drop),
        "CapabilityAdd": list(container.cap_add),
        "Privileges": {"NoNewPrivileges": True},  # older engines do not know it
        "Sysctls": dict(container.sysctls),
        "DNSConfig": {"Nameservers": list(container.dns)},
        "Hosts": [f"{address} {name}" for name, address in options.names.items()],
        "StopGracePeriod": 0,
        "Mounts": [
            *(
                {"Type": "bind", "Source": one.source, "Target": one.target, "ReadOnly": one.read_only}
                for one in (container.mounts if options.binds else ())
            ),
            *(
                {
                    "Type": "volume",
                    "Source": one.name,
                    "Target": one.target,
                    "ReadOnly": one.read_only,
                    "VolumeOptions": {"Labels": labels, "NoCopy": True},
                }
                for one in options.volumes
            ),
            *(
                {"Type": "tmpfs", "Target": target, "TmpfsOptions": {"SizeBytes": 16 * 2**20}}
                for target in container.tmpfs
            ),
        ],
        "Secrets": [one.reference("Secret") for one in options.secrets],
        "Configs": [one.reference("Config") for one in options.configs],
    }
