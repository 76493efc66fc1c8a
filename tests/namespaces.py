"""A device and a broker in network namespaces of their own, joined by a veth pair. As root."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack

from tests.conftest import unavailable

Holder = subprocess.Popen[str]
"""A process in a network namespace: ends, and the namespace with it, when its standard input closes."""


def inside(holder: Holder) -> list[str]:
    """Return the prefix of a command that runs it in the namespace."""
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]


def joined(stack: ExitStack, program: str) -> tuple[Holder, Holder]:
    """The namespaces of a device, 10.213.0.2, and of a broker, 10.213.0.1, until `stack` ends: each has
    an interface eth0. Skips the test where they, or `program`, cannot be had."""
    if os.geteuid() != 0 or shutil.which(program) is None or shutil.which("nsenter") is None:
        unavailable("netns", f"this takes root, {program}, and nsenter of util-linux")
    device, broker = _holder(stack), _holder(stack)
    veth = f"ip link add eth0 netns {device.pid} type veth peer name eth0 netns {broker.pid}"
    subprocess.run(veth.split(), check=True)
    for holder, address in ((device, "10.213.0.2/24"), (broker, "10.213.0.1/24")):
        for command in (f"ip address add {address} dev eth0", "ip link set eth0 up"):
            subprocess.run([*inside(holder), *command.split()], check=True)
    return device, broker


def _holder(stack: ExitStack) -> Holder:
    pipe = subprocess.PIPE
    command = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    stack.enter_context(holder)  # closes its input and waits
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != "ready\n":
        unavailable("netns", f"no network namespace: {holder.stderr.read().strip()}")
    return holder
