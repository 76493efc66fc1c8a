"""The other end of what devices measure their links with, in the aggregator's container.

    python -m agents.turns COMMAND ...

answers the devices at this container's address, and becomes COMMAND, with which it ends. Trains of
packets come by UDP (agents.packettrain). Devices that share a link measure in turn, by TCP: after a line
with the link's name comes a byte, once the link is theirs; it is until their connection ends.
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

from agents import packettrain

PORT = packettrain.PORT
_PATIENCE = 30.0
"""Seconds."""
_LONGEST = 600.0
"""Seconds, for a turn and until it comes."""


def main() -> None:
    address = socket.gethostbyname(socket.gethostname())
    listening = Server((address, PORT))
    if os.fork() == 0:
        packettrain.listen(address)
        listening.serve_forever()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606


@contextmanager
def turn(host: str, name: str) -> Iterator[None]:
    """As long as it is this device's turn on the link `name`. Raises OSError."""
    with closing(socket.create_connection((host, PORT), _PATIENCE)) as sock:
        sock.settimeout(_LONGEST)
        sock.sendall(f"{name}\n".encode())
        if not sock.recv(1):
            raise ConnectionError(f"{host} has no turn for this device")
        yield


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.turns: defaultdict[bytes, threading.Lock] = defaultdict(threading.Lock)
        """By name of the link."""


class _Handler(socketserver.StreamRequestHandler):
    server: Server
    timeout = _PATIENCE

    def handle(self) -> None:
        with suppress(OSError):  # the device has given up
            if name := self.rfile.readline(512):  # else it wanted to know whether we are there
                with self.server.turns[name]:
                    self.wfile.write(b"!")
                    self.connection.settimeout(_LONGEST)
                    self.rfile.read(1)  # until the device is done


if __name__ == "__main__":
    main()
