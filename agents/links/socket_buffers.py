"""Buffers above the limit that the host sets for ordinary processes."""

from __future__ import annotations

import socket
import sys

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
"""Ignore the host's limits, for privileged processes (Linux)."""


def enlarge_receive_buffer(sock: socket.socket, size: int) -> None:
    """Without the privilege, at most the host's limit (net.core.rmem_max)."""
    _enlarge(sock, socket.SO_RCVBUF, _SO_RCVBUFFORCE, size)


def enlarge_send_buffer(sock: socket.socket, size: int) -> None:
    """Without the privilege, at most the host's limit (net.core.wmem_max)."""
    _enlarge(sock, socket.SO_SNDBUF, _SO_SNDBUFFORCE, size)


def _enlarge(sock: socket.socket, option: int, forced: int, size: int) -> None:
    if sys.platform == "linux":
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, size)
        except PermissionError:
            pass
        else:
            return
    sock.setsockopt(socket.SOL_SOCKET, option, size)
