"""Has the Docker engine make what specifications (`testbed.runtimes.docker.containers`) describe."""

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
from testbed.host import cgroups, docker_engine, kernel
from testbed.host.docker_engine import ERRORS
from testbed.rundir.directory import RunDirectory, last_lines
from testbed.runtimes.docker.containers import COMPONENT_LABEL, RUN_LABEL, Container, CpuLimits, Network
from testbed.runtimes.process.log_writer import CUT, LOG_BYTES

Spare = Callable[[Mapping[str, Any]], bool]
"""Whether a container, as the engine lists it, is to be left alone."""
PARALLEL = 2
"""Containers that are started, or removed, at once. More are hardly faster, as the engine does one thing
after the other, and occasionally make it miscount what is on a network, which it then keeps until it is
restarted (moby issue 42119)."""
SERVICE_LABEL = "com.docker.swarm.service.id"
"""The engine's label of the containers of a Swarm's service."""
_NOT_MOUNTED = "bind source path does not exist: "
"""Beginning of the engine's error if the path to mount does not exist for it."""
_SYSTEMD = Path("/run/systemd/system")
"""Exists if systemd is this machine's init."""
_STOP = (
    "busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager "
    "StopUnit ss {unit} replace || systemctl stop {unit}"
)
"""Without a system bus, root has a socket of systemd's."""
_REMOVED_EXIT_CODE = 137
"""Reported for a container that has been removed."""
_NETWORK_RELEASE_TIMEOUT_SECONDS = 3.0
"""After this a network stays that the engine believes to be in use."""
_REMOVAL_TIMEOUT_SECONDS = 60.0
"""Timeout for the removal of one more container, while the engine answers."""
_MAX_SILENCES = 3
"""Times that the engine may be silent for longer than a request may take."""


@contextmanager
def as_host_error(what: str) -> Iterator[None]:
    """Raises HostError in place of what the SDK raises."""
    try:
        yield
    except ERRORS as error:
        if _NOT_MOUNTED in (answer := str(error)):
            path = answer.partition(_NOT_MOUNTED)[2].rstrip('")')
            raise HostError(
                f"the Docker engine sees other files than testbed: it has no {path}. Have the folder of "
                "the runs at the same path for both (docs/guide/faq.md)"
            ) from error
        raise HostError(f"the Docker engine could not {what}: {error}") from error


def create_network(engine: docker.DockerClient, network: Network) -> None:
    engine.api.create_network(
        network.name,
        driver="bridge",
        internal=network.internal,
        options=dict(network.options) or None,
        labels=dict(network.labels),
    )


def start(engine: docker.DockerClient, container: Container) -> str:
    """Create and start `container`; return its id."""
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
        port_bindings=dict.fromkeys(container.published, ("127.0.0.1", None)) or None,
        sysctls=dict(container.sysctls),
        mem_limit=container.memory,
        memswap_limit=container.memory,
        device_requests=_gpus(container.gpus),
        ipc_mode=container.ipc,
        network_mode=None if container.networks else "none",
        cgroup_parent=container.cgroup_parent,
        **_limits(container.cpu),
    )
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
        environment=dict(container.environment) or None,
        ports=list(container.published) or None,
        host_config=host_config,
        networking_config=networking,
        use_config_proxy=False,  # with its password
    )["Id"]
    for other in others:
        api.connect_container_to_network(created, other.network, aliases=list(other.aliases))
    api.start(created)
    return created


def _gpus(uuids: Sequence[str]) -> list[types.DeviceRequest] | None:
    """The request for GPUs, as `docker run --gpus` makes it, with the parts of NVIDIA's driver that CUDA
    and MPS (compute) and NVML (utility) need."""
    if not uuids:
        return None
    wanted = [["gpu", "compute", "utility"]]
    return [types.DeviceRequest(device_ids=list(uuids), capabilities=wanted)]


def cgroup_driver(engine: docker.DockerClient) -> str:
    """`cgroupfs` or `systemd`."""
    return str(engine.api.info().get("CgroupDriver", "cgroupfs"))


def weigh(engine: docker.DockerClient, image: str, run: str, weights: Mapping[str, float]) -> str | None:
    """Give the control groups of `run` CPU `weights`, by group, in those of a single process. Returns
    why that was not possible; None if it was. Raises HostError if the kernel then has others."""
    found = cgroups.weights(run, weights)
    if len(found) < len(weights):
        return "the engine's control groups are not in this host's file system"
    if cgroups.writable([file for file, _ in found]):
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
    """Remove the control groups of `run`, which the engine leaves behind. Those that are slices of
    systemd it would make again, at its next reload at the latest: it is to stop them."""
    seen = [folder.name for folder in cgroups.folders(run)]
    # A controller in a container may not see any.
    slices = sorted({name for name in seen or cgroups.names(run) if name.endswith(cgroups.SLICE)})
    if slices:
        _stop_units(engine, image, run, slices)
    found = cgroups.folders(run)
    if not seen and image is not None:
        commands = [
            f"rmdir {root}/{quote(name)}"
            for name in cgroups.names(run)
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/*")
        ]
        _on_cgroups(engine, image, run, commands)
    elif cgroups.writable([folder.parent for folder in found]):
        for folder in found:
            with suppress(OSError):  # one that is not empty yet, or gone
                folder.rmdir()
    elif image is not None:
        _on_cgroups(engine, image, run, [f"rmdir {quote(str(folder))}" for folder in found])


def _stop_units(engine: docker.DockerClient, image: str | None, run: str, units: Sequence[str]) -> None:
    """Have the host's systemd stop `units`. An ordinary user has no right to, but a container of the
    engine has: one that runs the host's own programs, and reaches systemd by the system bus."""
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
    """Run shell commands on this host's control groups as root, with no other rights and no network.
    Returns what went wrong."""
    try:
        _as_root(
            engine,
            image,
            run,
            ["sh", "-c", "; ".join(commands)],
            cap_add=["DAC_OVERRIDE"],  # the kernel closes the folders of hierarchies even to their owner
            network_mode="none",
            volumes={"/sys/fs/cgroup": {"bind": "/sys/fs/cgroup", "mode": "rw"}},
        )
    except ERRORS as error:
        return str(error)
    return None


def _as_root(
    engine: docker.DockerClient, image: str, run: str, command: Sequence[str], **rights: Any
) -> None:
    """Run `command` as root of this host, with no other `rights` than are given. Raises ERRORS."""
    docker_engine.run_output(engine, image, command, helper(run), user="0:0", **rights)


def helper(run: str) -> dict[str, str]:
    """Labels of a short-lived container of `run`, by which `testbed down` finds it."""
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
    """Isolate the containers `found` (MAC and IPv4 address, by id) on `network`; `here` says whether
    they may be on this host. Raises HostError."""
    bridge = f"br-{engine.api.inspect_network(network)['Id'][:12]}"
    pids = {container: _process(engine, container) for container in found}
    ends = [Endpoint(pids[container], *each) for container, each in found.items()]
    try:
        if (
            here
            and kernel.may_change_networks()
            and bridge in (name for _, name in socket.if_nameindex())
            and shutil.which("bridge")
            # In another namespace one that is not there has not ended, and must not be passed over.
            and all(_is_seen(pids[container], container) for container in found)
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
            f"the devices cannot be isolated from each other ({error}), so the run does not start. It "
            "takes Linux 4.18 or newer with the traffic control filter bpf; or run the devices as "
            "processes: --runtime process"
        ) from error


def put(
    engine: docker.DockerClient,
    container: str,
    where: str,
    files: Mapping[str, bytes | Path],
    folders: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Put `files` (bytes, or a path of this host) into the folder `where` of a container, and make its
    `folders`, each of a user, for whom it is with the files in it. Of a file no more is in memory than a
    piece."""
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
    """The content of a small file in a container; None where there is none."""
    try:
        pieces, _ = engine.api.get_archive(container, path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
            file = archive.extractfile(Path(path).name)
            return None if file is None else file.read()
    except NotFound:
        return None


def fetch_folder(engine: docker.DockerClient, container: str, path: str, to: Path) -> None:
    """Make the folder `to` have the files of the folder `path` of a container, without what is below
    it; as it is, where the container has none. Raises ERRORS, OSError."""
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
                # A device's client has written it: nothing but plain files, and none elsewhere.
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
    """Change its CPU limits; one that has ended is left alone. `memory`, its limit in bytes, stays as it
    is and must be given: with the systemd driver on cgroup v2, a change without it permits swap."""
    kept: dict[str, Any] = {} if memory is None else {"mem_limit": memory, "memswap_limit": memory}
    try:
        engine.api.update_container(container, **_limits(cpu), **kept)
    except APIError:
        if exit_code(engine, container) is None:
            raise


def _limits(cpu: CpuLimits) -> dict[str, Any]:
    """The limits by the SDK's names."""
    limits = {
        "cpu_period": cpu.period,
        "cpu_quota": cpu.quota,
        "cpu_shares": cpu.weight,
        "cpuset_cpus": cpu.cpus,
    }
    return {name: value for name, value in limits.items() if value is not None}


def exit_code(engine: docker.DockerClient, container: str) -> int | None:
    """None while it runs."""
    try:
        state = engine.api.inspect_container(container)["State"]
    except NotFound:
        return _REMOVED_EXIT_CODE
    return None if state["Running"] else int(state["ExitCode"])


def _process(engine: docker.DockerClient, container: str) -> int:
    """Id of its first process where the engine runs; 0 where it has ended."""
    return int(engine.api.inspect_container(container)["State"]["Pid"])


def pid(engine: docker.DockerClient, container: str) -> int:
    """Id of its first process; 0 where it has ended or this host does not see it."""
    found = _process(engine, container)
    return found if _is_seen(found, container) else 0


def _is_seen(process: int, container: str) -> bool:
    """Whether `process` of the engine's is the same here, and of `container`."""
    try:
        return container in Path(f"/proc/{process}/cgroup").read_text()
    except OSError:
        return False


def published_port(engine: docker.DockerClient, container: str, port: int) -> int | None:
    """The port of 127.0.0.1 that leads to the container's `port`; None where it has ended."""
    bindings = engine.api.inspect_container(container)["NetworkSettings"]["Ports"]
    return int(bindings[f"{port}/tcp"][0]["HostPort"]) if bindings else None


def addresses(engine: docker.DockerClient, network: str) -> dict[str, tuple[str, str]]:
    """MAC and IPv4 address of each container on `network`, by its id."""
    attached = engine.api.inspect_network(network)["Containers"]
    return {
        key: (entry["MacAddress"], entry["IPv4Address"].partition("/")[0])
        for key, entry in attached.items()
    }


def networks(engine: docker.DockerClient, run: str | None = None) -> list[dict[str, Any]]:
    """Networks of `run` (of all runs), as the engine lists them."""
    found: list[dict[str, Any]] = engine.api.networks(filters={"label": _label(run)})
    return found


def containers(engine: docker.DockerClient, run: str | None = None) -> list[dict[str, Any]]:
    """Containers of `run` (of all runs), as the engine lists them: one request, no inspection."""
    found: list[dict[str, Any]] = engine.api.containers(all=True, filters={"label": _label(run)})
    return found


def _label(run: str | None) -> str:
    return RUN_LABEL if run is None else f"{RUN_LABEL}={run}"


def is_swarms(thing: Mapping[str, Any]) -> bool:
    """Whether a container or network is a Swarm's, that this engine may be but a worker of."""
    return SERVICE_LABEL in thing["Labels"] or thing.get("Scope", "local") != "local"


def remove(engine: docker.DockerClient, run: str, directory: RunDirectory | None = None) -> None:
    """Remove every container, network and volume of `run`, by label, but for a Swarm's.

    Their logs go to `directory`, where there is one; that one cannot be saved keeps nothing from being
    removed. What is already gone, or removed by another at the same time, is no error. Raises HostError.
    """
    unsaved: list[str] = []
    with as_host_error("remove the containers"):
        if directory is not None and directory.logs.is_dir():
            unsaved = save_logs(engine, run, directory, is_swarms)
        image = next((str(one["Image"]) for one in containers(engine, run)), None)
        try:
            remove_containers(engine, run, is_swarms)
            for network in networks(engine, run):
                if not is_swarms(network):
                    with _if_there():
                        _remove_network(engine, network["Id"])
        finally:
            remove_cgroups(engine, image, run)
    if unsaved:
        failures = "; ".join(sorted(unsaved))
        raise HostError(f"everything of {run} is removed, but logs could not be saved: {failures}")


def save_logs(
    engine: docker.DockerClient, run: str, directory: RunDirectory, spare: Spare = lambda _: False
) -> list[str]:
    """Append the log of each container of `run` to its file in `directory`, but for those to `spare`;
    return what could not be saved, and why. Raises ERRORS."""
    unsaved: list[str] = []

    def save_log(container: dict[str, Any], logs: Path) -> None:
        path = logs / f"{container['Labels'][COMPONENT_LABEL]}.log"
        try:
            with _if_there():
                text = engine.api.logs(container["Id"])
                with path.open("ab") as file:
                    if _stored(text) > 0.98 * LOG_BYTES:  # less is there before anything is cut
                        file.write(CUT)
                    file.write(text)  # appended: a resumed run has a log already
        except ERRORS as error:
            unsaved.append(f"{path}: {error}")
        except OSError as error:
            unsaved.append(str(from_os_error(error, path)))

    with ThreadPoolExecutor(PARALLEL) as pool:
        found = [one for one in containers(engine, run) if not spare(one)]
        list(pool.map(partial(save_log, logs=directory.logs), found))
    return unsaved


def remove_containers(engine: docker.DockerClient, run: str, spare: Spare = lambda _: False) -> None:
    """Remove the containers of `run`, but for those to `spare`, however many these are. Raises
    ERRORS."""
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
    silences = 0

    def found() -> list[dict[str, Any]]:
        return [one for one in containers(engine, run) if not spare(one)]

    def end(container: dict[str, Any]) -> None:
        nonlocal deadline, silences
        try:
            with _if_there():
                engine.api.remove_container(container["Id"], v=True, force=True)
                deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
        except requests.Timeout:  # a slow host: the engine is still at it
            silences += 1
            if silences > _MAX_SILENCES:
                raise
            deadline = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS
        except APIError:  # on an overloaded host the engine may give up on one that is slow to die
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)

    with ThreadPoolExecutor(PARALLEL) as pool:
        left = found()
        while left:
            list(pool.map(end, left))
            left = found()
            if left and time.monotonic() > deadline:
                raise DockerException(f"{len(left)} containers of {run} do not go")


def remove_volumes(engine: docker.DockerClient, run: str) -> None:
    """Remove the volumes of `run`, which no container has any more. Raises ERRORS."""
    api: Any = engine.api
    for volume in api.volumes(filters={"label": _label(run)})["Volumes"] or ():
        with _if_there():
            api.remove_volume(volume["Name"])


def _stored(text: bytes) -> int:
    """Bytes of the engine's log for `text`: each line is a JSON object with its time."""
    escaped = json.dumps(text.decode("utf-8", "replace"), ensure_ascii=False).encode()
    return len(escaped) + 5 * sum(map(text.count, (b"<", b">", b"&"))) + 69 * text.count(b"\n")


def _remove_network(engine: docker.DockerClient, network: str) -> None:
    """Remove a network, trying again while the engine still believes that a container is on it."""
    deadline = time.monotonic() + _NETWORK_RELEASE_TIMEOUT_SECONDS
    while True:
        try:
            return engine.api.remove_network(network)
        except APIError as error:
            if error.status_code != 403 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def logs(engine: docker.DockerClient, run: str, tail: int) -> dict[str, list[str]]:
    """The last `tail` lines of each container of `run`, by its component."""
    texts: dict[str, list[str]] = {}
    with as_host_error("read the logs"):
        for container in containers(engine, run):
            with _if_there():
                text = engine.api.logs(container["Id"], tail=tail)
                texts[container["Labels"][COMPONENT_LABEL]] = last_lines(text, tail)
    return texts


@contextmanager
def _if_there() -> Iterator[None]:
    """Inside, that an object is gone, or is being removed, is no error."""
    try:
        yield
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # removal is already in progress
            raise
