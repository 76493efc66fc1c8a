"""Requests to a Docker engine: create containers and networks by their specifications
(`testbed.runtimes.docker.specifications`), change limits, read logs and files, isolate devices, and
remove everything of a run."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

import docker
import requests
from docker import types
from docker.errors import APIError, DockerException, NotFound

from agents.node import isolation
from agents.node.isolation import Endpoint
from testbed.errors import HostError, from_os_error
from testbed.host import cpus, docker_engine, kernel
from testbed.host.docker_engine import ERRORS
from testbed.rundir.directory import RunDirectory, last_lines
from testbed.runtimes.docker.specifications import (
    COMPONENT_LABEL,
    RUN_LABEL,
    BridgeNetwork,
    Container,
    CpuLimits,
)
from testbed.runtimes.process.log_writer import CUT, LOG_BYTES

Spare = Callable[[Mapping[str, Any]], bool]
"""True for a container that must stay, by its entry in the engine's list."""
PARALLEL = 2
"""Containers to start or remove at the same time. More save hardly any time, because the engine handles
one after the other, and sometimes make it miscount the containers of a network, which then remains until
the engine is restarted (moby issue 42119)."""
SERVICE_LABEL = "com.docker.swarm.service.id"
"""The engine's label on containers of a Swarm's service."""
_NOT_MOUNTED = "bind source path does not exist: "
"""Text in the engine's error if the path to mount does not exist in the engine's file system."""
_SYSTEMD = Path("/run/systemd/system")
"""Exists if systemd is this host's init system."""
_STOP = (
    "busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager "
    "StopUnit ss {unit} replace || systemctl stop {unit}"
)
"""Makes systemd stop a unit, over the system bus, or without one over systemd's own socket, which is
reserved for root."""
_REMOVED_EXIT_CODE = 137
"""Reported for a container that was removed."""
_NETWORK_RELEASE_TIMEOUT_SECONDS = 3.0
"""Seconds for which to retry the removal of a network that the engine believes to be in use."""
_REMOVAL_TIMEOUT_SECONDS = 60.0
"""Maximum between two successful removals of containers, if the engine answers."""
_MAX_SILENCES = 3
"""Removal requests that may time out."""


@contextmanager
def as_host_error(what: str) -> Iterator[None]:
    """HostError "the Docker engine could not `what`" in place of the SDK's errors."""
    try:
        yield
    except ERRORS as error:
        if _NOT_MOUNTED in (answer := str(error)):
            path = answer.partition(_NOT_MOUNTED)[2].rstrip('")')
            raise HostError(
                f"the Docker engine sees other files than testbed: {path} does not exist for it. Mount "
                "the folder of the runs at the same path for both (docs/guide/faq.md)"
            ) from error
        raise HostError(f"the Docker engine could not {what}: {error}") from error


def create_network(engine: docker.DockerClient, network: BridgeNetwork) -> None:
    engine.api.create_network(
        network.name,
        driver="bridge",
        internal=network.internal,
        options=dict(network.options) or None,
        labels=dict(network.labels),
    )


def start(engine: docker.DockerClient, container: Container) -> str:
    """Return the container's id."""
    api = engine.api
    host_config = api.create_host_config(
        read_only=container.read_only,
        cap_drop=list(container.cap_drop),
        cap_add=list(container.cap_add) or None,
        security_opt=list(container.security),
        pids_limit=container.pids,
        tmpfs=dict(container.tmpfs),
        dns=list(container.dns),
        log_config=types.LogConfig(
            type="json-file", config={"max-size": f"{LOG_BYTES}", "max-file": "2"}
        ),
        mounts=[
            types.Mount(m.target, m.source, "bind", read_only=m.read_only) for m in container.mounts
        ],
        port_bindings=_port_bindings(container),
        sysctls=dict(container.sysctls),
        mem_limit=container.memory,
        memswap_limit=container.memory,
        device_requests=_device_requests(container.gpus),
        ipc_mode=container.ipc,
        network_mode=None if container.networks else "none",
        cgroup_parent=container.cgroup_parent,
        **_limits(container.cpu),
    )
    # Engines before 25.0 accept only one network when a container is created.
    first, *others = container.networks or (None,)
    networking = None
    if first is not None:
        endpoint = api.create_endpoint_config(aliases=list(first.aliases))
        networking = {"EndpointsConfig": {first.network: endpoint}}
    created: str = api.create_container(
        container.image,
        list(container.command) or None,
        name=container.name,
        hostname=container.component,
        user=f"{container.user}:{container.group}",
        labels=dict(container.labels),
        environment={**cpus.chosen_kernels(), **container.environment} or None,
        ports=[*container.published, *container.public] or None,
        host_config=host_config,
        networking_config=networking,
        use_config_proxy=False,  # the proxy's URL may contain a password
    )["Id"]
    for other in others:
        api.connect_container_to_network(created, other.network, aliases=list(other.aliases))
    api.start(created)
    return created


def _port_bindings(container: Container) -> dict[int | str, Any] | None:
    """Port of the container -> address and port of the host; a port of None is any free one."""
    bindings: dict[Any, Any] = dict(container.public)
    bindings.update(dict.fromkeys(container.published, ("127.0.0.1", None)))
    return bindings or None


def _device_requests(uuids: Sequence[str]) -> list[types.DeviceRequest] | None:
    """Request like `docker run --gpus`, with the parts of NVIDIA's driver that CUDA and MPS (compute)
    and NVML (utility) need; None without `uuids`."""
    if not uuids:
        return None
    wanted = [["gpu", "compute", "utility"]]
    return [types.DeviceRequest(device_ids=list(uuids), capabilities=wanted)]


def cgroup_driver(engine: docker.DockerClient) -> str:
    """`cgroupfs` or `systemd`."""
    return str(engine.api.info().get("CgroupDriver", "cgroupfs"))


def set_group_weights(
    engine: docker.DockerClient, image: str, run: str, weights: Mapping[str, float]
) -> str | None:
    """1 is the weight of a single process. Return why weights cannot be set; None if they are. Raises
    HostError if the kernel has other weights afterwards."""
    found = kernel.cgroup_weights(run, weights)
    if len(found) < len(weights):
        return "the engine's control groups are not in this host's file system"
    if kernel.is_cgroup_writable([file for file, _ in found]):
        for file, text in found:
            file.write_text(text, encoding="ascii")
    else:
        commands = [f"echo {text} > {quote(str(file))}" for file, text in found]
        if (why := _on_cgroups(engine, image, run, commands)) is not None:
            return why
    read = [(file, text, file.read_text(encoding="ascii").strip()) for file, text in found]
    if wrong := [f"{file} has {now}, requested {text}" for file, text, now in read if now != text]:
        raise HostError(f"the kernel has another CPU weight for devices or servers: {wrong[0]}")
    return None


def remove_cgroups(engine: docker.DockerClient, image: str | None, run: str) -> None:
    """Remove the control groups that the engine leaves behind. Slices of systemd are stopped first: it
    would create them again, for example at its next reload."""
    seen = [folder.name for folder in kernel.cgroup_folders(run)]
    # In a container, the controller may not see any.
    slices = sorted({name for name in seen or kernel.cgroup_names(run) if name.endswith(kernel.SLICE)})
    if slices:
        _stop_units(engine, image, run, slices)
    found = kernel.cgroup_folders(run)
    if not seen and image is not None:
        commands = [
            f"rmdir {root}/{quote(name)}"
            for name in kernel.cgroup_names(run)
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/*")
        ]
        _on_cgroups(engine, image, run, commands)
    elif kernel.is_cgroup_writable([folder.parent for folder in found]):
        for folder in found:
            with suppress(OSError):  # it is not empty yet, or removed already
                folder.rmdir()
    elif image is not None:
        _on_cgroups(engine, image, run, [f"rmdir {quote(str(folder))}" for folder in found])


def _stop_units(engine: docker.DockerClient, image: str | None, run: str, units: Sequence[str]) -> None:
    """Make the host's systemd stop `units`. If this process is not root, or sees no systemd, a container
    does it, which runs the host's own programs, and reaches systemd through the system bus."""
    command = ["sh", "-c", "; ".join(_STOP.format(unit=quote(unit)) for unit in units)]
    if os.getuid() == 0 and _SYSTEMD.exists():
        subprocess.run(command, capture_output=True, check=False)
    elif image is not None:
        with suppress(*ERRORS):
            _as_root(
                engine,
                image,
                run,
                ["chroot", "/host", *command],
                cap_add=["SYS_CHROOT"],
                network_mode="none",
                security_opt=["no-new-privileges:true", "label=disable"],  # SELinux: to reach the bus
                volumes={"/": {"bind": "/host", "mode": "ro"}},
            )


def _on_cgroups(
    engine: docker.DockerClient, image: str, run: str, commands: Sequence[str]
) -> str | None:
    """Run shell commands on this host's control groups as root, without other privileges and network.
    Return the error; None if all succeeded."""
    try:
        _as_root(
            engine,
            image,
            run,
            ["sh", "-c", "; ".join(commands)],
            cap_add=["DAC_OVERRIDE"],  # the folders of hierarchies are closed even to their owner
            network_mode="none",
            volumes={"/sys/fs/cgroup": {"bind": "/sys/fs/cgroup", "mode": "rw"}},
        )
    except ERRORS as error:
        return str(error)
    return None


def _as_root(
    engine: docker.DockerClient, image: str, run: str, command: Sequence[str], **rights: Any
) -> None:
    """Run `command` in a container, as root of this host with only the given `rights`. Raises ERRORS."""
    docker_engine.run_output(engine, image, command, helper_labels(run), user="0:0", **rights)


def helper_labels(run: str) -> dict[str, str]:
    """Labels of a short-lived container of `run`. `testbed down` finds the container by these labels."""
    return {RUN_LABEL: run, COMPONENT_LABEL: "helper"}


def isolate(
    engine: docker.DockerClient,
    image: str,
    run: str,
    network: str,
    found: Mapping[str, tuple[str, str]],
    *,
    here: bool = True,
) -> None:
    """`found`: MAC and IPv4 address, by container id. `here`: False if the containers are certainly on
    another host. Raises HostError."""
    bridge = f"br-{engine.api.inspect_network(network)['Id'][:12]}"
    pids = {container: _engine_pid(engine, container) for container in found}
    ends = [Endpoint(pids[container], *each) for container, each in found.items()]
    try:
        if (
            here
            and kernel.may_change_networks()
            and bridge in (name for _, name in socket.if_nameindex())
            and shutil.which("bridge")
            # Isolation skips ended processes, and processes of another namespace would look ended.
            and all(_is_visible(pids[container], container) for container in found)
        ):
            isolation.isolate(bridge, ends)
        else:
            _as_root(
                engine,
                image,
                run,
                ["python3", "-m", "agents.node.isolation", bridge, *map(str, ends)],
                cap_add=["NET_ADMIN"],
                network_mode="host",
                pid_mode="host",
            )
    except (isolation.IsolationError, OSError, *ERRORS) as error:
        raise HostError(
            f"the devices cannot be isolated from each other ({error}), so the run does not start. This "
            "needs Linux 4.18 or newer with the traffic control filter bpf; else run the devices as "
            "processes: --runtime process"
        ) from error


def put_files(
    engine: docker.DockerClient,
    container: str,
    where: str,
    files: Mapping[str, bytes | Path],
    folders: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Copy bytes, or files of this host, into the folder `where`. `folders`: created first, with the id
    of the user who owns the folder and its files. Large files are copied in pieces."""
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, user in folders.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o700, user, user
                archive.addfile(entry)
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.mode = 0o644
                entry.uid = entry.gid = folders.get(str(Path(name).parent), 0)
                if isinstance(content, Path):
                    entry.size = content.stat().st_size
                    with content.open("rb") as file:
                        archive.addfile(entry, file)
                else:
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        packed.seek(0)
        engine.api.put_archive(container, where, packed)


def read_file(engine: docker.DockerClient, container: str, path: str) -> bytes | None:
    """None if the file does not exist. For small files."""
    try:
        pieces, _ = engine.api.get_archive(container, path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
            file = archive.extractfile(Path(path).name)
            return None if file is None else file.read()
    except NotFound:
        return None


def fetch_folder(engine: docker.DockerClient, container: str, path: str, to: Path) -> None:
    """Replace `to` by the folder `path` of a container, without subfolders. Do nothing if the container
    has no such folder. Raises ERRORS, OSError."""
    partial = to.with_name(f"{to.name}.partial")
    try:
        pieces, _ = engine.api.get_archive(container, path)
    except NotFound:
        return
    with tempfile.TemporaryFile() as packed:
        for piece in pieces:
            packed.write(piece)
        packed.seek(0)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with tarfile.open(fileobj=packed) as archive:
            for entry in archive:
                inside = Path(entry.name)
                # A device's client wrote these: accept plain files only, and none outside the folder.
                if entry.isreg() and len(inside.parts) == 2 and inside.name not in ("", ".."):
                    content = archive.extractfile(entry)
                    if content is not None:
                        with (partial / inside.name).open("wb") as file:
                            shutil.copyfileobj(content, file)
    shutil.rmtree(to, ignore_errors=True)
    partial.rename(to)


def limit(
    engine: docker.DockerClient, container: str, cpu: CpuLimits, memory: int | None = None
) -> None:
    """`memory`: the container's limit in bytes, which must be set again: with the systemd driver on
    cgroup v2, a change of the CPU limits alone permits swap. No effect on a container that has ended."""
    unchanged: dict[str, Any] = {} if memory is None else {"mem_limit": memory, "memswap_limit": memory}
    try:
        engine.api.update_container(container, **_limits(cpu), **unchanged)
    except APIError:
        if exit_code(engine, container) is None:
            raise


def _limits(cpu: CpuLimits) -> dict[str, Any]:
    limits = {
        "cpu_period": cpu.period,
        "cpu_quota": cpu.quota,
        "cpu_shares": cpu.weight,
        "cpuset_cpus": cpu.cpus,
    }
    return {name: value for name, value in limits.items() if value is not None}


def exit_code(engine: docker.DockerClient, container: str) -> int | None:
    """None while the container runs, 137 if it was removed."""
    try:
        state = engine.api.inspect_container(container)["State"]
    except NotFound:
        return _REMOVED_EXIT_CODE
    return None if state["Running"] else int(state["ExitCode"])


def _engine_pid(engine: docker.DockerClient, container: str) -> int:
    """First process, in the engine's namespace; 0 if the container has ended."""
    return int(engine.api.inspect_container(container)["State"]["Pid"])


def pid(engine: docker.DockerClient, container: str) -> int:
    """First process; 0 if the container has ended, or the process is not visible on this host."""
    found = _engine_pid(engine, container)
    return found if _is_visible(found, container) else 0


def _is_visible(process: int, container: str) -> bool:
    """True if the engine's `process` has this id here, and belongs to `container`. An engine with
    another namespace of process ids, as on another host, may mean a different process."""
    try:
        return container in Path(f"/proc/{process}/cgroup").read_text()
    except OSError:
        return False


def published_port(engine: docker.DockerClient, container: str, port: int) -> int | None:
    """Port on 127.0.0.1 that leads to the container's; None if it has ended."""
    bindings = engine.api.inspect_container(container)["NetworkSettings"]["Ports"]
    return int(bindings[f"{port}/tcp"][0]["HostPort"]) if bindings else None


def addresses(engine: docker.DockerClient, network: str) -> dict[str, tuple[str, str]]:
    """MAC and IPv4 address, by container id."""
    attached = engine.api.inspect_network(network)["Containers"]
    return {
        key: (entry["MacAddress"], entry["IPv4Address"].partition("/")[0])
        for key, entry in attached.items()
    }


def networks(engine: docker.DockerClient, run: str | None = None) -> list[dict[str, Any]]:
    """Entries of the engine's list; of all runs if `run` is None."""
    found: list[dict[str, Any]] = engine.api.networks(filters={"label": _label(run)})
    return found


def containers(engine: docker.DockerClient, run: str | None = None) -> list[dict[str, Any]]:
    """Entries of the engine's list, by a single request; of all runs if `run` is None."""
    found: list[dict[str, Any]] = engine.api.containers(all=True, filters={"label": _label(run)})
    return found


def _label(run: str | None) -> str:
    return RUN_LABEL if run is None else f"{RUN_LABEL}={run}"


def belongs_to_swarm(thing: Mapping[str, Any]) -> bool:
    """Then this engine may be only a worker."""
    return SERVICE_LABEL in thing["Labels"] or thing.get("Scope", "local") != "local"


def remove(engine: docker.DockerClient, run: str, directory: RunDirectory | None = None) -> None:
    """Remove all containers, networks and control groups with the run's label, except those of a Swarm.
    Save logs to `directory`.

    A log that cannot be saved does not stop the removal. An object that somebody else has removed, or is
    removing, is ignored. Raises HostError if something could not be removed or saved.
    """
    unsaved: list[str] = []
    with as_host_error("remove the containers"):
        if directory is not None and directory.logs.is_dir():
            unsaved = save_logs(engine, run, directory, belongs_to_swarm)
        image = next((str(one["Image"]) for one in containers(engine, run)), None)
        try:
            remove_containers(engine, run, belongs_to_swarm)
            for network in networks(engine, run):
                if not belongs_to_swarm(network):
                    with _ignore_missing():
                        _remove_network(engine, network["Id"])
        finally:
            remove_cgroups(engine, image, run)
    if unsaved:
        failures = "; ".join(sorted(unsaved))
        raise HostError(f"everything of {run} is removed, but logs could not be saved: {failures}")


def save_logs(
    engine: docker.DockerClient, run: str, directory: RunDirectory, spare: Spare = lambda _: False
) -> list[str]:
    """Append the logs to their files, but not those for which `spare` is true. Return a message for each
    that could not be saved. Raises ERRORS."""
    unsaved: list[str] = []

    def save_log(container: dict[str, Any], logs: Path) -> None:
        path = logs / f"{container['Labels'][COMPONENT_LABEL]}.log"
        try:
            with _ignore_missing():
                text = engine.api.logs(container["Id"])
                with path.open("ab") as file:
                    if _stored_size(text) > 0.98 * LOG_BYTES:  # so full that the engine has cut it
                        file.write(CUT)
                    file.write(text)  # appended, because a resumed run has a log already
        except ERRORS as error:
            unsaved.append(f"{path}: {error}")
        except OSError as error:
            unsaved.append(str(from_os_error(error, path)))

    with ThreadPoolExecutor(PARALLEL) as pool:
        found = [one for one in containers(engine, run) if not spare(one)]
        list(pool.map(partial(save_log, logs=directory.logs), found))
    return unsaved


def remove_containers(engine: docker.DockerClient, run: str, spare: Spare = lambda _: False) -> None:
    """Spare those for which `spare` is true. Raises ERRORS."""
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
    silences = 0

    def remaining() -> list[dict[str, Any]]:
        return [one for one in containers(engine, run) if not spare(one)]

    def end(container: dict[str, Any]) -> None:
        nonlocal deadline, silences
        try:
            with _ignore_missing():
                engine.api.remove_container(container["Id"], v=True, force=True)
                deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
        except requests.Timeout:  # on a slow host, the engine is still working on it
            silences += 1
            if silences > _MAX_SILENCES:
                raise
            deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
        except APIError:  # on an overloaded host, the engine gives up on a container that ends slowly
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)

    with ThreadPoolExecutor(PARALLEL) as pool:
        left = remaining()
        while left:
            list(pool.map(end, left))
            left = remaining()
            if left and time.monotonic() > deadline:
                raise DockerException(f"{len(left)} containers of {run} cannot be removed")


def remove_volumes(engine: docker.DockerClient, run: str) -> None:
    """No container uses them any more. Raises ERRORS."""
    api: Any = engine.api
    for volume in api.volumes(filters={"label": _label(run)})["Volumes"] or ():
        with _ignore_missing():
            api.remove_volume(volume["Name"])


def _stored_size(text: bytes) -> int:
    """Bytes of `text` in the engine's log file, where each line is a JSON object with a time."""
    escaped = json.dumps(text.decode("utf-8", "replace"), ensure_ascii=False).encode()
    return len(escaped) + 5 * sum(map(text.count, (b"<", b">", b"&"))) + 69 * text.count(b"\n")


def _remove_network(engine: docker.DockerClient, network: str) -> None:
    """Retry for some seconds if the engine still counts a container on the network."""
    deadline = time.monotonic() + _NETWORK_RELEASE_TIMEOUT_SECONDS
    while True:
        try:
            return engine.api.remove_network(network)
        except APIError as error:
            if error.status_code != 403 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def logs(engine: docker.DockerClient, run: str, tail: int) -> dict[str, list[str]]:
    """Last `tail` lines, by component."""
    texts: dict[str, list[str]] = {}
    with as_host_error("read the logs"):
        for container in containers(engine, run):
            with _ignore_missing():
                text = engine.api.logs(container["Id"], tail=tail)
                texts[container["Labels"][COMPONENT_LABEL]] = last_lines(text, tail)
    return texts


@contextmanager
def _ignore_missing() -> Iterator[None]:
    """The object does not exist, or is already being removed."""
    try:
        yield
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # removal is already in progress
            raise
