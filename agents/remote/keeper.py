"""Keeper of a real device: starts the device's init, records its exit code, and ends all if the run is
gone.

    python -m agents.remote.keeper SETTINGS

The keeper has a session of its own, so that it outlives the SSH connection that has started it. The
working directory is the device's folder. SETTINGS is JSON: `host` and `port` of the broker; `timeout`,
the seconds without the broker after which the keeper ends the init and removes the folder; `container`,
engine and image of the container in which init and client run, or null; `groups`, folders of the control
groups that limit the init and its client.
The broker counts as present if it proves to be this run's broker (TLS, with the certificate in
`broker.pem`). The keeper needs only Python 3.9.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents.remote import container
from agents.remote.program import (
    EXIT,
    LOCK,
    RequestError,
    lift,
    remove_containers,
    remove_folder,
    replace,
)

CERTIFICATE = "broker.pem"
_LOOK_SECONDS = 15.0
"""Seconds between two connections to the broker."""
_ANSWER_SECONDS = 5.0


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    signals = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    init: subprocess.Popen[bytes] | None = start_init(signals, settings)
    seen = time.monotonic()
    while True:
        arrived = signal.sigtimedwait(signals, min(_LOOK_SECONDS, settings["timeout"]))
        if arrived is not None and arrived.si_signo != signal.SIGCHLD:
            end(init)
            return
        if init is not None and (code := init.poll()) is not None:
            end(init)  # its client, too, if a signal has killed the init
            init = None
            replace(Path(EXIT), str(code))
        if is_present(settings):
            seen = time.monotonic()
        elif time.monotonic() - seen > settings["timeout"]:
            end(init)
            remove_folder(Path.cwd())
            return


def start_init(signals: Any, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the init in a session of its own, or in a container. It ends with the keeper."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for group in settings["groups"]:
            (Path(group) / "cgroup.procs").write_text(str(os.getpid()))

    contained = settings["container"]
    bound = [sys.executable, "-m", "agents.device.bound", str(os.getpid())]
    command = [sys.executable, *container.INIT]
    if contained is not None:
        engine = contained["engine"]
        user = container.user_options(engine)
        command = container.command(engine, contained["image"], Path.cwd(), user)
    return subprocess.Popen(
        [*bound, *command],
        stdin=subprocess.PIPE,  # by its end a container notices the end of the keeper
        start_new_session=True,
        preexec_fn=prepare,
    )


def end(init: subprocess.Popen[bytes] | None) -> None:
    """Kill init and client, and remove their container and limits."""
    if init is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(init.pid, signal.SIGKILL)
    init.wait()
    with suppress(RequestError):  # the controller will try again
        remove_containers(Path.cwd())
    with suppress(RequestError):
        lift(Path.cwd())


def is_present(settings: dict[str, Any]) -> bool:
    context = ssl.create_default_context(cafile=CERTIFICATE)
    where = settings["host"], settings["port"]
    with suppress(OSError), socket.create_connection(where, _ANSWER_SECONDS) as plain:
        context.wrap_socket(plain, server_hostname=settings["host"]).close()
        return True
    return False


if __name__ == "__main__":
    main()
