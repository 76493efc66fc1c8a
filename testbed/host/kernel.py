"""Trials that show whether this kernel has the traffic control that shapes links.

Each trial runs in a temporary network namespace, as in a device's container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
