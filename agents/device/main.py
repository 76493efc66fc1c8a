"""The device's init, PID 1 of its container: shapes the link, then runs the client without privileges.

    python -m agents.device.main CONFIG

It holds NET_ADMIN in its own network namespace only; kernel state dies with the container. The client
runs as an ordinary user without capabilities. Telemetry goes over the control network, so that watching
does not disturb what is watched. Fails closed: no client starts on a link that is not as asked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from agents import config, topics
from agents.config import DeviceConfig
from agents.device import link, usage
from agents.transport import Connection, ConnectionFailedError

_POLL = 0.2


def main() -> None:
    cfg = config.load(DeviceConfig, Path(sys.argv[1]))
    try:
        if cfg.link is not None:
            interface = link.interface_towards(socket.gethostbyname(cfg.data_address))
            link.apply(cfg.link, interface)
        sys.exit(_supervise(cfg))
    except (link.LinkError, ConnectionFailedError, OSError) as error:
        sys.exit(f"device {cfg.device}: {error}")


def _supervise(cfg: DeviceConfig) -> int:
    """Run the client to its end, sending telemetry; its exit code, 128 + n where signal n ended it."""
    client = subprocess.Popen(
        [sys.executable, "-m", "agents.client.main", cfg.client_config],
        user=cfg.user,
        group=cfg.user,
        extra_groups=[],
    )

    def forward(number: int, _frame: FrameType | None) -> None:
        client.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    connection = Connection(cfg.broker, [], lambda _: None)
    connection.open()
    topic = topics.Topics(cfg.run).telemetry(cfg.device)
    due = time.monotonic()
    while client.poll() is None:
        if time.monotonic() >= due:
            sample = usage.sample(client.pid)
            connection.publish_lossy(topic, json.dumps({"device": cfg.device, **sample}))
            due = max(due + cfg.telemetry_every, time.monotonic())  # what was missed stays missed
        _reap_orphans(client.pid)
        time.sleep(_POLL)
    connection.close()
    code: int = client.returncode
    return code if code >= 0 else 128 - code


def _reap_orphans(client: int) -> None:
    """PID 1 inherits the orphans of its container; the client itself is waited for by Popen."""
    while True:
        try:
            status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if status is None or status.si_pid == client:
            return
        os.waitpid(status.si_pid, 0)


if __name__ == "__main__":
    main()
