"""Port of this host at which real devices reach the broker."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

from testbed.errors import HostError
from testbed.host import die_with_parent, run_module


def listening(server: tuple[str, int]) -> socket.socket:
    """Raises HostError if the broker could not listen at the address and port `server`."""
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    try:
        return socket.create_server(server, family=family)
    except OSError as error:
        raise HostError(
            f"the broker cannot listen at server.address {server[0]}, server.port {server[1]}: "
            f"{error.strerror}. Write an address of this host (`ip address` lists them), and a free port"
        ) from error


class PublicPort:
    """Process that listens at an address of this host for a broker that cannot, and forwards all
    connections to the broker's Unix socket. TLS is between real devices and the broker."""

    def __init__(self, server: tuple[str, int], path: Path, config: Path, cpus: str) -> None:
        """`server`: address and port to listen at. `path`: the broker's Unix socket. `config`: file to
        write the process's configuration to. `cpus`: cpuset. Raises HostError if nobody can listen at
        `server` on this host."""
        # Through a descriptor, because the path of a Unix socket may have at most 107 characters.
        folder = os.open(path.parent, os.O_PATH)
        try:
            with listening(server) as listener:
                inherited = (listener.fileno(), folder)
                to = {"path": f"/proc/self/fd/{folder}/{path.name}"}
                proxy = {"listen": {"descriptor": listener.fileno()}, "to": to}
                config.write_text(json.dumps({"proxies": [proxy]}), encoding="utf-8")
                module = run_module.command("agents.node.node_agent", str(config))
                self._process = subprocess.Popen(
                    [*die_with_parent.prefix(cpus), *module],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=inherited,
                    start_new_session=True,
                )
        finally:
            os.close(folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises HostError if the process has ended: real devices can no longer reach the broker."""
        if (code := self._process.poll()) is not None:
            raise HostError(f"the process that listens for real devices has ended with exit code {code}")

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
