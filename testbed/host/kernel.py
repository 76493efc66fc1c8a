"""Features of this kernel: trials of the traffic control that shapes links, and the control groups of a
run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agents.device.control_group import ControlGroup

# Trials that show whether this kernel has the traffic control that shapes links.
#
# Each trial runs in a temporary network namespace, as in a device's container.

TRY_FIX = "sudo apt-get install iproute2 util-linux, then run 'testbed doctor' as root"


@dataclass(frozen=True, slots=True)
class Feature:
    module: str
    trial: str
    """Shell command that succeeds only if the kernel has the feature."""
    purpose: str
    needed: bool = True
    """Whether a link needs the feature even if only the link's rate is limited."""
    used: str = ""
    """Words after the purpose if the kernel has the feature."""
    lacking: str = "not possible"
    """Words after the purpose if the kernel lacks the feature."""


_ROOT = "tc qdisc add dev lo root"
_INGRESS = (
    "tc qdisc add dev lo ingress && tc filter add dev lo parent ffff: protocol all u32 match u32 0 0"
)

NETEM = Feature(
    "sch_netem",
    f"{_ROOT} netem delay 1ms",
    "delay, jitter and loss",
    needed=False,
    used=" of links: runs use it (shaper netem)",
    lacking="are made by a router (shaper tbf+delay)",
)
FEATURES = (
    Feature("sch_tbf", f"{_ROOT} tbf rate 1mbit burst 2kb latency 50ms", "link rates"),
    Feature("ifb", "ip link add ifb9 type ifb", "downlink rates"),
    Feature("cls_u32", f"{_INGRESS} flowid 1:1", "downlink rates"),
    Feature("act_mirred", f"{_INGRESS} action mirred egress redirect dev lo", "downlink rates"),
    NETEM,
    Feature("sch_htb", f"{_ROOT} handle 1: htb", "links that devices share", needed=False),
)

CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control"
_NET_ADMIN = 12
"""CAP_NET_ADMIN (capabilities(7))."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def congestion_control(allowed: Path = _ALLOWED) -> str | None:
    """CUBIC, the default of Linux, if the kernel allows it outside the host's own network namespace;
    otherwise Reno, which every kernel allows and which is most similar to CUBIC; None if this is not
    Linux.

    Without this setting, containers would inherit the congestion control of the host. On a host with
    BBR, the loss of a link would have hardly any effect.
    """
    try:
        names = allowed.read_text(encoding="ascii").split()
    except OSError:
        return None
    return next((name for name in ("cubic", "reno") if name in names), None)


def supports(feature: Feature) -> tuple[bool | None, str]:
    """Return None if that cannot be tested, and the error or another remark. If this user may not run
    the test, the result comes from the list of the kernel's modules, and the remark says so."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # often not on a user's PATH
    for program in ("unshare", "tc", "ip"):
        if shutil.which(program, path=path) is None:
            return None, f"'{program}' is not installed"
    if os.geteuid() == 0:
        namespace, restricted = ["unshare", "--net"], False
    else:
        # Distributions restrict user namespaces in different ways: some refuse them, others give them no
        # rights, as Ubuntu since 24.04.
        namespace, restricted = ["unshare", "--map-root-user", "--net"], True
    refusal = _try([*namespace, "ip", "link", "set", "lo", "up"], path)
    if refusal is None:
        answer = _try([*namespace, "sh", "-c", feature.trial], path)
        return answer is None, answer or ""
    if restricted and is_listed(feature.module):
        return True, f"listed among this kernel's modules; an ordinary user cannot try it ({refusal})"
    return None, refusal


def is_listed(module: str, modules: Path = Path("/lib/modules")) -> bool:
    """Look at the module lists that are installed with the running kernel."""
    for name in ("modules.dep", "modules.builtin"):
        with suppress(OSError):
            lines = (modules / os.uname().release / name).read_text(encoding="utf-8").splitlines()
            if any(f"/{module}.ko" in line.partition(":")[0] for line in lines):
                return True
    return False


def may_change_networks(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process has NET_ADMIN, which root in a container may lack."""
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return False
    held = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(held >> _NET_ADMIN & 1)


def _try(command: list[str], path: str) -> str | None:
    """Return the last line of the errors; None if `command` succeeds."""
    environment = {**os.environ, "PATH": path, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "no answer in 10 s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("Error: ").rstrip(".")


# Control groups of a run on this host: one for its devices and one for its infrastructure, next to the
# groups of other processes.
#
# The engine makes a group when it starts the group's first container, and never removes the group. A new
# group has the weight of a single process, so two busy processes of the host would take two thirds of a
# core from all devices together. Therefore the testbed raises the weight. The quotas of the containers
# still limit what a group can use.

DEVICES, INFRASTRUCTURE = "devices", "infrastructure"
SLICE = ".slice"

_MOUNTS = Path("/proc/self/mounts")
_WEIGHTS = (("cpu.shares", 1024, 262_144), ("cpu.weight", 100, 10_000))
"""For cgroup v1 and v2: name of the file with a group's CPU weight, weight of a single process, and
maximum weight."""


def cgroup_parent(run: str, group: str, driver: str) -> str:
    """`cgroup_parent` of a container for the engine's cgroup `driver`."""
    if driver == "systemd":  # a dash would make the group a child of another slice
        return f"{_stem(run, group).replace('-', '_')}{SLICE}"
    return f"/{_stem(run, group)}"


def _stem(run: str, group: str) -> str:
    return f"testbed-{run}-{group}"


def cgroup_folders(run: str, *groups: str, mounts: Path = _MOUNTS) -> list[Path]:
    """Folders that exist. With cgroup v1, a group has a folder in each hierarchy."""
    found = cgroup_names(run, *groups)
    return sorted({folder for root in _roots(mounts) for name in found for folder in root.glob(name)})


def cgroup_names(run: str, *groups: str) -> list[str]:
    """Names of folders for both cgroup drivers."""
    return [
        cgroup_parent(run, group, driver).lstrip("/")
        for group in groups or (DEVICES, INFRASTRUCTURE)
        for driver in ("cgroupfs", "systemd")
    ]


def cgroup_weights(run: str, groups: Mapping[str, float]) -> list[tuple[Path, str]]:
    """Return the files that hold CPU weights, each with the text to write into it. `groups`: weight of
    each group, as a multiple of the weight of a single process."""
    found = []
    for group, factor in groups.items():
        for folder in cgroup_folders(run, group):
            for name, single, most in _WEIGHTS:
                if (file := folder / name).exists():
                    found.append((file, str(min(most, round(factor * single)))))
    return found


def cgroup_cpu_seconds(run: str, group: str) -> float | None:
    """None if no hierarchy counts the group's CPU time."""
    for folder in cgroup_folders(run, group):  # if v1 and v2 are mounted, both have the same value
        v1 = (folder / "cpuacct.usage").exists()
        if (used := ControlGroup({"cpuacct" if v1 else "": folder}).cpu_seconds()) is not None:
            return used
    return None


def is_cgroup_writable(paths: list[Path]) -> bool:
    return all(os.access(path, os.W_OK) for path in paths)


def _roots(mounts: Path) -> Iterator[Path]:
    """Mount points of cgroup hierarchies."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, root, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(root)
