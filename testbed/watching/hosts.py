"""The names by which a page of this machine may be asked for.

A name of somebody else's that leads here (DNS rebinding) would let their page read ours: so what is
served on the loopback interface answers requests for its own names only, and none of others' pages.
"""

from __future__ import annotations

HOST = "127.0.0.1"
"""Of this machine, for this machine."""


class OwnHosts:
    """The names of what listens on `port` of the loopback interface."""

    def __init__(self, port: int) -> None:
        self.names = [f"{name}:{port}" for name in (HOST, "localhost", "[::1]")]

    def includes(self, host: str | None, origin: str | None) -> bool:
        """Whether a request with these headers is for us, and from no page but ours."""
        own = origin is None or origin.lower() in [f"http://{name}" for name in self.names]
        return own and host is not None and host.lower() in self.names
