"""Server in the aggregator's container, which the devices use to measure their links.

    python -m agents.links.probe_server COMMAND ...

starts it on the container's address in a child process, and replaces itself by COMMAND. The packet
trains (agents.links.packets) use UDP. A device first waits until a TCP connection to the server is
accepted.
"""

from __future__ import annotations

import os
import socket
import socketserver
import sys

from agents.links import packets

PORT = packets.PORT


def main() -> None:
    address = socket.gethostbyname(socket.gethostname())
    listening = listen(address)
    if os.fork() == 0:
        packets.listen_for_trains(address)
        listening.serve_forever()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606


def listen(address: str) -> socketserver.TCPServer:
    """Accepts connections and closes them. Raises OSError."""
    return _ProbeServer((address, PORT), socketserver.BaseRequestHandler)


class _ProbeServer(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 128


if __name__ == "__main__":
    main()
