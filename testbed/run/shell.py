"""Shell or single command in a device's container, connected with the user's terminal."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
import tty
from collections.abc import Callable, Sequence
from typing import Any

from testbed.errors import BadInputError, HostError
from testbed.host import docker_engine
from testbed.plan.agent_configs import CLIENT_USER
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.specifications import COMPONENT_LABEL
from testbed.traits import RUNTIMES, runtime_names


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def connect_terminal(other: socket.socket, resize: Callable[[int, int], None]) -> None:
    """Forward the user's keys to `other`, and data from `other` to the screen, until `other` closes.
    Both are forwarded unchanged. Ctrl-C is forwarded like any key. `resize` is called with the screen's
    rows and columns, now and whenever the size changes."""
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()

    def send_size(*_: object) -> None:
        size = os.get_terminal_size(screen)
        resize(size.lines, size.columns)

    before, on_change = termios.tcgetattr(keys), signal.signal(signal.SIGWINCH, send_size)
    try:
        tty.setraw(keys, termios.TCSANOW)  # keys that were typed before are kept
        send_size()
        while True:
            ready, _, _ = select.select([other, keys], [], [])
            if other in ready:
                output = other.recv(65_536)
                if not output:
                    return
                while output:
                    output = output[os.write(screen, output) :]
            if keys in ready:
                typed = os.read(keys, 4096)
                if not typed:  # the terminal was closed
                    return
                other.sendall(typed)
    finally:
        signal.signal(signal.SIGWINCH, on_change)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


_SHELL = ("sh", "-c", "command -v bash > /dev/null && exec bash; exec sh")


def run(directory: RunDirectory, device: str, command: Sequence[str]) -> int:
    """Open a shell, or run `command`; return its exit code.

    `device`: a device, or a group with one device. Raises BadInputError if the run has no such device,
    or the device has no container on this host.
    """
    manifest = directory.read_manifest()
    runtime = manifest.get("runtime")
    first, *others = directory.devices(device)
    if others:
        raise BadInputError(
            f"{device} is a group of {1 + len(others)} devices of {directory.run}: name a device, such "
            f"as {first}"
        )
    device = first
    if (host := manifest["devices"][device].get("host")) is not None:
        raise BadInputError(f"{device} is a real device: open a shell there with ssh {host}")
    if runtime not in RUNTIMES or not RUNTIMES[runtime].images:
        raise BadInputError(
            f"{directory.run} ran in the {runtime} runtime, whose devices have no containers to open a "
            f"shell in. Use the {runtime_names(lambda t: t.images)} runtime"
        )
    if not command and not is_interactive():
        raise BadInputError(
            "a shell needs a terminal; or give a command, as in testbed shell RUN nano ip a"
        )
    with docker_engine.connect_if_present() as client, executor.as_host_error(f"get into {device}"):
        if client is None:
            raise HostError("No Docker engine answers: see `testbed doctor` for the fix")
        found = [
            one
            for one in executor.containers(client, directory.run)
            if one["Labels"][COMPONENT_LABEL] == device and one["State"] == "running"
        ]
        if not found:
            node = manifest.get("nodes", {}).get(manifest.get("placement", {}).get(device), {})
            where = f"; it was placed on {node['name']}: run this command there" if node else ""
            raise BadInputError(f"{device} of {directory.run} does not run on this host now{where}")
        return _execute(client.api, found[0]["Id"], command)


def _execute(api: Any, container: str, command: Sequence[str]) -> int:
    made = api.exec_create(
        container,
        list(command or _SHELL),
        stdin=not command,
        tty=not command,
        user=f"{CLIENT_USER}:{CLIENT_USER}",
        environment={"TERM": os.environ.get("TERM", "xterm")},
    )["Id"]
    if command:
        for out, err in api.exec_start(made, stream=True, demux=True):
            for text, stream in ((out, 1), (err, 2)):
                while text:
                    text = text[os.write(stream, text) :]
    else:
        answer = api.exec_start(made, tty=True, socket=True)
        try:
            connect_terminal(getattr(answer, "_sock", answer), lambda h, w: api.exec_resize(made, h, w))
        finally:
            answer.close()
    return int(api.exec_inspect(made)["ExitCode"] or 0)
