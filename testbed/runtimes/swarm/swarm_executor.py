"""Has a Swarm make, find and remove the objects of a run, by label."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import docker
from docker.errors import APIError, NotFound

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.rundir.directory import last_lines
from testbed.runtimes.docker.containers import RUN_LABEL, Container, Network
from testbed.runtimes.swarm.services import ServiceFile, ServiceOptions, network, service, short

_START_TIMEOUT_SECONDS = 120.0
"""Within which a task has to run, its image being there."""
_REMOVAL_TIMEOUT_SECONDS = 40.0
_POLL_SECONDS = 0.1
_DEAD = ("failed", "rejected", "orphaned", "remove", "shutdown")


def labelled(run: str | None) -> dict[str, str]:
    """The filter for objects of `run`, of all runs."""
    return {"label": RUN_LABEL if run is None else f"{RUN_LABEL}={run}"}


def create_network(manager: docker.DockerClient, made: Network) -> None:
    manager.api.create_network(**network(made))


def create_secret(
    manager: docker.DockerClient,
    name: str,
    data: bytes,
    labels: Mapping[str, str],
    target: str,
    **file: int,
) -> ServiceFile:
    """Make a secret of `data`, which appears in a container at `target`."""
    made = manager.api.create_secret(short(name), data, dict(labels))
    return ServiceFile(id=made["ID"], name=short(name), target=target, **file)


def create_config(
    manager: docker.DockerClient, name: str, data: bytes, labels: Mapping[str, str], target: str
) -> ServiceFile:
    """The same of a configuration, which is no secret."""
    made = manager.api.create_config(short(name), data, dict(labels))
    return ServiceFile(id=made["ID"], name=short(name), target=target, mode=0o444)


def create(manager: docker.DockerClient, container: Container, options: ServiceOptions) -> str:
    """Create the service of `container`; return its id."""
    api: Any = manager.api
    created: str = api.create_service(**service(container, options))["ID"]
    return created


def services(manager: docker.DockerClient, run: str | None = None) -> list[dict[str, Any]]:
    api: Any = manager.api
    found: list[dict[str, Any]] = api.services(filters=labelled(run))
    return found


def tasks(manager: docker.DockerClient, of: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The tasks of the services `of`, by the id of the service."""
    wanted: dict[str, list[dict[str, Any]]] = {one: [] for one in of}
    api: Any = manager.api
    for task in api.tasks(filters={"service": list(wanted)}):
        if task["ServiceID"] in wanted:
            wanted[task["ServiceID"]].append(task)
    return wanted


def running(
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
                        f"{status.get('Err') or status.get('Message')}{log(manager, one)}"
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


def start_again(manager: docker.DockerClient, service: str) -> set[str]:
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


def log(manager: docker.DockerClient, name: str, lines: int = 10) -> str:
    """The last lines that the service `name` has printed, for an error message."""
    api: Any = manager.api
    try:
        text: bytes = api.service_logs(short(name), stdout=True, stderr=True, tail=lines, is_tty=False)
    except docker_engine.ERRORS:
        return ""
    return "".join(f"\n{line}" for line in last_lines(text, lines))


def address(task: Mapping[str, Any], network_name: str) -> str:
    """IPv4 address of a task on a network of the Swarm."""
    for one in task.get("NetworksAttachments", ()):
        if one["Network"]["Spec"]["Name"] == short(network_name):
            return str(one["Addresses"][0].partition("/")[0])
    raise HostError(f"the Swarm has given no address on {network_name}")


def remove_services(manager: docker.DockerClient, found: Iterable[Mapping[str, Any]]) -> None:
    api: Any = manager.api
    for one in found:
        _gone(api.remove_service, one["ID"])


def remove_rest(manager: docker.DockerClient, run: str) -> None:
    """Remove the networks, secrets and configurations of `run`, once no task uses them. Raises
    ERRORS."""
    api: Any = manager.api
    filters = labelled(run)
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
    while True:
        try:  # a request that Ctrl-C broke off may be done only now
            remove_services(manager, services(manager, run))
            for secret in api.secrets(filters=filters):
                _gone(api.remove_secret, secret["ID"])
            for config in api.configs(filters=filters):
                _gone(api.remove_config, config["ID"])
            for one in api.networks(filters=filters):
                _gone(api.remove_network, one["Id"])
        except APIError:
            if time.monotonic() > deadline:
                raise
        else:
            if not api.networks(filters=filters):
                return
        time.sleep(_POLL_SECONDS)


def _gone(remove: Callable[[str], object], what: str) -> None:
    with suppress(NotFound):
        remove(what)
