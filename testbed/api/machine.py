"""This machine: what it can run, the images in its Docker engine, and the speed of its cores."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import docker
import psutil

from agents import extras
from agents.texts import quantity
from testbed import broker as brokers
from testbed import installing
from testbed.errors import BadInputError, HostError
from testbed.host import cpus, docker_engine, kernel
from testbed.host.cpus import LATENCY
from testbed.host.gpus import Gpus, survey
from testbed.host.nodes import LEAST_ENGINE, manages_swarm
from testbed.images import DEBIAN_IMAGE, Images, building, wheels
from testbed.images.building import StoredImage
from testbed.real_devices.schema import is_destination
from testbed.speed import Calibration
from testbed.speed import calibrate as measured
from testbed.view import View

Status = Literal["ok", "warn", "missing"]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    """`missing` if runs fail, or if common requests of a topology fail; `warn` if runs work with
    restrictions; `ok` if nothing is wrong."""
    detail: str
    fix: str | None = None
    """Command, if one can fix the problem."""


def doctor() -> list[Finding]:
    """Test what this machine can do for runs, and name the commands that fix what is missing. The test
    takes a few seconds and changes nothing."""
    info: Mapping[str, Any] = {}
    try:
        with closing(docker_engine.connect(timeout=5)) as client:
            info = client.info()
            listed = client.api.nodes() if manages_swarm(info) else []
            found = [
                engine(info),
                control_groups(info),
                storage(info),
                image_source(client),
                swarm(info, listed),
            ]
    except docker_engine.NoEngineError as error:
        detail = f"{error.reason}; runs fall back to the process runtime"
        found = [Finding("Docker engine", "missing", detail, error.fix)]
    found += [traffic_control(feature) for feature in kernel.FEATURES]
    found += [tcp(kernel.congestion_control()), gpu(survey(info)), processors(), sleep(), memory()]
    found.append(energy(cpus.rapl_survey()))
    return [*found, disk(info), broker(has_engine=bool(info)), python(), torch(), optional()]


def doctor_hosts(hosts: Sequence[str], *, clean: bool = False) -> list[Finding]:
    """One finding per SSH destination. `clean`: instead, remove the environments and left-over files of
    the testbed there. Raises BadInputError for an invalid destination."""
    from testbed.runtimes.ssh import inspection  # uses a process per device

    for host in hosts:
        if not is_destination(host):
            raise BadInputError(f"{host}: expected user@host, or ssh://[user@]host[:port]")
    found = inspection.clean(hosts) if clean else inspection.describe(hosts)
    return [
        Finding(host, "missing", str(one).removeprefix(f"{host}: "))
        if isinstance(one, HostError)
        else Finding(host, "ok", one)
        for host, one in found.items()
    ]


def engine(info: Mapping[str, Any]) -> Finding:
    """`info`: from `docker info`."""
    name = "Docker engine"
    if (unfit := docker_engine.unfit_reason(info)) is not None:
        detail = f"{unfit.reason}; runs fall back to the process runtime (--runtime process)"
        return Finding(name, "missing", detail, unfit.fix)
    version = f"version {info['ServerVersion']}"
    if not docker_engine.shares_files(info):
        detail = f"{version}; its data folder {info['DockerRootDir']} is not here: it sees other files"
        fix = "mount the folder of the runs at the path that it has for the engine (docs/guide/faq.md)"
        return Finding(name, "warn", detail, fix)
    return Finding(name, "ok", version)


def control_groups(info: Mapping[str, Any]) -> Finding:
    """CPU quota, cpuset, memory, pids."""
    version = f"cgroup v{info.get('CgroupVersion', '1')}"
    limits = {
        "CPU quota": "CpuCfsQuota",
        "cpuset": "CPUSet",
        "memory": "MemoryLimit",
        "pids": "PidsLimit",
    }
    lacking = [name for name, key in limits.items() if not info.get(key)]
    if lacking:
        detail = f"{version}: the kernel cannot limit {', '.join(lacking)}"
        fix = "boot with 'cgroup_enable=memory' and a kernel with CONFIG_CFS_BANDWIDTH"
        return Finding("control groups", "missing", detail, fix)
    if not info.get("SwapLimit"):
        detail = f"{version}: a device over its memory limit may swap instead of being killed"
        fix = "boot with 'cgroup_enable=memory swapaccount=1', or turn swap off: 'sudo swapoff -a'"
        return Finding("control groups", "warn", detail, fix)
    return Finding("control groups", "ok", f"{version}: {', '.join(limits)} can be limited")


def storage(info: Mapping[str, Any]) -> Finding:
    driver = info["Driver"]
    if driver != "vfs":
        return Finding("storage driver", "ok", str(driver))
    fix = (
        """echo '{"storage-driver": "overlay2"}' | sudo tee /etc/docker/daemon.json"""
        " && sudo systemctl restart docker"
    )
    return Finding("storage driver", "warn", "vfs copies the whole image for every device", fix)


def image_source(client: docker.DockerClient) -> Finding:
    """The images must be built, or can be built."""
    name = "images"
    if building.are_built(client):
        return Finding(name, "ok", "built")
    if docker_engine.registry_has(DEBIAN_IMAGE, timeout=3):
        return Finding(name, "ok", f"not built yet; a registry has {DEBIAN_IMAGE}")
    if shutil.which("mmdebstrap"):
        return Finding(name, "ok", "not built yet; no registry answers, so mmdebstrap makes the base")
    detail = "not built yet; no registry answers, and mmdebstrap, which could make the base, is missing"
    return Finding(name, "missing", detail, "sudo apt-get install mmdebstrap uidmap")


def swarm(info: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> Finding:
    """`info`: from `docker info`. `nodes`: empty if the engine is no manager."""
    name, state = "Swarm", info.get("Swarm", {}).get("LocalNodeState", "inactive")
    if state == "inactive":
        return Finding(
            name, "ok", "none: `docker swarm init` makes one, for devices on several machines"
        )
    if not manages_swarm(info):
        detail = f"this engine is a worker ({state}): start runs on a manager"
        return Finding(
            name, "warn", detail, f"docker node promote {info['Swarm'].get('NodeID', 'NODE')}"
        )
    told, away, idle, old = [], [], [], []
    for node in nodes:
        described = node["Description"]
        version = described["Engine"]["EngineVersion"]
        told.append(f"{described['Hostname']} ({version})")
        if node["Status"]["State"] != "ready":
            away.append(described["Hostname"])
        elif node["Spec"]["Availability"] != "active":
            idle.append(node["ID"])
        if tuple(int(part) for part in version.split(".")[:2]) < LEAST_ENGINE:
            old.append(described["Hostname"])
    detail = f"{quantity(len(nodes), 'node')}: {', '.join(told)}"
    if old:
        least = ".".join(map(str, LEAST_ENGINE))
        detail += f"; older than {least}, so their services cannot have NET_ADMIN: {', '.join(old)}"
        return Finding(name, "missing", detail, "sudo apt-get install docker.io (on these nodes)")
    if away:
        detail += f"; not reachable: {', '.join(away)}"
        return Finding(name, "warn", detail, "sudo systemctl start docker (on these nodes)")
    if idle:
        detail += f"; {len(idle)} of them {'accepts' if len(idle) == 1 else 'accept'} no work now"
        return Finding(name, "warn", detail, f"docker node update --availability active {idle[0]}")
    return Finding(name, "ok", detail)


def traffic_control(feature: kernel.Feature) -> Finding:
    works, why = kernel.supports(feature)
    if works:
        untried = f"; {why}" if why else ""
        return Finding(feature.module, "ok", feature.purpose + feature.used + untried)
    if works is None:
        return Finding(feature.module, "warn", f"cannot be tested: {why}", kernel.TRY_FIX)
    return Finding(
        feature.module,
        "missing" if feature.needed else "warn",
        f"not in this kernel ({why}): {feature.purpose} {feature.lacking}",
        f"sudo modprobe {feature.module}, or boot a kernel that has it: "
        "sudo apt-get install linux-image-generic (Ubuntu), linux-image-amd64 (Debian); "
        "sudo dnf install kernel-modules-extra (Fedora, RHEL)",
    )


def tcp(found: str | None) -> Finding:
    """`found`: result of `kernel.congestion_control`."""
    name = "TCP"
    if found is None:
        return Finding(name, "ok", "containers use the congestion control of their host")
    if found == "cubic":
        return Finding(name, "ok", "containers use CUBIC, as Linux devices do")
    names = "$(sysctl -n net.ipv4.tcp_allowed_congestion_control)"
    fix = f'sudo modprobe tcp_cubic; sudo sysctl net.ipv4.tcp_allowed_congestion_control="{names} cubic"'
    detail = "the kernel does not allow CUBIC outside the host's own network: containers use Reno"
    return Finding(name, "warn", detail, fix)


def gpu(found: Gpus) -> Finding:
    name = "GPU"
    if found.lack is not None:
        detail = f"{found.lack.what}; only devices with gpu need it"
        return Finding(name, "warn", detail, found.lack.fix)
    names = ", ".join(one.name for one in found.found)
    if found.lack_of_mps is not None:
        detail = f"{names}: only whole GPUs. {found.lack_of_mps.what}"
        return Finding(name, "warn", detail, found.lack_of_mps.fix)
    if whole := ", ".join(one.name for one in found.found if not one.shares):
        return Finding(name, "ok", f"{names}; MPS cannot limit a device's share of {whole}")
    return Finding(name, "ok", f"{names}: whole GPUs, and fractions by MPS")


def processors() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        detail = "1 core: devices get half of it, because broker and aggregator share it"
        return Finding("cores", "warn", detail, "dilation: auto in the topology stretches time to fit")
    return Finding("cores", "ok", f"{count}, load {os.getloadavg()[0]:.1f}")


def sleep() -> Finding:
    """Sleeping cores wake slowly, which reduces small CPU shares."""
    if os.access(LATENCY, os.W_OK):
        return Finding("core sleep", "ok", "prevented while a run measures")
    detail = f"cannot write {LATENCY}: sleeping cores wake slowly, which reduces small CPU shares"
    return Finding("core sleep", "warn", detail, f'sudo chown "$USER" {LATENCY}')


def energy(found: cpus.RaplSurvey) -> Finding:
    """Runs compare the emulated energy of their devices with that of this host's processors."""
    name = "RAPL"
    if found.unreadable:
        detail = f"may not be read: {', '.join(found.unreadable)}; the host's energy is not measured"
        return Finding(name, "warn", detail, f"sudo chmod a+r {cpus.POWERCAP}/intel-rapl:*/energy_uj")
    if not found.readable:
        return Finding(name, "ok", "none: the host's energy is not measured")
    detail = f"{', '.join(found.readable)}: runs show the host's energy beside that of their devices"
    return Finding(name, "ok", detail)


def memory() -> Finding:
    virtual = psutil.virtual_memory()
    detail = f"{virtual.available / _GIB:.1f} of {virtual.total / _GIB:.1f} GiB available"
    if virtual.available < 2 * _GIB:
        return Finding("memory", "warn", f"{detail}: each device needs about 0.3 GiB")
    return Finding("memory", "ok", detail)


def disk(info: Mapping[str, Any]) -> Finding:
    """Check the space for images, or the disk of the working directory if the engine's disk is not on
    this machine."""
    root = Path(info.get("DockerRootDir", "."))
    usage = shutil.disk_usage(root if root.exists() else Path())
    detail = f"{usage.free / _GIB:.0f} GiB free"
    if usage.free < 5 * _GIB:
        return Finding("disk", "warn", f"{detail}: building the images needs 4", "docker image prune")
    return Finding("disk", "ok", detail)


def broker(*, has_engine: bool) -> Finding:
    """Runtimes with containers bring their own broker."""
    name, fix = "mosquitto", brokers.INSTALL_MOSQUITTO
    if found := brokers.find_mosquitto():
        return Finding(name, "ok", found)
    if brokers.has_amqtt():
        detail = "the process runtime uses amqtt instead, which is slower and may lose messages"
        return Finding(name, "warn", detail, fix)
    detail = "neither Mosquitto nor amqtt is installed: the process runtime cannot run"
    status: Status = "warn" if has_engine else "missing"
    return Finding(name, status, detail, f"{fix}, or {brokers.amqtt_command()}")


def python() -> Finding:
    """pip downloads the libraries of the agents' image. Some environments lack it."""
    if importlib.util.find_spec("pip") is None:
        fix = f"{sys.executable} -m ensurepip"
        return Finding("Python", "missing", f"{platform.python_version()} without pip", fix)
    return Finding("Python", "ok", platform.python_version())


def optional() -> Finding:
    """On `broker`, see there."""
    lacking = {extra for package, extra in extras.EXTRAS.items() if extras.missing(package)}
    known = {*extras.EXTRAS.values()} - {"broker"}
    has, lacks = (", ".join(sorted(one)) or "none" for one in (known - lacking, known & lacking))
    detail = f"installed: {has}; not installed: {lacks}"
    return Finding("extras", "ok", detail)


def torch() -> Finding:
    """Companion packages such as torchvision must match the installed PyTorch, and that must be a CPU
    build."""
    version = importlib.metadata.version("torch")
    if unfit := wheels.unfit_installed():
        names = " and ".join(f"{name} {other}" for name, other in unfit.items())
        fix = wheels.companions_command(*unfit, again=True)
        return Finding("torch", "warn", f"{version}, but {names} is for another version or build", fix)
    if version.endswith("+cpu"):
        return Finding("torch", "ok", version)
    detail = f"{version}: perhaps with CUDA, which takes gigabytes and is useless without a GPU"
    fix = f"pip install --index-url {installing.CPU_INDEX} torch=={version.partition('+')[0]}+cpu"
    return Finding("torch", "warn", detail, fix)


def calibrate(*, force: bool = False) -> Calibration:
    """Return the speed of this host's cores. This speed converts device profiles to CPU shares. It is
    measured once, and again if `force` is set."""
    return measured(refresh=force)


def list_images() -> list[StoredImage]:
    """Return the testbed's images on this engine, the largest first. Raises HostError."""
    with closing(docker_engine.connect()) as client:
        return building.list_images(client)


def build_images(
    *, force: bool = False, gpu: bool = False, on_progress: Callable[[str], None] = lambda _: None
) -> Images:
    """Build missing images and return the tags of all images. `force`: whether to rebuild existing
    images, too. `gpu`: whether to build the images with CUDA, too; these images take gigabytes. Raises
    HostError."""
    with closing(docker_engine.connect()) as client:
        return building.ensure(client, on_progress, force=force, cuda=gpu)


def prune_images(
    *,
    everything: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[StoredImage], int]:
    """Remove unused images of the testbed from this host and from the other nodes of a Swarm.

    `everything`: whether to remove images of the user's other checkouts, own code and Dockerfiles, too.
    `dry_run`: whether to remove nothing. Returns the images that were (or would be) removed from this
    host, and the number of bytes that were freed. Raises HostError.
    """
    from testbed.runtimes.swarm import node_preparation

    with closing(docker_engine.connect()) as client:
        if dry_run:
            return building.removable_images(building.list_images(client), everything=everything), 0
        gone, freed = building.prune_images(client, everything=everything)
        node_preparation.prune_images(client, on_progress)
        return gone, freed


def measure_fidelity(
    runtime: str | None = None, *, runs: str | Path = "runs", view: View | None = None
) -> list[Path]:
    """Measure the fidelity of the emulation on this host, with runs over a grid of CPU shares and links.
    `view` receives the progress of the runs. Returns the run directories. Raises TestbedError."""
    from testbed.run import up

    made = up.run_selfcheck(runtime, Path(runs), View() if view is None else view)
    return [directory.path for directory in made]
