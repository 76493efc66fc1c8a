"""Services, networks, secrets and configurations of a run on a Swarm: made of the specifications of
containers (`testbed.runtimes.docker.containers`), found and removed by label.

What a Swarm's service cannot have (control group of its own, swap, CPU quota of any period) the engine
of its node sets once the container is there. Objects of a run carry its labels, whatever their names:
these have at most 63 characters.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import docker
from docker.errors import APIError, NotFound

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.rundir.directory import last_lines
from testbed.runtimes.docker.containers import RUN_LABEL, BridgeNetwork, Container
from testbed.runtimes.process.log_writer import LOG_BYTES

_MOST_CHARACTERS = 63
_SECOND = 10**9
_START_TIMEOUT_SECONDS = 120.0
"""Within which a task has to run, its image being there."""
_REMOVAL_TIMEOUT_SECONDS = 40.0
_POLL_SECONDS = 0.1
_DEAD = ("failed", "rejected", "orphaned", "remove", "shutdown")


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


def short_name(name: str) -> str:
    """`name` as objects of a Swarm may be called."""
    name = name.replace(".", "_")
    if len(name) <= _MOST_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"testbed-{digest}-{name[-40:].lstrip('-')}"


def network_arguments(made: BridgeNetwork) -> dict[str, Any]:
    """Arguments of `create_network`: an overlay, or, where it has options of a bridge, a bridge on each
    node, for itself."""
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
                {"Target": short_name(one.network), "Aliases": list(one.aliases)}
                for one in container.networks
            ],
        },
        "name": short_name(container.name),
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


def label_filter(run: str | None) -> dict[str, str]:
    """The filter for objects of `run`, of all runs."""
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
    """Make a secret of `data`, which appears in a container at `target`."""
    made = manager.api.create_secret(short_name(name), data, dict(labels))
    return ServiceFile(id=made["ID"], name=short_name(name), target=target, **file)


def create_config(
    manager: docker.DockerClient, name: str, data: bytes, labels: Mapping[str, str], target: str
) -> ServiceFile:
    """The same of a configuration, which is no secret."""
    made = manager.api.create_config(short_name(name), data, dict(labels))
    return ServiceFile(id=made["ID"], name=short_name(name), target=target, mode=0o444)


def create(manager: docker.DockerClient, container: Container, options: ServiceOptions) -> str:
    """Create the service of `container`; return its id."""
    api: Any = manager.api
    created: str = api.create_service(**service_arguments(container, options))["ID"]
    return created


def list_services(manager: docker.DockerClient, run: str | None = None) -> list[dict[str, Any]]:
    api: Any = manager.api
    found: list[dict[str, Any]] = api.services(filters=label_filter(run))
    return found


def tasks(manager: docker.DockerClient, of: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The tasks of the services `of`, by the id of the service."""
    wanted: dict[str, list[dict[str, Any]]] = {one: [] for one in of}
    api: Any = manager.api
    for task in api.tasks(filters={"service": list(wanted)}):
        if task["ServiceID"] in wanted:
            wanted[task["ServiceID"]].append(task)
    return wanted


def await_tasks(
    manager: docker.DockerClient,
    expected: Mapping[str, int],
    named: Callable[[str], str],
    nodes: Mapping[str, str],
    earlier: Collection[str] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Wait until each service of `expected`, by id, has so many tasks that run, beside those that were
    there `earlier`, by id; return them. `named` tells what a service is called; `nodes` are those of the
    run, with their names: what the Swarm starts on one that has just come is passed over. Raises
    HostError."""
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
                        f"{named(one)} could not start on {where}: "
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
                f"{named(one)} did not start within {_START_TIMEOUT_SECONDS:.0f} s "
                f"({states or 'no task'})"
            )
        time.sleep(_POLL_SECONDS)


def restart(manager: docker.DockerClient, service: str) -> set[str]:
    """Have the Swarm start a task of `service` in place of that which has ended; return the ids of the
    earlier ones."""
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
    """The last lines that the service `name` has printed, for an error message."""
    api: Any = manager.api
    try:
        text: bytes = api.service_logs(
            short_name(name), stdout=True, stderr=True, tail=lines, is_tty=False
        )
    except docker_engine.ERRORS:
        return ""
    return "".join(f"\n{line}" for line in last_lines(text, lines))


def task_address(task: Mapping[str, Any], network_name: str) -> str:
    """IPv4 address of a task on a network of the Swarm."""
    for one in task.get("NetworksAttachments", ()):
        if one["Network"]["Spec"]["Name"] == short_name(network_name):
            return str(one["Addresses"][0].partition("/")[0])
    raise HostError(f"the Swarm has given no address on {network_name}")


def remove_services(manager: docker.DockerClient, found: Iterable[Mapping[str, Any]]) -> None:
    api: Any = manager.api
    for one in found:
        _remove_if_exists(api.remove_service, one["ID"])


def remove_rest(manager: docker.DockerClient, run: str) -> None:
    """Remove the networks, secrets and configurations of `run`, once no task uses them. Raises
    ERRORS."""
    api: Any = manager.api
    filters = label_filter(run)
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
    while True:
        try:  # a request that Ctrl-C broke off may be done only now
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
