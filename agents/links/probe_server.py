"""Server in the aggregator's container, which the devices use to measure their links.

    python -m agents.links.probe_server COMMAND ...

This command starts the server on the container's address in a child process, and replaces itself by
COMMAND. The packet trains (agents.links.packet_train) use UDP. Devices that share a link are measured
one after the other, over TCP: a device sends a line with the link's name, receives one byte when the
link is reserved for it, and releases the link by closing the connection.
"""

from __future__ import annotations

import os
import socket
import socketserver
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from agents.links import packet_train

PORT = packet_train.PORT
_CONNECT_TIMEOUT_SECONDS = 30.0
_RESERVATION_TIMEOUT_SECONDS = 600.0
"""Maximum time in seconds for which a device waits for a link, and maximum time for which it may then
hold the link."""


def main() -> None:
    address = socket.gethostbyname(socket.gethostname())
    listening = ProbeServer((address, PORT))
    if os.fork() == 0:
        packet_train.listen(address)
        listening.serve_forever()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606


@contextmanager
def reserved_link(host: str, name: str) -> Iterator[None]:
    """Context manager for exclusive use of the link `name`, which the server at `host` grants. Raises
    OSError."""
    with closing(socket.create_connection((host, PORT), _CONNECT_TIMEOUT_SECONDS)) as sock:
        sock.settimeout(_RESERVATION_TIMEOUT_SECONDS)
        sock.sendall(f"{name}\n".encode())
        if not sock.recv(1):
            raise ConnectionError(f"{host} does not grant the link {name} to this device")
        yield


class ProbeServer(socketserver.ThreadingTCPServer):
    """TCP server that grants each shared link to one device at a time."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _ReservationHandler)
        self.link_locks: defaultdict[bytes, threading.Lock] = defaultdict(threading.Lock)
        """Lock of each link, by the name of the link."""


class _ReservationHandler(socketserver.StreamRequestHandler):
    server: ProbeServer
    timeout = _CONNECT_TIMEOUT_SECONDS

    def handle(self) -> None:
        with suppress(OSError):  # the device has disconnected
            if name := self.rfile.readline(512):  # empty if only the connection is tested
                with self.server.link_locks[name]:
                    self.wfile.write(b"!")
                    self.connection.settimeout(_RESERVATION_TIMEOUT_SECONDS)
                    self.rfile.read(1)  # until the device closes the connection


if __name__ == "__main__":
    main()
