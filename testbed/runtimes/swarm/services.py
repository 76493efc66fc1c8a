"""Services, networks, secrets and configurations of a run on a Swarm, created from the specifications of
containers (`testbed.runtimes.docker.specifications`).

A Swarm cannot set some limits of a service, such as swap and CPU quotas with a given period. The engine
of the node sets these limits after the container has started.

Objects are found by their labels, not by their names, because names are shortened to 63 characters.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import docker
from docker.errors import APIError, NotFound

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.rundir.directory import last_lines
from testbed.runtimes.docker.specifications import RUN_LABEL, BridgeNetwork, Container
from testbed.runtimes.process.log_writer import LOG_BYTES

_MOST_CHARACTERS = 63
_SECOND = 10**9
_START_TIMEOUT_SECONDS = 120.0
"""Maximum seconds to wait until a task runs, counted from the time when the task's image is on the
node."""
_REMOVAL_TIMEOUT_SECONDS = 40.0
_POLL_SECONDS = 0.1
_DEAD = ("failed", "rejected", "orphaned", "remove", "shutdown")
"""States of tasks that will never run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFile:
    """Secret or configuration that the Swarm carries to a container."""

    id: str
    name: str
    target: str
    """Path in the container."""
    user: int = 0
    """User and group that own the file."""
    mode: int = 0o400

    def reference(self, kind: str) -> dict[str, Any]:
        """Reference to the file for a service's specification. `kind` is `Secret` or `Config`."""
        owner = {"UID": f"{self.user}", "GID": f"{self.user}"}
        file = {"Name": self.target, **owner, "Mode": self.mode}
        return {f"{kind}ID": self.id, f"{kind}Name": self.name, "File": file}


@dataclass(frozen=True, slots=True)
class Volume:
    """Named volume of a node's engine."""

    name: str
    target: str
    """Path in the container."""
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Settings that are not in the container's specification."""

    nodes: tuple[str, ...] = ()
    """Constraints, such as `node.id == x`."""
    everywhere: bool = False
    """A task on each node that meets the constraints; else only one."""
    binds: bool = False
    """Mounts of the specification exist on the nodes; else they are left out."""
    secrets: Sequence[ServiceFile] = ()
    configs: Sequence[ServiceFile] = ()
    volumes: Sequence[Volume] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """Addresses of additional host names."""
    cores: float = 0.0
    """Reserved cores, which the Swarm gives to no other service."""


def short_name(name: str) -> str:
    """Name that a Swarm accepts; a long one is shortened."""
    name = name.replace(".", "_")
    if len(name) <= _MOST_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"testbed-{digest}-{name[-40:].lstrip('-')}"


def network_arguments(made: BridgeNetwork) -> dict[str, Any]:
    """Arguments of the API for an overlay network, or with bridge options for a separate bridge on each
    node."""
    local = bool(made.options)
    return {
        "name": short_name(made.name),
        "driver": "bridge" if local else "overlay",
        "scope": "swarm",
        "internal": made.internal,
        "options": dict(made.options) or None,
        "labels": dict(made.labels),
    }


def service_arguments(container: Container, options: ServiceOptions) -> dict[str, Any]:
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
            # No restarts by the Swarm: the init restarts its client, and the run has to notice failures.
            "RestartPolicy": {"Condition": "none"},
            "Placement": {"Constraints": list(options.nodes)},
            "LogDriver": {
                "Name": "json-file",
                "Options": {"max-size": f"{LOG_BYTES}", "max-file": "2"},
            },
            "Networks": [
                {"Target": short_name(one.network), "Aliases": list(one.aliases)}
                for one in container.networks
            ],
        },
        "name": short_name(container.name),
        "labels": labels,
        "mode": {"Global": {}} if options.everywhere else {"Replicated": {"Replicas": 1}},
        # Host names resolve to the task: virtual addresses would need the kernel's ip_vs on each node.
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
        "Privileges": {"NoNewPrivileges": True},  # ignored by older engines
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


def label_filter(run: str | None) -> dict[str, str]:
    return {"label": RUN_LABEL if run is None else f"{RUN_LABEL}={run}"}


def create_network(manager: docker.DockerClient, made: BridgeNetwork) -> None:
    manager.api.create_network(**network_arguments(made))


def create_secret(
    manager: docker.DockerClient,
    name: str,
    data: bytes,
    labels: Mapping[str, str],
    target: str,
    **file: int,
) -> ServiceFile:
    """`target`: where the secret is mounted in a container."""
    made = manager.api.create_secret(short_name(name), data, dict(labels))
    return ServiceFile(id=made["ID"], name=short_name(name), target=target, **file)


def create_config(
    manager: docker.DockerClient, name: str, data: bytes, labels: Mapping[str, str], target: str
) -> ServiceFile:
    """`target`: where the configuration is mounted in a container, for all users to read."""
    made = manager.api.create_config(short_name(name), data, dict(labels))
    return ServiceFile(id=made["ID"], name=short_name(name), target=target, mode=0o444)


def create(manager: docker.DockerClient, container: Container, options: ServiceOptions) -> str:
    """Return the id of the service."""
    api: Any = manager.api
    created: str = api.create_service(**service_arguments(container, options))["ID"]
    return created


def list_services(manager: docker.DockerClient, run: str | None = None) -> list[dict[str, Any]]:
    api: Any = manager.api
    found: list[dict[str, Any]] = api.services(filters=label_filter(run))
    return found


def tasks(manager: docker.DockerClient, service_ids: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    wanted: dict[str, list[dict[str, Any]]] = {one: [] for one in service_ids}
    api: Any = manager.api
    for task in api.tasks(filters={"service": list(wanted)}):
        if task["ServiceID"] in wanted:
            wanted[task["ServiceID"]].append(task)
    return wanted


def await_tasks(
    manager: docker.DockerClient,
    expected: Mapping[str, int],
    describe: Callable[[str], str],
    nodes: Mapping[str, str],
    earlier: Collection[str] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Return the running tasks, by service id.

    `expected`: number of tasks, by service id. `describe`: name of a service for messages. `nodes`:
    names by node id. Tasks with ids in `earlier` do not count, nor those on a node that is not in
    `nodes`: it may have just joined the Swarm. Raises HostError if a task fails or starts too late.
    """
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    left, done = dict(expected), {}
    while True:
        for one, every in tasks(manager, left).items():
            found = [
                task
                for task in every
                if task["ID"] not in earlier and task.get("NodeID", "") in (*nodes, "")
            ]
            for task in found:
                status = task["Status"]
                if status["State"] in _DEAD:
                    where = nodes.get(task.get("NodeID", ""), "any node")
                    raise HostError(
                        f"{describe(one)} could not start on {where}: "
                        f"{status.get('Err') or status.get('Message')}{log_tail(manager, one)}"
                    )
            up = [task for task in found if task["Status"]["State"] in ("running", "complete")]
            if len(up) >= left[one]:
                done[one] = up
        left = {one: count for one, count in left.items() if one not in done}
        if not left:
            return done
        if time.monotonic() > deadline:
            one = next(iter(left))
            states = "; ".join(
                f"{t['Status']['State']}: {t['Status'].get('Err') or t['Status'].get('Message', '')}"
                for t in tasks(manager, [one])[one]
            )
            raise HostError(
                f"{describe(one)} did not start within {_START_TIMEOUT_SECONDS:.0f} s "
                f"({states or 'no task'})"
            )
        time.sleep(_POLL_SECONDS)


def restart(manager: docker.DockerClient, service: str) -> set[str]:
    """Start a new task. Return the ids of the earlier ones."""
    before = {task["ID"] for task in tasks(manager, [service])[service]}
    api: Any = manager.api
    known = api.inspect_service(service)
    number = known["Spec"]["TaskTemplate"].get("ForceUpdate") or 0
    api.update_service(
        service,
        known["Version"]["Index"],
        task_template={"ForceUpdate": number + 1},
        fetch_current_spec=True,
    )
    return before


def log_tail(manager: docker.DockerClient, name: str, lines: int = 10) -> str:
    """For an error message; empty if the log cannot be read."""
    api: Any = manager.api
    try:
        parts: Iterator[bytes] = api.service_logs(
            short_name(name), stdout=True, stderr=True, tail=lines, is_tty=False
        )
        text = b"".join(parts)
    except docker_engine.ERRORS:
        return ""
    return "".join(f"\n{line}" for line in last_lines(text, lines))


def task_address(task: Mapping[str, Any], network_name: str) -> str:
    """IPv4 address. Raises HostError if the task has none on that network."""
    for one in task.get("NetworksAttachments", ()):
        if one["Network"]["Spec"]["Name"] == short_name(network_name):
            return str(one["Addresses"][0].partition("/")[0])
    raise HostError(f"a task of the Swarm has no address on the network {network_name}")


def remove_services(manager: docker.DockerClient, found: Iterable[Mapping[str, Any]]) -> None:
    api: Any = manager.api
    for one in found:
        _remove_if_exists(api.remove_service, one["ID"])


def remove_rest(manager: docker.DockerClient, run: str) -> None:
    """Wait until no task uses the networks, secrets and configurations, then remove them, and left-over
    services, too. Raises ERRORS."""
    api: Any = manager.api
    filters = label_filter(run)
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
    while True:
        try:  # services too: a request that Ctrl-C interrupted may take effect only now
            remove_services(manager, list_services(manager, run))
            for secret in api.secrets(filters=filters):
                _remove_if_exists(api.remove_secret, secret["ID"])
            for config in api.configs(filters=filters):
                _remove_if_exists(api.remove_config, config["ID"])
            for one in api.networks(filters=filters):
                _remove_if_exists(api.remove_network, one["Id"])
        except APIError:
            if time.monotonic() > deadline:
                raise
        else:
            if not api.networks(filters=filters):
                return
        time.sleep(_POLL_SECONDS)


def _remove_if_exists(remove: Callable[[str], object], what: str) -> None:
    with suppress(NotFound):
        remove(what)
